"""The process that the supervisor forked before any heavy import, and that becomes the user's
script.
"""

import atexit
import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from srunddp import telemetry
from srunddp.bootstrap.environment import cpus, mpi
from srunddp.bootstrap.process_group import store, world
from srunddp.bootstrap.process_group.store import process_group_context
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup
from srunddp.errors import PeerError, RendezvousError, SrunddpError, Stopped
from srunddp.run import script as user_script
from srunddp.run import script_end, torch_import
from srunddp.run.command import RunCommand
from srunddp.stage.paths import offline
from srunddp.supervisor import failure
from srunddp.supervisor.failure import FailureKind, ScriptError
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.worker_messages import (
    MpiHasFailed,
    MpiHasNoWorld,
    ReceivedOverMpi,
    ScriptHasFailed,
    ScriptIsDone,
    StartedMpi,
    WorkerMessage,
)
from srunddp.supervisor.worker_process import WorkerPipe, kill_forks_on_exit

_SOON = 0.3  # seconds; ranks that all start now have met by then
_LINE_BUFFERED = 1  # C's _IOLBF in glibc and musl


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What a supervisor has made for its worker before the fork.

    Attributes:
        setup: by :func:`srunddp.bootstrap.rendezvous.rank_setup.bind`.
        script: the user's, as it is on this node; command: how it is to run.
        supervisor: the pipe to it; mask: the signal mask from before the fork.
        output: where descriptors 1 and 2 are to go; dump: for stacks; page: for steps.
    """

    setup: RankSetup
    script: user_script.Script
    command: RunCommand
    supervisor: WorkerPipe
    mask: set[signal.Signals]
    output: OutputRedirect
    dump: StackDump
    page: telemetry.TelemetryPage


def run_worker(context: WorkerContext) -> int:
    """Meet over MPI where that is the channel, wait for the rendezvous, become the script.

    Returns:
        The script's exit code.
    """
    setup = context.setup
    supervisor = context.supervisor
    environment = setup.environment
    # Ctrl-C ends the wait for the others, and not with a traceback.
    interrupt = _end_at(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_SETMASK, context.mask)
    for listening in (setup.held and setup.held.rendezvous, setup.deputy):
        if listening:
            listening.close()
    _prepare_process(context)
    if environment.world_size > 1 and environment.discovery.starts_mpi:
        supervisor.send(_exchange_over_mpi(setup))
    if select.select([supervisor.end], [], [], _SOON)[0]:
        threads = None
    else:
        threads = _import_torch(context)
    info = supervisor.receive()
    if not isinstance(info, RendezvousInfo):  # the supervisor has ended
        os._exit(RendezvousError.exit_code)
    if environment.is_spare:
        return _wait_as_spare(context)
    return _become_script(context, info, threads, interrupt)


def _become_script(
    context: WorkerContext, info: RendezvousInfo, threads: dict[str, str] | None, interrupt: Any
) -> int:
    supervisor = context.supervisor
    environment = context.setup.environment
    _join_world(context, info, threads)
    signal.signal(signal.SIGINT, interrupt)
    worker = os.getpid()
    result = user_script.run(context.script)
    if os.getpid() != worker:  # a fork of the script's own that has run to the script's end
        user_script.print_result(result)
        return result.code
    if result.code:
        _report(result, supervisor, alone=environment.world_size == 1)
    world.wait_for_gloo_threads()
    if result.code == 0:
        _wait_to_leave(supervisor, waits=context.setup.options.max_restarts > 0)
        if context.command.fast_exit:
            _exit_fast()
    elif isinstance(result.error, Stopped):
        _end_at(signal.SIGTERM)
        supervisor.receive()  # until all have stopped: rank 0 hosts the store
    if result.code and mpi.is_running():
        # MPI_Finalize waits for all ranks, and this one has failed.
        exit_without_teardown(result.code)
    return result.code


def _wait_as_spare(context: WorkerContext) -> int:
    """On a spare node until all scripts are over, or until this process is ended for a restart."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)  # as scancel sends to all tasks for a checkpoint
    _wait_to_leave(context.supervisor, waits=True)
    return 0


def _import_torch(context: WorkerContext) -> dict[str, str] | None:
    """While others are late, where the script will do so; the variables for torch's threads, None
    if not imported.
    """
    if (
        context.command.offline
        or context.setup.environment.is_spare
        or "torch" in sys.modules
        or (before := torch_import.modules_before(context.script)) is None
    ):
        return None
    here = context.setup.environment.local_world_size or 1
    bound = cpus.Cpus.here()
    if here > 1:
        threads = cpus.threads(os.environ, here if bound.allowed == bound.machine else 1)
    else:
        threads = {}
    torch_import.run(context.script, before, threads)
    return threads


def _join_world(
    context: WorkerContext, info: RendezvousInfo, threads: dict[str, str] | None
) -> None:
    environ = dict(os.environ)
    store.install(process_group_context(context.setup, info), ahead=torch_import.ahead)
    # Before the script's handlers, so it is called after them.
    atexit.register(script_end.release_objects)
    if info.local_world_size > 1:
        own = cpus.threads(environ, info.sharers)
    else:
        own = {}
    if threads is not None and own and own != threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(*map(int, own.values()))
    if context.setup.options.max_restarts:
        store.surround_import("mpi4py.MPI", partial(_reporting_mpi, context.supervisor))
    if context.command.offline:
        os.environ.update(offline(os.environ) | cpus.threads(os.environ, info.sharers))


@contextlib.contextmanager
def _reporting_mpi(supervisor: WorkerPipe, _: ModuleType) -> Iterator[None]:
    """A launcher of MPI does not let a rank that has started MPI start it again."""
    yield
    supervisor.send(StartedMpi())


def _prepare_process(context: WorkerContext) -> None:
    context.output.in_worker()
    # What C prints reaches a file or a pipe line by line, and is not lost with the process.
    libc = ctypes.CDLL(None)
    for name in ("stdout", "stderr"):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _LINE_BUFFERED, 0)
    context.dump.arm()
    telemetry.install(context.page)
    kill_forks_on_exit(os.getpid())


def _report(result: user_script.ScriptResult, supervisor: WorkerPipe, *, alone: bool) -> None:
    """Tell the supervisor at once: what follows may take time, and the others must not be blamed
    meanwhile.
    """
    error = result.error
    assert error is not None
    said = _script_error(error, result)
    message = ScriptHasFailed(
        cause=said.cause,
        exit_code=result.code,
        weight=int(said.weight),
        category=said.category.value,
        traceback=said.traceback,
        shown=alone,
    )
    if alone:  # a restart's line is to follow
        user_script.print_result(result)
    supervisor.send(message)
    # In a world of more, rank 0's supervisor says it; a hook that the script has set is called all
    # the same.
    sys.excepthook = sys.excepthook if alone else _without_torch(sys.excepthook)
    own = sys.excepthook is not sys.__excepthook__ or isinstance(error, SystemExit)
    if own and not alone and not isinstance(error, Stopped):
        user_script.print_result(result)


def _script_error(error: BaseException, result: user_script.ScriptResult) -> ScriptError:
    """What is to be said of the error that has ended the script."""
    if isinstance(error, Stopped):  # which is a SystemExit, too
        return ScriptError(failure.shortened(str(error)), "", FailureKind.STOPPED)
    if isinstance(error, PeerError):
        return ScriptError(failure.shortened(str(error)), "", FailureKind.SECONDARY)
    if isinstance(error, SrunddpError):
        return ScriptError(failure.shortened(str(error)), "", FailureKind.PRIMARY)
    if isinstance(error, SystemExit):
        return failure.of_exit(error, result.code)
    return failure.of_exception(error, result.trace)


def _without_torch(hook: Any) -> Any:
    """The hook below ``init_process_group``'s, which prints every victim's traceback with the rank
    before each line.
    """
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        below = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)).get(
            "old_hook"
        )
        hook = below.cell_contents if below else sys.__excepthook__
    return hook


def _wait_to_leave(supervisor: WorkerPipe, *, waits: bool) -> None:
    """Rank 0 hosts the store, and leaves after the others. Where ``waits``, or with MPI, a rank
    waits for all.
    """
    _end_at(signal.SIGINT)  # the script has ended, and its handlers have nothing left to end
    _end_at(signal.SIGTERM)
    supervisor.send(ScriptIsDone(waits or mpi.is_running()))
    supervisor.receive()


def _end_at(number: signal.Signals) -> Any:
    """Let a signal end this process, unless it is ignored; returns what it did before."""
    before = signal.getsignal(number)
    if before is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    return before


def _exit_fast() -> NoReturn:
    """End without Python's teardown, which takes torch's modules apart one by one."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        world.wait_for_gloo_threads()
    mpi.finalize()
    atexit.unregister(script_end.release_objects)
    exit_without_teardown(0)


def exit_without_teardown(code: int) -> NoReturn:
    """End as Python does, with threads, exit handlers and output, but without MPI_Finalize and the
    teardown.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # private, as is the next; multiprocessing's children end so too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _exchange_over_mpi(setup: RankSetup) -> WorkerMessage:
    try:
        environment = setup.environment
        name = setup.interface.name
        received = environment.discovery.exchange(
            setup.published, environment, setup.options.timeout, name
        )
        return ReceivedOverMpi(received)
    except mpi.MpiNotLaunchedError as reason:
        return MpiHasNoWorld(str(reason))
    except RendezvousError as error:
        return MpiHasFailed(str(error))
