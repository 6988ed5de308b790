"""Gives torch the result of the rendezvous: environment variables, and a store on rank 0's socket.

A script written for torchrun calls ``init_process_group()`` and gets srunddp's store, because
torch's handlers for ``env://`` and ``tcp://`` are replaced when torch is imported. Each
initialisation has its own prefix in that store. If the script joins with other values than those
that srunddp has exported, the replaced handlers call torch's handlers:

- If only rank or world size differ, as in a group of some ranks, torch's handlers connect to the
  agent store, see :mod:`srunddp.supervisor.agent_store`.
- If the script has chosen another address, torch's handlers serve a store there. Under torchrun
  they would try to connect to a store that nobody serves, because
  ``TORCHELASTIC_USE_AGENT_STORE`` is set; srunddp hides this variable from them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import stat
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from srunddp.bootstrap.environment import cpus, mpi
from srunddp.bootstrap.environment.rank_process import RANK_PROCESS, rank_mark
from srunddp.bootstrap.environment.rank_zero_discovery import discovery_named
from srunddp.bootstrap.environment.slurm import fold_counts
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.process_group import master_address, started_process
from srunddp.bootstrap.process_group.master_address import (
    RUN_ID,
    USE_AGENT_STORE,
    MasterAddress,
    Place,
    asked_for,
)
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import listen
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup
from srunddp.telemetry import event, join_others
from srunddp.util.console import say
from srunddp.util.descriptors import move_high
from srunddp.util.excepthook import leave_to_srunddp
from srunddp.util.import_hook import surround_import
from srunddp.util.kernel_file import raise_open_files_limit
from srunddp.util.quick_dataclass import dataclass

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# How many descriptors rank 0 needs for each rank, because NCCL's threads have their own connections
# to the store; and how many it needs besides, for all else that it opens.
_FILES_PER_RANK = 4
_OTHER_FILES = 256
# The position of nscount in glibc's struct __res_state, counted in ints: two ints and a long (as
# long as two ints) come before it.
_NAME_SERVERS = 4
# c10d's levels: 0 is info, 1 warning, 2 error.
_ERRORS_ONLY = 2
# The variables that Slurm sets for the job and for the step, some also under an older name.
_SLURM_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")
_SLURM_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES")
_SLURM_TASKS_PER_NODE = ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")
_SLURM_NODE_LISTS = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")


@dataclass
class ProcessGroupContext:
    """This process's place in the world after the rendezvous, and the store once it is made.

    Attributes:
        environment: who this process is.
        interface: this rank's network interface.
        meeting: what rank 0 has told this rank in the rendezvous.
        store_fd: the descriptor of rank 0's listening socket for the ranks' store, which later owns
            the socket; None on the other ranks.
        timeout: seconds for which the store waits for a key or a connection.
        backend: the backend of ``srunddp.init()`` if the script does not choose one.
        generation: how many restarts this run has had so far.
        max_restarts: how many restarts the run may have; 0 without ``--restarts``.
        initialisations: how often :meth:`next_store` was called.
    """

    environment: Environment
    interface: SelectedInterface
    meeting: RendezvousInfo
    store_fd: int | None
    timeout: float
    backend: str = "auto"
    generation: int = 0
    max_restarts: int = 0
    initialisations: int = 0
    _store: Store | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment variables to export: those that a script written for torchrun
        reads, those of the interface, and Slurm's if the ranks' nodes may change.
        """
        environment = self.environment
        meeting = self.meeting
        # Without --restarts only a requeue of the job starts the ranks again, so give Slurm's count
        # of requeues as the restart count.
        requeues = os.environ.get("SLURM_RESTART_COUNT") or "0"
        return {
            "RANK": str(environment.rank),
            "LOCAL_RANK": str(environment.local_rank),
            "WORLD_SIZE": str(environment.world_size),
            "LOCAL_WORLD_SIZE": str(meeting.local_world_size),
            "GROUP_RANK": str(meeting.node_rank),
            "GROUP_WORLD_SIZE": str(meeting.nnodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(environment.rank),
            "ROLE_WORLD_SIZE": str(environment.world_size),
            "NODE_RANK": str(meeting.node_rank),
            "MASTER_ADDR": meeting.master_addr,
            "MASTER_PORT": str(meeting.master_port),
            RUN_ID: meeting.run,
            "TORCHELASTIC_RESTART_COUNT": str(self.generation) if self.max_restarts else requeues,
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            # Without an agent store do not set this variable: torch would connect to a store that
            # nobody serves, instead of serving one itself.
            **({USE_AGENT_STORE: "True"} if meeting.store_port else {}),
            **self.interface.exports,
            **(self._slurm_variables() if environment.nodes_may_change else {}),
        }

    def _slurm_variables(self) -> dict[str, str]:
        """Return Slurm's variables with the values of this start, for scripts that read them.

        They replace those that Slurm has set, which count all tasks of the step, even those of
        spare and of lost nodes.
        """
        environment = self.environment
        meeting = self.meeting
        lowest_here = environment.rank - environment.local_rank
        ranks_here = range(lowest_here, lowest_here + environment.node_sizes[meeting.node_rank])
        values = {
            "SLURM_PROCID": str(environment.rank),
            "SLURM_NODEID": str(meeting.node_rank),
            "SLURM_GTIDS": ",".join(map(str, ranks_here)),
            **dict.fromkeys(_SLURM_TASKS, str(environment.world_size)),
            **dict.fromkeys(_SLURM_NODES, str(meeting.nnodes)),
            **dict.fromkeys(_SLURM_TASKS_PER_NODE, fold_counts(environment.node_sizes)),
        }
        # The list is empty if it would be too long for a message, as with very many nodes whose
        # names do not form ranges.
        if meeting.node_list:
            values |= dict.fromkeys(_SLURM_NODE_LISTS, meeting.node_list)
        return values

    def next_store(self) -> Store:
        """Return the store under a new prefix; the first call makes the store, or connects to it.

        The prefix has the number of the call. So it is the same on all ranks if all of them
        initialise process groups equally often.
        """
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed.distributed_c10d import PrefixStore

        event("init")
        join_others()
        if self._store is None:
            if self.store_fd is not None:
                raise_open_files_limit(_FILES_PER_RANK * self.environment.world_size + _OTHER_FILES)
            with without_reverse_dns():
                self._store = TCPStore(
                    self.meeting.master_addr,
                    self._store_port,
                    self.environment.world_size,
                    is_master=self.store_fd is not None,
                    timeout=timedelta(seconds=self.timeout),
                    # Do not wait for the other ranks here: their scripts may come later than the
                    # store's timeout allows.
                    wait_for_workers=False,
                    master_listen_fd=self._listening(),
                    # Use libuv even if the user has set USE_LIBUV=0: with thousands of connections
                    # the older server is many times slower.
                    use_libuv=True,
                )
        self.initialisations += 1
        return PrefixStore(f"srunddp/{self.generation}/{self.initialisations}", self._store)

    @property
    def _store_port(self) -> int:
        return self.meeting.store_port or self.meeting.master_port

    def _listening(self) -> int | None:
        """Return on rank 0 the descriptor of the listening socket for the store; None on the other
        ranks.

        If the script has closed the socket, for example by closing all descriptors as daemons do,
        this listens on the same port again. The port is free, because no other process has the
        socket.
        """
        if self.store_fd is None or _is_socket(self.store_fd):
            return self.store_fd
        return listen(self.meeting.master_addr, [self._store_port]).detach()


class Bypass(Enum):
    """The ways in which a script may bypass srunddp's rendezvous; rank 0 prints a line about each,
    once.
    """

    OWN_ADDRESS = auto()  # its own MASTER_ADDR, MASTER_PORT or tcp://
    FILE = auto()  # file://


# This process's place in the world; None before the rendezvous. A process that was forked from the
# rank inherits it.
_joined: ProcessGroupContext | None = None
_joined_by = 0  # the id of the process that is the rank
# The address of the agent store; None if there is no agent store.
_master: MasterAddress | None = None
_told: set[Bypass] = set()  # the kinds of bypass for which rank 0 has printed its line


def _is_socket(descriptor: int) -> bool:
    """Whether a descriptor is open and a socket's."""
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def current_context() -> ProcessGroupContext | None:
    """Return this process's place in the world; None before the rendezvous."""
    return _joined


def is_fork_of_rank() -> bool:
    """Whether this process was forked from the rank after the rendezvous. Then it is not the rank,
    although :func:`current_context` returns the rank's place.
    """
    return _joined is not None and _joined_by != os.getpid()


def restart_count() -> int:
    """Return how often ``--restarts`` has started all ranks again: the same number on all ranks, 0
    in the first start and after a requeue.

    With ``--restarts``, a process that the script starts can read the number from
    ``TORCHELASTIC_RESTART_COUNT``.
    """
    return _joined.generation if _joined else 0


def install(place: ProcessGroupContext, *, ahead: bool = False) -> None:
    """Export the rank's variables, and make torch's ``env://`` and ``tcp://`` use srunddp's store
    from now on.

    Args:
        place: this process's place in the world.
        ahead: whether srunddp itself has imported torch before the script begins. Then
            ``OMP_NUM_THREADS`` is exported although torch is loaded already.
    """
    global _joined, _joined_by, _master
    _joined = place
    _joined_by = os.getpid()
    leave_to_srunddp()
    # If srunddp runs under torchrun, torchrun has set this variable. If this run has no agent
    # store, the variable would make every rank a client of a store that no process serves.
    os.environ.pop(USE_AGENT_STORE, None)
    os.environ.update(place.variables())
    # OpenMP reads OMP_NUM_THREADS when it is loaded, so setting it has no effect if the script has
    # already imported torch. If srunddp has imported torch, the worker sets torch's number of
    # threads to this value before the script begins.
    if place.meeting.local_world_size > 1 and (ahead or "torch" not in sys.modules):
        os.environ.update(cpus.threads(os.environ, place.meeting.sharers))
    # Set the mark after all other variables, because its checksum covers them.
    os.environ[RANK_PROCESS] = rank_mark(os.environ, os.getpid())
    if discovery_named(place.meeting.channel).rules_out_mpi:
        mpi.block()
    surround_import("multiprocessing.util", started_process.preparing_others)
    surround_import(started_process.RENDEZVOUS, _replacing_handlers)
    if place.meeting.store_port:
        meeting = place.meeting
        _master = MasterAddress(meeting.master_addr, str(meeting.master_port), meeting.run)
        started_process.call_in_others(_master.host, _master.port, _master.run)
    if "torch" not in sys.modules:
        surround_import("torch", gc_frozen)
    if place.environment.world_size > 1:
        surround_import("accelerate", _set_accelerate_cpu)


@contextlib.contextmanager
def gc_frozen(_: object = None) -> Iterator[None]:
    """Exclude the objects that the ``with`` block makes, such as torch's modules when it imports
    torch, from Python's garbage collection for good: torch's modules never become garbage.
    """
    # An import makes many objects and hardly any garbage, so the collector would scan them again
    # and again for nothing.
    enabled = gc.isenabled()
    gc.disable()
    event("import")
    try:
        yield
    finally:
        event("imported")
        gc.freeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _set_accelerate_cpu(_: ModuleType) -> Iterator[None]:
    """Set ``ACCELERATE_USE_CPU`` before accelerate is imported if there is no GPU, as ``accelerate
    launch --cpu`` does. Without a GPU and this variable, accelerate would not treat the ranks as
    one world.
    """
    import torch

    # device_count() asks NVML. is_available() would initialise CUDA, and processes that are forked
    # later could then not use it.
    if not torch.accelerator.device_count():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    yield


@contextlib.contextmanager
def _replacing_handlers(rendezvous: ModuleType) -> Iterator[None]:
    yield
    handlers = rendezvous._rendezvous_handlers  # private to torch; a test pins it
    for scheme, replacement in (("env", _handle), ("tcp", _handle), ("file", _handle_file)):
        if not isinstance(handlers[scheme], partial):
            handlers[scheme] = partial(replacement, handlers[scheme])


def _handle(
    stock: Callable[..., Iterator[Any]], url: str, **options: Any
) -> Iterator[tuple[Store, int, int]]:
    """Replace a rendezvous handler of torch.

    Args:
        stock: torch's handler.
        url: the URL of the script's ``init_process_group``.
        options: further arguments of torch's handler.

    Yields:
        srunddp's store with this rank and the world size, if the URL means the world of this run;
        else the result of ``stock``.
    """
    place = current_context()
    asked = asked_for(url, os.environ)
    if place is not None:
        asked = asked.with_address_of(_place_of(place))
    if place is not None and asked == _place_of(place):
        yield place.next_store(), place.environment.rank, place.environment.world_size
        # torch's handlers are generators too, and raise the same if asked for a second rendezvous.
        raise RuntimeError("a second rendezvous on one url is not supported")
    rendezvous = stock(url, **options)
    if place is not None and not asked.is_at(_place_of(place)):
        _tell(
            Bypass.OWN_ADDRESS,
            f"the script joins at its own MASTER_ADDR and MASTER_PORT, {asked.host} port"
            f" {asked.port}, and not by srunddp -> leave both as they are, unless this is intended",
        )
    join_others()
    if _master is None:
        yield from rendezvous
    else:
        yield from master_address.join(_master, asked, rendezvous)


def _handle_file(
    stock: Callable[..., Iterator[Any]], url: str, **options: Any
) -> Iterator[tuple[Store, int, int]]:
    """Replace torch's handler of ``file://``: call it, and print that srunddp is bypassed."""
    _tell(
        Bypass.FILE,
        f"the script joins by {url.partition('?')[0]}, and not by srunddp; if its ranks do not"
        " connect, the file of an earlier start is the likely cause -> env:// needs no file",
    )
    join_others()
    yield from stock(url, **options)


def _tell(bypass: Bypass, line: str) -> None:
    """Print a line about the script, once for each kind of bypass, if this process is rank 0."""
    is_rank_zero = _joined is not None and _joined.environment.rank == 0 and not is_fork_of_rank()
    if is_rank_zero and bypass not in _told:
        _told.add(bypass)
        say(line)


def _place_of(place: ProcessGroupContext) -> Place:
    """Return the place in the process group of all ranks that srunddp has given a rank, in torch's
    terms.
    """
    return Place(
        rank=str(place.environment.rank),
        world_size=str(place.environment.world_size),
        host=place.meeting.master_addr,
        port=str(place.meeting.master_port),
    )


def process_group_context(prepared: RankSetup, meeting: RendezvousInfo) -> ProcessGroupContext:
    """Return this rank's place in the world, with the store's socket handed over on rank 0.

    Args:
        prepared: what the rank knew and held before the rendezvous; on rank 0 the store's socket is
            detached from it.
        meeting: what rank 0 has told this rank.
    """
    return ProcessGroupContext(
        environment=prepared.environment,
        interface=prepared.interface,
        meeting=meeting,
        # The store owns the socket from now on and closes it.
        store_fd=move_high(prepared.held.store.detach()) if prepared.held else None,
        timeout=prepared.options.timeout,
        backend=prepared.options.backend,
        generation=prepared.options.generation,
        max_restarts=prepared.options.max_restarts,
    )


@contextlib.contextmanager
def without_reverse_dns() -> Iterator[None]:
    """Make reverse lookups of this thread use only /etc/hosts inside the ``with`` block, and keep
    c10d from warning if a lookup finds no name.

    TCPStore looks up the name of the address to which it connects, for a log line. If the DNS
    servers do not answer, the lookup takes up to ten seconds, and TCPStore prints a warning, which
    users mistake for the cause of other problems.

    torch has no option that prevents the lookup. glibc's settings, ``RES_OPTIONS`` and
    ``resolv.conf``, apply to the whole process and are read only once. So this function changes the
    resolver's state, which glibc has for each thread: with the number of name servers set to 0, the
    resolver asks only /etc/hosts. The layout of the state is part of glibc's ABI, see resolv.h.
    With another C library, on a 32-bit machine, or if the user has set ``TORCH_CPP_LOG_LEVEL``,
    nothing is changed.
    """
    import platform

    if (
        platform.libc_ver()[0] != "glibc"
        or ctypes.sizeof(ctypes.c_long) != 8
        or "TORCH_CPP_LOG_LEVEL" in os.environ
    ):
        yield
        return
    libc = ctypes.CDLL(None)
    libc.__res_init()  # otherwise glibc would fill in the state at the first look-up
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    resolver = libc.__res_state()
    level = _log_level()
    servers = resolver[_NAME_SERVERS]
    before = level.value
    resolver[_NAME_SERVERS] = 0
    level.value = max(before, _ERRORS_ONLY)
    try:
        yield
    finally:
        resolver[_NAME_SERVERS] = servers
        level.value = before


def _log_level() -> ctypes.c_int:
    import torch

    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    with contextlib.suppress(OSError, ValueError):
        return ctypes.c_int.in_dll(ctypes.CDLL(library), "FLAGS_caffe2_log_level")
    return ctypes.c_int(0)  # another build of torch: the warning then stays
