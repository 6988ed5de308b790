"""PMI-1 on ``PMI_FD``: rank 0 says one thing, the others read it. Nothing but the standard library.

Slurm (``srun --mpi=pmi2``), MPICH's and Intel MPI's Hydra and Flux speak it. Each message is one line of
``key=value`` words. Whoever has said ``init`` must say ``finalize``, or Hydra ends the job.
"""

from __future__ import annotations

import os
import socket

from srunddp.errors import RendezvousError

_KEY = "srunddp"


def broadcast(message: str | None, *, descriptor: int, timeout: float) -> str:
    """Send rank 0's message to all ranks through the launcher's key-value space.

    Args:
        message: what rank 0 says, without blanks; None on the others.
        descriptor: the number in ``PMI_FD``.
        timeout: seconds to wait for the slowest rank.

    Raises:
        RendezvousError: a rank did not come in time, or the launcher does not speak PMI-1 here.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as wire:
            wire.settimeout(timeout)
            return _exchange(wire, message)
    except TimeoutError:
        raise RendezvousError(
            f"PMI's barrier did not open within {timeout:.0f} s",
            expected="every rank to reach it",
            hint="look for the ranks that did not start, or raise --timeout",
        ) from None
    except OSError as error:
        raise RendezvousError(
            f"PMI_FD={descriptor} does not answer: {os.strerror(error.errno or 0)}",
            expected="the launcher's PMI-1 socket, not used before",
            hint="start one srunddp per srun or mpirun; a wrapper must exec it; or use --channel mpi, under srun slurm",
        ) from None


def _exchange(wire: socket.socket, message: str | None) -> str:
    _ask(wire, "cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")
    space = _ask(wire, "cmd=get_my_kvsname", "my_kvsname", "kvsname")
    if message is not None:
        _ask(wire, f"cmd=put kvsname={space} key={_KEY} value={message}", "put_result")
    _ask(wire, "cmd=barrier_in", "barrier_out")
    value = _ask(wire, f"cmd=get kvsname={space} key={_KEY}", "get_result", "value")
    _ask(wire, "cmd=finalize", "finalize_ack")
    return value


def _ask(wire: socket.socket, request: str, answer: str, wanted: str = "cmd") -> str:
    wire.sendall(request.encode() + b"\n")
    line = bytearray()
    while not line.endswith(b"\n"):
        # One byte at a time: what follows the line belongs to the next reader of this shared socket.
        if not (piece := wire.recv(1)):
            raise RendezvousError(
                "PMI closed its socket", expected=f"the answer {answer}", hint="see the launcher's own message"
            )
        line += piece
    text = line.decode(errors="replace").strip()
    words = dict(word.split("=", 1) for word in text.split() if "=" in word)
    if words.get("cmd") != answer or words.get("rc", "0") != "0" or wanted not in words:
        raise RendezvousError(f"PMI answered {text!r}", expected=f"cmd={answer}", hint="use --channel slurm or mpi")
    return words[wanted]
