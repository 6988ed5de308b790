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
from srunddp.stage.offline import offline
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
        script: the user's, as it is on this node.
        command: how it is to run.
        supervisor: the worker's end of the pipe to it.
        mask: the signal mask from before the fork, which the script is to have.
        output: where descriptors 1 and 2 are to go.
        dump: for stacks.
        page: for steps.
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

    Args:
        context: what the supervisor has made before the fork.

    Returns:
        The script's exit code.
    """
    setup = context.setup
    supervisor = context.supervisor
    environment = setup.environment
    # Ctrl-C ends the wait for the others, and not with a traceback. The script gets the handler
    # from before.
    interrupt_handler = _end_at(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_SETMASK, context.mask)
    # Only the supervisor listens there. With a copy open here, a rank that connects after the
    # supervisor's end would wait instead of being refused.
    for listening in (setup.held and setup.held.rendezvous, setup.deputy):
        if listening:
            listening.close()
    _prepare_process(context)
    if environment.world_size > 1 and environment.discovery.starts_mpi:
        supervisor.send(_exchange_over_mpi(setup))
    imported_with = None
    if not select.select([supervisor.end], [], [], _SOON)[0]:  # others are late
        imported_with = _import_torch(context)
    info = supervisor.receive()
    if not isinstance(info, RendezvousInfo):  # the supervisor has ended
        # Without exit handlers, as nothing of the script has begun.
        os._exit(RendezvousError.exit_code)
    if environment.is_spare:
        return _wait_as_spare(context)
    _join_world(context, info, imported_with)
    signal.signal(signal.SIGINT, interrupt_handler)
    return _become_script(context)


def _become_script(context: WorkerContext) -> int:
    """Run the script, tell the supervisor how it has ended, and wait until this rank may leave.

    Returns:
        The script's exit code.
    """
    supervisor = context.supervisor
    worker = os.getpid()
    result = user_script.run(context.script)
    if os.getpid() != worker:  # a fork of the script's own that has run to the script's end
        user_script.print_result(result)
        return result.code
    if result.code:
        if context.setup.environment.world_size == 1:
            _report_alone(result, supervisor)
        else:
            _report_to_others(result, supervisor)
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
    """While other ranks are late, import torch where the script will do so at once.

    How many ranks share this rank's CPUs is known after the rendezvous only, but torch reads the
    number of its threads when it is imported: it gets a likely one.

    Returns:
        The variables with that number, empty for torch's own choice; None where torch was not
        imported here.
    """
    if context.command.offline:  # whose variables are set after the rendezvous
        return None
    if context.setup.environment.is_spare or "torch" in sys.modules:
        return None
    before = torch_import.modules_before(context.script)
    if before is None:
        return None
    threads: dict[str, str] = {}
    ranks_here = context.setup.environment.local_world_size or 1
    if ranks_here > 1:
        bound = cpus.Cpus.here()
        # A rank that is bound to some CPUs likely has them for itself.
        sharers = ranks_here if bound.allowed == bound.machine else 1
        threads = cpus.threads(os.environ, sharers)
    torch_import.run(context.script, before, threads)
    return threads


def _join_world(
    context: WorkerContext, info: RendezvousInfo, imported_with: dict[str, str] | None
) -> None:
    """Give the script its place in the world.

    Args:
        context: what the supervisor has made before the fork.
        info: what rank 0 has told.
        imported_with: the variables that torch was imported with, by :func:`_import_torch`.
    """
    # Before install() exports the number of threads, which counts as the user's afterwards.
    threads: dict[str, str] = {}
    if info.local_world_size > 1:
        threads = cpus.threads(os.environ, info.sharers)
    store.install(process_group_context(context.setup, info), ahead=torch_import.ahead)
    # Before the script's handlers, so it is called after them.
    atexit.register(script_end.release_objects)
    if imported_with is not None and threads != imported_with:
        _set_torch_threads(threads)
    if context.setup.options.max_restarts:
        store.surround_import("mpi4py.MPI", partial(_reporting_mpi, context.supervisor))
    if context.command.offline:
        os.environ.update(offline(os.environ) | cpus.threads(os.environ, info.sharers))


def _set_torch_threads(threads: dict[str, str]) -> None:
    """Correct the number of torch's threads, where torch could be imported at all."""
    if threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(*map(int, threads.values()))


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


def _report_alone(result: user_script.ScriptResult, supervisor: WorkerPipe) -> None:
    """Print the failure of a single process, and tell the supervisor.

    In this order, as the supervisor prints a line on a restart, which is to follow.
    """
    user_script.print_result(result)
    _send_failure(result, supervisor, shown=True)


def _report_to_others(result: user_script.ScriptResult, supervisor: WorkerPipe) -> None:
    """Tell the supervisor of this rank's failure, and let the script's own hook print it.

    The supervisor first, and at once: what the script's hook does may take time, in which other
    ranks fail by this one's failure, and would be blamed. The traceback is printed by rank 0's
    supervisor, if this rank was the first.
    """
    _send_failure(result, supervisor, shown=False)
    sys.excepthook = _without_torch(sys.excepthook)
    if isinstance(result.error, Stopped):
        return
    has_hook = sys.excepthook is not sys.__excepthook__
    if has_hook or isinstance(result.error, SystemExit):
        user_script.print_result(result)


def _send_failure(result: user_script.ScriptResult, supervisor: WorkerPipe, *, shown: bool) -> None:
    assert result.error is not None
    said = _script_error(result.error, result)
    supervisor.send(
        ScriptHasFailed(
            cause=said.cause,
            exit_code=result.code,
            weight=int(said.weight),
            category=said.category.value,
            traceback=said.traceback,
            shown=shown,
        )
    )


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
    """The hook below those of ``init_process_group``, each of which prints every victim's traceback
    with the rank before each line.

    torch has no way to ask for it: the hook is a closure, and the one below it a cell of that.
    """
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        if "old_hook" not in cells:  # another version of torch
            return sys.__excepthook__
        hook = cells["old_hook"].cell_contents
    return hook


def _wait_to_leave(supervisor: WorkerPipe, *, waits: bool) -> None:
    """Tell the supervisor that the script is over, and wait until this process may leave.

    Rank 0 may do so last, as its process hosts the store.

    Args:
        supervisor: the pipe to it.
        waits: whether all ranks wait for each other; with MPI they do in any case.
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
    # mpirun takes a rank that ends without it for one that failed.
    mpi.finalize()
    atexit.unregister(script_end.release_objects)
    exit_without_teardown(0)


def exit_without_teardown(code: int) -> NoReturn:
    """End as Python does, with threads, exit handlers and output, but for two things.

    These are MPI_Finalize and Python's teardown.
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
