"""The process that the supervisor forked before any heavy import, and that becomes the user's script."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

from srunddp import telemetry
from srunddp.bootstrap.environment import cpus, mpi
from srunddp.bootstrap.process_group import store, world
from srunddp.bootstrap.process_group.store import process_group_context
from srunddp.bootstrap.rendezvous.meet import RankSetup
from srunddp.bootstrap.rendezvous.protocol import RendezvousInfo
from srunddp.errors import PeerError, RendezvousError, SrunddpError, Stopped
from srunddp.run import script as user_script
from srunddp.stage.paths import offline
from srunddp.supervisor import failure, process_tree
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.worker_process import WorkerPipe

_LINE_BUFFERED = 1  # C's _IOLBF in glibc and musl


@dataclass(frozen=True)
class WorkerContext:
    """What a supervisor has made for its worker before the fork.

    Attributes:
        supervisor: the pipe to it; mask: the signal mask from before the fork.
        output: where descriptors 1 and 2 are to go; dump: for stacks; marks: for steps.
        fast_exit: end without taking Python's objects down.
        offline: export what :func:`srunddp.stage.paths.offline` says.
    """

    supervisor: WorkerPipe
    mask: set[signal.Signals]
    output: OutputRedirect
    dump: StackDump
    marks: telemetry.TelemetryPage
    fast_exit: bool = False
    offline: bool = False

    @property
    def descriptors(self) -> list[int]:
        """All that the worker needs, but for sockets."""
        return [self.dump.descriptor, self.marks.descriptor, *self.output.descriptors]


def run_worker(prepared: RankSetup, script: user_script.Script, bench: WorkerContext) -> int:
    """Meet over MPI where that is the channel, wait to be told, become the script.

    Args:
        prepared: by :func:`srunddp.bootstrap.rendezvous.meet.bind`; script: the user's.

    Returns:
        The script's exit code.
    """
    environment, held, supervisor = prepared.environment, prepared.held, bench.supervisor
    interrupt = _end_at(signal.SIGINT)  # Ctrl-C ends the wait for the others, and not with a traceback
    signal.pthread_sigmask(signal.SIG_SETMASK, bench.mask)
    if held:
        held.line.close()
    _set_up(bench)
    if environment.world_size > 1 and environment.discovery.starts_mpi:
        supervisor.send(_told_by_mpi(prepared))
    answer = supervisor.receive()
    if answer is None:
        os._exit(RendezvousError.exit_code)
    _take_place(prepared, RendezvousInfo(**answer), bench)
    signal.signal(signal.SIGINT, interrupt)
    worker, ending = os.getpid(), user_script.run(script)
    if os.getpid() != worker:  # a fork of the script's own that has run to the script's end
        user_script.print_result(ending)
        return ending.code
    if ending.code:
        _report(ending, supervisor, alone=environment.world_size == 1)
    world.wait_for_gloo_threads()
    if ending.code == 0:
        _wait_to_leave(supervisor)
        if bench.fast_exit:
            _leave_fast()
    elif isinstance(ending.error, Stopped):
        _end_at(signal.SIGTERM)
        supervisor.receive()  # until all have stopped: rank 0 hosts the store
    if ending.code and mpi.is_running():
        _end_without_teardown(ending.code)  # MPI_Finalize waits for all ranks, and this one has failed
    return ending.code


def _take_place(prepared: RankSetup, meeting: RendezvousInfo, bench: WorkerContext) -> None:
    store.install(process_group_context(prepared, meeting))
    if bench.offline:
        os.environ.update(offline(os.environ) | cpus.threads(os.environ, meeting.sharers))


def _set_up(bench: WorkerContext) -> None:
    bench.output.in_worker()
    # What C prints reaches a file or a pipe line by line, and is not lost with the process.
    libc = ctypes.CDLL(None)
    for name in ("stdout", "stderr"):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _LINE_BUFFERED, 0)
    bench.dump.arm()
    telemetry.install(bench.marks)
    process_tree.kill_forks_on_exit(os.getpid())


def _report(ending: user_script.ScriptResult, supervisor: WorkerPipe, *, alone: bool) -> None:
    """Tell the supervisor at once: what follows may take time, and the others must not be blamed meanwhile."""
    error = ending.error
    if isinstance(error, Stopped):
        cause, trace, weight = failure.shortened(str(error)), "", failure.FailureKind.STOPPED
    elif isinstance(error, SystemExit):
        cause, trace, weight = failure.of_exit(error, ending.code)
    elif isinstance(error, SrunddpError):
        echo = isinstance(error, PeerError)
        weight = failure.FailureKind.ECHO if echo else failure.FailureKind.PRIMARY
        cause, trace = failure.shortened(str(error)), ""
    else:
        assert error is not None
        cause, trace, weight = failure.of_exception(error, ending.trace)
    told = {"cause": cause, "traceback": trace, "weight": weight, "exit_code": ending.code, "shown": alone}
    supervisor.send({"failure": told})
    # In a world of more, the verdict says it; a hook that the script has set is called all the same.
    sys.excepthook = sys.excepthook if alone else _without_torch(sys.excepthook)
    own = sys.excepthook is not sys.__excepthook__ or isinstance(error, SystemExit)
    if alone or (own and not isinstance(error, Stopped)):
        user_script.print_result(ending)


def _without_torch(hook: Any) -> Any:
    """The hook below ``init_process_group``'s, which prints every victim's traceback with the rank before each line."""
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        below = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)).get("old_hook")
        hook = below.cell_contents if below else sys.__excepthook__
    return hook


def _wait_to_leave(supervisor: WorkerPipe) -> None:
    """Rank 0 hosts the store: it leaves after the others, or they would miss it."""
    _end_at(signal.SIGINT)  # the script has ended, and its handlers have nothing left to end
    _end_at(signal.SIGTERM)
    supervisor.send({"done": True})
    supervisor.receive()


def _end_at(number: signal.Signals) -> Any:
    """Let a signal end this process, unless it is ignored; returns what it did before."""
    before = signal.getsignal(number)
    if before is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    return before


def _leave_fast() -> NoReturn:
    """End without Python's teardown, which takes torch's modules apart one by one."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        world.wait_for_gloo_threads()
    mpi.finalize()
    _end_without_teardown(0)


def _end_without_teardown(code: int) -> NoReturn:
    """End as Python does, with threads, exit handlers and output, but without MPI_Finalize and the teardown."""
    threading._shutdown()  # type: ignore[attr-defined]  # private, as is the next; multiprocessing's children end so too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _told_by_mpi(prepared: RankSetup) -> dict[str, str]:
    try:
        environment, name = prepared.environment, prepared.interface.name
        told = environment.discovery.exchange(prepared.told, environment, prepared.options.timeout, name)
        return {"told": told}
    except mpi.MpiNotLaunchedError as reason:
        return {"no_world": str(reason)}
    except RendezvousError as error:
        return {"failed": str(error)}
