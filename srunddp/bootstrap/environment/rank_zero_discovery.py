"""Defines the ways by which the ranks learn where rank 0 listens: one class for each. The list
``DISCOVERIES`` has the preferred way first.

Over PMI-1 and MPI, rank 0 publishes its address. From ``SLURM_*`` or explicit variables, each rank
works the address out. To add a way, write a subclass of ``Discovery`` and put it into
``DISCOVERIES``.

PMI-1 needs only the standard library. Slurm (``srun --mpi=pmi2``), Hydra (MPICH, Intel MPI) and
Flux speak it on the socket ``PMI_FD``. Each message is one line of ``key=value`` words. A process
that has sent ``init`` must send ``finalize``, or Hydra ends the job.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment.types import (
    NO_DISCOVERY,
    Discovery,
    Environment,
    Identity,
    RankZero,
)
from srunddp.errors import ConfigError, RendezvousError, Scope

EXPLICIT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PMI = ("PMI_FD", "PMI_RANK", "PMI_SIZE")
_PMI_KEY = "srunddp"
# Below Linux's ephemeral range (32768 and up), from which the kernel gives ports to any process.
_DERIVED_PORTS = range(20480, 32768)
# The most ports that are derived for rank 0. The other ranks try rank 0's ports in turn, so with
# more ports they would take longer to find it.
_MOST_PORTS = 24


class PmiDiscovery(Discovery):
    """Rank 0 publishes its address by PMI-1, on the socket ``PMI_FD``."""

    name = "pmi"
    hint = "start with `srun --mpi=pmi2` or MPICH's mpirun"
    variable = "PMI_FD"
    publishes = True
    waits_in = "PMI's barrier"
    rules_out_mpi = True

    def why_unavailable(self, identity: Identity, variables: Mapping[str, str]) -> str:
        if identity.master:
            return "explicit variables decide"
        # In a job step all three variables must be set, because detect() compares PMI's rank and
        # size with Slurm's. Other launchers, such as Flux, may have other names for rank and size.
        if missing := [
            name for name in (PMI if identity.step else PMI[:1]) if name not in variables
        ]:
            return f"{missing[0]} is not set"
        # Open MPI has no PMI-1: if its ranks have a PMI_FD, it belongs to a daemon that srun
        # started.
        others = identity.step is None and "OMPI_COMM_WORLD_RANK" in variables
        if others:
            return f"PMI_FD={variables['PMI_FD']} belongs to a process outside {identity.launcher}"
        return ""

    def exchange(
        self, message: str | None, environment: Environment, timeout: float, interface: str = ""
    ) -> str:
        return broadcast_over_pmi(
            message, descriptor=slurm.parse_uint(os.environ, "PMI_FD"), timeout=timeout
        )


class SlurmDiscovery(Discovery):
    """Rank 0 is on the first node of ``SLURM_STEP_NODELIST``, and its ports follow from job, step
    and restart count.
    """

    name = "slurm"
    hint = "start with srun"
    variable = slurm.NODE_LIST
    ports_rule = "those of SLURM_STEP_RESV_PORTS, then derived from job, step and restart count"

    def why_unavailable(self, identity: Identity, variables: Mapping[str, str]) -> str:
        if identity.step:
            return ""
        if slurm.in_step(variables):
            return f"this step's tasks are not the ranks of {identity.launcher}"
        return "not in a step of Slurm"

    def is_last_resort(self, identity: Identity) -> bool:
        return bool(identity.step and identity.step.why_rank0_unknown)

    def rank_zero(self, environment: Environment) -> RankZero:
        assert environment.step
        if unknown := environment.step.why_rank0_unknown:
            raise ConfigError(
                f"{unknown}: SLURM_* alone does not tell where rank 0 is",
                expected="a block, cyclic or plane distribution",
                hint="start with `srun --mpi=pmi2`, which tells it for any placement",
                scope=Scope.NODE,
            )
        node = environment.step.nodes[0]
        return RankZero(node, is_node=True, here=node == environment.node)

    def ports(self, environment: Environment, allowed: range | None) -> list[int]:
        assert environment.step
        if allowed:
            # The firewall may block the ports that Slurm has reserved, so use only allowed ones.
            reserved = []
        else:
            reserved = list(environment.step.reserved_ports)
        within = allowed or _DERIVED_PORTS
        # Not hash(), which differs from process to process: all ranks must arrive at the same
        # ports. Two steps on one node most likely begin at different ports. If they begin at the
        # same one, the later rank 0 takes the next port, and the token distinguishes the steps.
        start = zlib.crc32(environment.step.id.encode()) % len(within)
        return reserved + [
            within[(start + more) % len(within)] for more in range(min(len(within), _MOST_PORTS))
        ]


class MpiDiscovery(Discovery):
    """Rank 0 broadcasts its address over MPI with mpi4py. This needs an MPI_Init, which can crash
    if MPI and Slurm do not match.
    """

    name = "mpi"
    hint = "install mpi4py and start with mpirun or `srun --mpi=pmix`"
    publishes = True
    waits_in = "MPI_Init"
    starts_mpi = True

    def why_unavailable(self, identity: Identity, variables: Mapping[str, str]) -> str:
        if identity.master:
            return "explicit variables decide"
        # Without PMIx from srun, MPI would make each task a world of its own, or MPI_Init would end
        # the process.
        if identity.step and "PMIX_RANK" not in variables:
            return "PMIX_RANK is not set, as without srun --mpi=pmix"
        if mpi.is_installed():
            return ""
        return "mpi4py is not installed here"

    def exchange(
        self, message: str | None, environment: Environment, timeout: float, interface: str = ""
    ) -> str:
        return mpi.broadcast(message, environment.world_size, interface or None)


class EnvDiscovery(Discovery):
    """Rank 0 is at ``MASTER_ADDR`` and ``MASTER_PORT``, which the user has set."""

    name = "env"
    hint = "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    variable = "MASTER_ADDR"
    overrides_launcher = True
    ports_rule = "MASTER_PORT"

    def why_unavailable(self, identity: Identity, variables: Mapping[str, str]) -> str:
        if identity.master:
            return ""
        missing = [name for name in EXPLICIT if name not in variables]
        return "only by --channel env" + (f"; {', '.join(missing)} not set" if missing else "")

    def rank_zero(self, environment: Environment) -> RankZero:
        assert environment.master
        return RankZero(environment.master[0], is_node=False, here=environment.one_node)

    def ports(self, environment: Environment, allowed: range | None) -> list[int]:
        assert environment.master
        return [environment.master[1]]


DISCOVERIES: tuple[Discovery, ...] = (
    PmiDiscovery(),
    SlurmDiscovery(),
    MpiDiscovery(),
    EnvDiscovery(),
)


def discovery_named(name: str | None) -> Discovery:
    """Return the way that has this name for ``--channel``; ``NO_DISCOVERY`` for None or an unknown
    name.
    """
    return next((each for each in DISCOVERIES if each.name == name), NO_DISCOVERY)


def broadcast_over_pmi(message: str | None, *, descriptor: int, timeout: float) -> str:
    """Send rank 0's message to all ranks through the launcher's key-value space.

    Args:
        message: a text without spaces on rank 0; None on the other ranks.
        descriptor: the file descriptor of the launcher's socket, ``PMI_FD``.
        timeout: seconds to wait for the slowest rank.

    Returns:
        Rank 0's message, on all ranks.

    Raises:
        RendezvousError: a rank did not come, or the launcher does not answer.
    """
    try:
        # Use a duplicate, so that PMI_FD stays open: rank_mark() in rank_process.py names its
        # socket later.
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.settimeout(timeout)
            return _exchange(connection, message)
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
            hint=(
                "start one srunddp per srun or mpirun; a wrapper must exec it; or use --channel"
                " mpi, under srun slurm"
            ),
        ) from None


def _exchange(connection: socket.socket, message: str | None) -> str:
    # PMI-1 requires init before any other command.
    _ask(connection, "cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")
    space = _ask(connection, "cmd=get_my_kvsname", "my_kvsname", "kvsname")
    if message is not None:
        _ask(connection, f"cmd=put kvsname={space} key={_PMI_KEY} value={message}", "put_result")
    # PMI-1 promises a value only to a rank that has passed the barrier after the put.
    _ask(connection, "cmd=barrier_in", "barrier_out")
    value = _ask(connection, f"cmd=get kvsname={space} key={_PMI_KEY}", "get_result", "value")
    _ask(connection, "cmd=finalize", "finalize_ack")
    return value


def _ask(connection: socket.socket, request: str, answer: str, wanted: str = "cmd") -> str:
    connection.sendall(request.encode() + b"\n")
    line = bytearray()
    while not line.endswith(b"\n"):
        # One byte at a time: what follows the line belongs to the next reader of this shared
        # socket.
        if not (piece := connection.recv(1)):
            raise RendezvousError(
                "PMI closed its socket",
                expected=f"the answer {answer}",
                hint="see the launcher's own message",
            )
        line += piece
    text = line.decode(errors="replace").strip()
    words = dict(word.split("=", 1) for word in text.split() if "=" in word)
    # Not every answer carries rc: barrier_out often does not.
    if words.get("cmd") != answer or words.get("rc", "0") != "0" or wanted not in words:
        raise RendezvousError(
            f"PMI answered {text!r}", expected=f"cmd={answer}", hint="use --channel slurm or mpi"
        )
    return words[wanted]
