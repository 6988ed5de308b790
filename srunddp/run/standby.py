"""``--warm-restarts``: the worker of the next start is there ahead, and imports torch once the
training runs.

It is forked as a worker is, so nothing is forked after torch was imported. The supervisor of the
next start, which is the same process, hands it what a worker has: descriptors, under their numbers
there, and the rest by a file in memory.
"""

import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from srunddp.run import torch_import
from srunddp.run.worker import WorkerContext, run_worker
from srunddp.run.worker_exec import pack, unpack
from srunddp.supervisor import signals
from srunddp.supervisor.worker_process import LONGEST, WorkerPipe

_DESCRIPTORS = 128  # a worker's have lower numbers, those that torch opens higher ones
_LOOK_EVERY = 1.0
# Seconds after the worker's import of torch; where nothing counts steps, it trains then.
_SETTLED = 10.0
_READY_WITHIN = 10.0


def start(pid: int, descriptor: int, context: WorkerContext) -> bool:
    """In the next supervisor: let it become the worker, by a pipe to it; False where it cannot, and
    has been killed.
    """
    state, inherited = pack(context)
    ready = False
    # It may have ended, as for want of memory.
    with socket.socket(fileno=descriptor) as end, suppress(OSError):
        if max(inherited) < _DESCRIPTORS:
            socket.send_fds(end, [json.dumps(inherited).encode()], [state, *inherited])
            end.settimeout(_READY_WITHIN)
            ready = bool(end.recv(LONGEST))
    os.close(state)
    if ready:
        context.supervisor.end.close()
    else:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return ready


def fork_standby(context: WorkerContext, theirs: WorkerPipe) -> int:
    """Fork it, from a supervisor that has forked its worker; does not return in it. Returns its
    process id.
    """
    supervisor = os.getpid()
    if pid := os.fork():
        theirs.end.close()
        return pid
    signals.die_with_parent(supervisor)
    own = fcntl.fcntl(theirs.end.fileno(), fcntl.F_DUPFD_CLOEXEC, _DESCRIPTORS)
    reserved = _reserve_descriptors()
    return _serve(socket.socket(fileno=own), context, reserved)


def _reserve_descriptors() -> set[int]:
    """Let the numbers that are not from before this program be /dev/null: what is opened from now
    on has higher ones.

    What the supervisor has opened is closed by that: whoever waits for its end does not wait for
    us.
    """
    null = os.open(os.devnull, os.O_RDWR)
    opened = [
        int(each)
        for each in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{each}")
    ]
    reserved = {*range(3, _DESCRIPTORS)} - {
        number for number in opened if os.get_inheritable(number)
    }
    for number in reserved - {null}:
        os.dup2(null, number, inheritable=False)
    return reserved


def _serve(end: socket.socket, context: WorkerContext, reserved: set[int]) -> NoReturn:
    """Wait for what the worker says of its import of torch, and do the same; then wait for the next
    start.
    """
    known: dict[str, Any] = {}
    due = 0.0
    imported = False
    while True:
        if select.select([end], [], [], _LOOK_EVERY)[0]:
            data, descriptors, _, _ = socket.recv_fds(end, LONGEST, _DESCRIPTORS)
            if descriptors:
                _receive(end, descriptors, json.loads(data), reserved)
                following = unpack(descriptors[0])
                if imported and following.standby:
                    following.standby.send(known)
                sys.exit(run_worker(following))
            if not data:
                os._exit(0)
            known = json.loads(data)
            due = time.monotonic() + _SETTLED
        if known and not imported and (context.page.has_steps() or time.monotonic() >= due):
            torch_import.run(context.script, **known)
            imported = True


def _receive(
    end: socket.socket, received: Sequence[int], numbers: Sequence[int], reserved: set[int]
) -> None:
    """Give the worker's descriptors the numbers that they have in the supervisor; the first has
    none.
    """
    signals.read()  # those from before, which the supervisor has had as well
    end.send(b"{}")
    end.close()
    for descriptor, number in zip(received[1:], numbers, strict=True):
        os.dup2(descriptor, number, inheritable=False)
        os.close(descriptor)
    for number in reserved.difference(numbers):
        os.close(number)
