"""The worker: the supervisor forks it before any heavy import, and it becomes the user's script."""

import atexit
import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
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
from srunddp.run import script_end, teardown, torch_import
from srunddp.run.command import RunCommand
from srunddp.run.signal_notes import SignalNotes
from srunddp.stage.offline import offline
from srunddp.supervisor import activity, failure, signals
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
from srunddp.util.import_hook import surround_import
from srunddp.util.quick_dataclass import dataclass

_SOON = 0.3  # seconds that a rendezvous takes at most if all ranks start at the same time
_LINE_BUFFERED = 1  # C's _IOLBF in glibc and musl
# Modules with which ranks may work together without a process group of torch.
_OTHER_WAYS = ("horovod", "jax")


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What the supervisor prepares for its worker before the fork.

    Attributes:
        setup: This rank's environment, options, interface and sockets.
        script: The user's script, with its path on this node.
        command: The options of the command line.
        supervisor: The worker's end of the pipe to the supervisor.
        mask: The signal mask from before the fork, which the script gets.
        output: Where the script's standard output and standard error go.
        dump: Writes the worker's stacks on request.
        page: The shared page in which steps are counted.
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
    """Exchange rank 0's address if MPI is the channel, wait for the rendezvous, then run the
    script.

    Args:
        context: What the supervisor has prepared before the fork.

    Returns:
        The script's exit code.
    """
    setup = context.setup
    supervisor = context.supervisor
    environment = setup.environment
    # Let Ctrl-C end the wait for the other ranks without a traceback. Python's handler is set again
    # before the script begins.
    interrupt_handler = _end_at(signal.SIGINT)
    signal_notes = SignalNotes(supervisor)
    signal_notes.set_handlers()
    signal.pthread_sigmask(signal.SIG_SETMASK, context.mask)
    # Close the worker's copies of the sockets on which only the supervisor listens. While a copy is
    # open, a rank that connects after the supervisor has ended would wait instead of being refused.
    for listening in (setup.held and setup.held.rendezvous, setup.deputy, setup.standing):
        if listening:
            listening.close()
    _prepare_process(context)
    if environment.world_size > 1 and environment.discovery.starts_mpi:
        supervisor.send(_exchange_over_mpi(setup))
    imported_with = None
    if not select.select([supervisor.end], [], [], _SOON)[0]:  # other ranks have not started yet
        imported_with = _import_torch(context)
    info = supervisor.receive()
    if not isinstance(info, RendezvousInfo):  # the supervisor has ended
        # Skip the exit handlers, which only matter after the script has begun.
        os._exit(RendezvousError.exit_code)
    if environment.is_spare:
        return _wait_as_spare(context)
    _join_world(context, info, imported_with)
    signal.signal(signal.SIGINT, interrupt_handler)
    signal_notes.remove_handlers()
    surround_import("torch", lambda _: signal_notes.around_import())
    return _become_script(context)


def _become_script(context: WorkerContext) -> int:
    """Run the script, tell the supervisor how the script has ended, and wait until this rank may
    leave.

    Returns:
        The script's exit code.
    """
    supervisor = context.supervisor
    worker = os.getpid()
    context.output.leave_to_script()
    result = user_script.run(context.script)
    if os.getpid() != worker:  # this is a process that the script has forked, and not the worker
        user_script.print_result(result)
        return result.code
    if result.code:
        if context.setup.environment.world_size == 1:
            _report_alone(result, supervisor)
        else:
            _report_to_others(result, supervisor)
    world.wait_for_gloo_threads()
    if result.code == 0:
        _wait_for_threads(context.page)
        _note_if_alone(context.page)
        _wait_to_leave(supervisor, waits=context.setup.options.max_restarts > 0)
        if context.command.fast_exit:
            _exit_fast()
    elif isinstance(result.error, Stopped):
        _end_at(signal.SIGTERM)
        supervisor.receive()  # until all ranks have stopped, because rank 0 hosts the store
    if result.code and mpi.is_running():
        # MPI_Finalize would wait for all ranks, but after this rank's failure some of them may
        # never call it.
        exit_without_teardown(result.code)
    return result.code


def _note_if_alone(page: telemetry.TelemetryPage) -> None:
    """Note on the page that the script has run without other ranks, if it has used torch and
    nothing shows that it has worked with other ranks.
    """
    if "torch" not in sys.modules or not sys.modules.keys().isdisjoint(_OTHER_WAYS):
        return
    if _script_has_mpi() or _has_had_children():
        return
    # If the script has made a process group with its own store, and not by srunddp's, this was not
    # noticed when the group was created.
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        page.join_others()
    page.conclude_alone()


def _has_had_children() -> bool:
    """Return whether this process has started processes that may have worked with each other as
    ranks, as those of mp.spawn do. If a DataLoader of torch has had workers, this is False.
    """
    loader = sys.modules.get("torch.utils.data._utils.signal_handling")
    if getattr(loader, "_SIGCHLD_handler_set", False):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # No child exists any more. If there were any, the kernel has kept their peak memory, which
        # is not 0.
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
    return True


def _script_has_mpi() -> bool:
    """Return whether any module other than those of mpi4py and srunddp has imported mpi4py."""
    if "mpi4py" not in sys.modules:
        return False
    return any(
        not name.startswith(("mpi4py", "srunddp"))
        and not {"MPI", "mpi4py"}.isdisjoint(vars(module))
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
    )


def _wait_for_threads(page: telemetry.TelemetryPage) -> None:
    """Wait for the script's non-daemon threads, as Python does at exit. Meanwhile no step is
    expected.

    A signal handler of the script may raise an exception, which ends the wait. The exception is
    printed and then ignored, as Python does at exit.
    """
    page.pause()
    try:
        # This function is private, but it is the one that Python itself calls. join() would wait
        # forever for the idle threads of a thread pool, which only this function tells to end.
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        if sys.stderr is None:
            return
        print(f"Exception ignored in: {threading!r}", file=sys.stderr)
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)


def _wait_as_spare(context: WorkerContext) -> int:
    """Wait on a spare node until all scripts are over, or until a restart ends this process."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        # Ignore these signals, because scancel may send them to all tasks to ask for a checkpoint,
        # and without a handler they would end this process.
        signal.signal(number, signal.SIG_IGN)
    _wait_to_leave(context.supervisor, waits=True)
    return 0


def _import_torch(context: WorkerContext) -> dict[str, str] | None:
    """Import torch while other ranks have not started yet, if the script begins with an import of
    torch.

    torch reads its number of threads from variables when it is imported. The right number is known
    only after the rendezvous, which tells how many ranks share this rank's CPUs. Until then a
    likely number is used.

    Returns:
        The variables with the likely number, empty to let torch choose; None if torch was not
        imported here.
    """
    if context.command.offline:  # the variables of --offline are set only after the rendezvous
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
        # If the affinity mask lacks some of the machine's CPUs, the other ranks of the node most
        # likely have other CPUs.
        sharers = ranks_here if bound.allowed == bound.machine else 1
        threads = cpus.threads(os.environ, sharers)
    torch_import.run(context.script, before, threads)
    return threads


def _join_world(
    context: WorkerContext, info: RendezvousInfo, imported_with: dict[str, str] | None
) -> None:
    """Prepare what ``srunddp.init()`` needs, and what the end of the script needs. Called after the
    rendezvous.

    Args:
        context: What the supervisor has prepared before the fork.
        info: Rank 0's answer at the rendezvous.
        imported_with: The thread variables with which :func:`_import_torch` imported torch; None if
            it did not import it.
    """
    # Compute the number of threads before install() exports it: an exported number counts as the
    # choice of the user.
    threads: dict[str, str] = {}
    if info.local_world_size > 1:
        threads = cpus.threads(os.environ, info.sharers)
    store.install(process_group_context(context.setup, info), ahead=torch_import.ahead)
    # Register this before the script registers its exit handlers, so that it runs after them.
    atexit.register(script_end.release_objects)
    if imported_with is not None and threads != imported_with:
        _set_torch_threads(threads)
    if context.setup.options.max_restarts:
        surround_import("mpi4py.MPI", partial(_reporting_mpi, context.supervisor))
    if context.setup.environment.world_size > 1:
        environment = context.setup.environment
        teardown.watch(f"rank {environment.rank} on {environment.node}")
    if context.command.offline:
        os.environ.update(offline(os.environ) | cpus.threads(os.environ, info.sharers))


def _set_torch_threads(threads: dict[str, str]) -> None:
    """Set the number of threads in torch, if torch was imported successfully. Without ``threads``,
    its number stays as it is.
    """
    if threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(*map(int, threads.values()))


@contextlib.contextmanager
def _reporting_mpi(supervisor: WorkerPipe, _: ModuleType) -> Iterator[None]:
    """Tell the supervisor that the script has started MPI, because MPI cannot be started again."""
    yield
    supervisor.send(StartedMpi())


def _prepare_process(context: WorkerContext) -> None:
    context.output.in_worker()
    # Make C code write each line at once, so that less of its output is lost if this process is
    # killed.
    libc = ctypes.CDLL(None)
    for name in ("stdout", "stderr"):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _LINE_BUFFERED, 0)
    context.dump.arm()
    context.page.never_free()
    telemetry.install(context.page)
    activity.arm(context.page.answer_probe)
    kill_forks_on_exit(os.getpid())


def _report_alone(result: user_script.ScriptResult, supervisor: WorkerPipe) -> None:
    """Print the failure of a single process, then tell the supervisor.

    Printing comes first because, if a restart follows, the supervisor prints a line about the
    restart, which must come after the failure.
    """
    user_script.print_result(result)
    _send_failure(result, supervisor, shown=True)


def _report_to_others(result: user_script.ScriptResult, supervisor: WorkerPipe) -> None:
    """Tell the supervisor of this rank's failure. Then print the failure here if the script has set
    an excepthook or has ended by SystemExit; otherwise it is rank 0 that prints the root cause.

    The supervisor is told first, because the excepthook may take time. Meanwhile other ranks would
    fail because of this rank, and one of them could be taken for the root cause.
    """
    is_told = _send_failure(result, supervisor, shown=False)
    sys.excepthook = _without_torch(sys.excepthook)
    if isinstance(result.error, Stopped):
        return
    has_hook = sys.excepthook is not sys.__excepthook__
    # If the supervisor could not be told, because the script has closed the pipe, print the error
    # here, because nobody else can.
    if has_hook or isinstance(result.error, SystemExit) or not is_told:
        user_script.print_result(result)


def _send_failure(result: user_script.ScriptResult, supervisor: WorkerPipe, *, shown: bool) -> bool:
    """Tell the supervisor of this rank's failure; return whether that was possible. ``shown`` says
    whether the failure was printed already.
    """
    assert result.error is not None
    said = _script_error(result.error, result)
    return supervisor.send(
        ScriptHasFailed(
            cause=said.cause,
            exit_code=result.code,
            weight=int(said.weight),
            category=said.category.value,
            traceback=said.traceback,
            shown=shown,
            failed_import=said.failed_import,
            is_interrupt=isinstance(result.error, KeyboardInterrupt),
        )
    )


def _script_error(error: BaseException, result: user_script.ScriptResult) -> ScriptError:
    """Return what the supervisor is told about the error that has ended the script: cause, kind,
    category and traceback.
    """
    if isinstance(error, Stopped):  # which is also a SystemExit
        return ScriptError(failure.shortened(str(error)), "", FailureKind.STOPPED)
    if isinstance(error, PeerError):
        return ScriptError(failure.shortened(str(error)), "", FailureKind.SECONDARY)
    if isinstance(error, SrunddpError):
        category = failure.category_of(error)
        return ScriptError(failure.shortened(str(error)), "", FailureKind.PRIMARY, category)
    if isinstance(error, SystemExit):
        return failure.of_exit(error, result.code)
    return failure.of_exception(error, result.trace)


def _without_torch(hook: Any) -> Any:
    """Return the excepthook that was set before ``init_process_group`` set its own.

    torch's excepthook prints the traceback with the rank before each line. torch has no function
    that returns the hook that was set before, so the hook is taken from torch's: each excepthook of
    torch is a closure that has the previous hook in a cell.
    """
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        if "old_hook" not in cells:  # another version of torch
            return sys.__excepthook__
        hook = cells["old_hook"].cell_contents
    return hook


def _wait_to_leave(supervisor: WorkerPipe, *, waits: bool) -> None:
    """Tell the supervisor that the script is over, and wait until this process may leave.

    Rank 0's worker may leave last, because it hosts the store.

    Args:
        supervisor: The pipe to the supervisor.
        waits: Whether this rank waits until the scripts of all ranks are over. If MPI runs, it
            waits in any case.
    """
    _end_at(signal.SIGINT)  # the script is over, so its signal handlers must not be called any more
    _end_at(signal.SIGTERM)
    supervisor.send(ScriptIsDone(waits or mpi.is_running()))
    supervisor.receive()


def _end_at(number: signal.Signals) -> Any:
    """Give a signal its default effect, which ends this process, unless the signal is ignored.
    Return the previous handler.
    """
    before = signal.getsignal(number)
    if before is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    return before


def _exit_fast() -> NoReturn:
    """End this process with exit code 0 and without Python's teardown, which takes long because it
    destroys all of torch's modules.
    """
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        world.wait_for_gloo_threads()
    # Finalize MPI, because mpirun treats a rank that ends without MPI_Finalize as failed.
    mpi.finalize()
    atexit.unregister(script_end.release_objects)
    exit_without_teardown(0)


def exit_without_teardown(code: int, by: int = 0) -> NoReturn:
    """End this process as Python does, but without MPI_Finalize and without the teardown.

    Threads are waited for, exit handlers run, and standard output and error are flushed.

    Args:
        code: The exit code.
        by: The signal by which to end instead, if that is possible; 0 for none.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # private, like the next; multiprocessing's children end like this too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # the stream's descriptor was closed when Python started
            continue
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if by:
        signals.end_by(by)
    os._exit(code)


def _exchange_over_mpi(setup: RankSetup) -> WorkerMessage:
    try:
        environment = setup.environment
        name = setup.interface.name
        received = environment.discovery.exchange(
            setup.published, environment, setup.options.timeout, name
        )
        mpi.finalize_on_exec()
        return ReceivedOverMpi(received)
    except mpi.MpiNotLaunchedError as reason:
        return MpiHasNoWorld(str(reason))
    except RendezvousError as error:
        return MpiHasFailed(str(error))
