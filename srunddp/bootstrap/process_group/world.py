"""Defines the world as a script sees it: this rank's numbers, its device, and the default process
group.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

from srunddp.bootstrap.process_group.store import ProcessGroupContext
from srunddp.errors import PeerError, Stopped
from srunddp.telemetry import event, heartbeat
from srunddp.util.quick_dataclass import dataclass

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

# Seconds between two looks for a key in the store: at first, and the most to which they double.
_LOOK_EVERY = 0.01
_LOOK_SELDOM = 1.0


def wait_for_gloo_threads() -> None:
    """Wait until Gloo's threads are idle, for at most 2 seconds. Call this before Python exits.

    A Gloo thread releases the Python objects of a finished collective a moment after the script has
    got the collective's result. If Python is already exiting at that moment, the process aborts, so
    a successful run would have the exit code 134.
    """
    deadline = time.monotonic() + 2.0
    before = _gloo_activity()
    while before and time.monotonic() < deadline:
        time.sleep(0.002)  # this releases the GIL, which the threads may be waiting for
        now = _gloo_activity()
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


def _gloo_activity() -> dict[str, tuple[str, int]]:
    """Return the state of each Gloo thread and its number of context switches, by thread id."""
    activity = {}
    for status in Path("/proc/self/task").glob("*/status"):
        # A thread may end between the listing and the reading.
        with contextlib.suppress(OSError):
            fields = dict(
                line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line
            )
            # torch gives its Gloo threads this name, of the 15 letters that the kernel allows.
            if fields["Name"] == "pt_gloo_runloop":
                switches = int(fields["voluntary_ctxt_switches"]) + int(
                    fields["nonvoluntary_ctxt_switches"]
                )
                activity[status.parent.name] = (fields["State"][0], switches)
    return activity


def await_message(store: Store, key: str) -> str:
    """Wait until another rank has set a key of the store, and return its value as text.

    The function polls, because the store's own ``wait()`` has a time limit.

    Args:
        store: the store that all ranks share.
        key: the key that the other rank sets.
    """
    pause = _LOOK_EVERY
    while not store.check([key]):
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_SELDOM)
    return store.get(key).decode(errors="replace")


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks of the run. It is a context manager, which calls
    :meth:`close` when the ``with`` block ends without an error.

    Attributes:
        rank: this rank's number, from 0 to ``world_size - 1``.
        local_rank: its number among the ranks of this node, from 0.
        world_size: the number of ranks.
        local_world_size: the number of ranks on this node.
        node_rank: the number of this node, from 0.
        nnodes: the number of nodes.
        device: this rank's ``torch.device``.
        backend: ``nccl`` or ``gloo``.
        interface: the name of this node's network interface.
        master_addr: ``MASTER_ADDR``, the address of rank 0.
        master_port: ``MASTER_PORT``.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    nnodes: int
    device: torch.device
    backend: str
    interface: str
    master_addr: str
    master_port: int
    _store: Store | None = field(default=None, repr=False, compare=False)
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        # Do not close after an error: the other ranks may still be in a collective, and destroying
        # NCCL's process group would wait for them.
        if (
            error is None
            or isinstance(error, Stopped)
            or (isinstance(error, SystemExit) and not error.code)
        ):
            self.close()

    @contextlib.contextmanager
    def rank_zero_first(self, *, per_node: bool = False) -> Iterator[None]:
        """Run the ``with`` block on rank 0 first, then on all other ranks at the same time; for
        downloads.

        All ranks must call this, and equally often. The other ranks wait without a time limit:
        ``--stall-timeout`` has no effect until the next step.

        Args:
            per_node: run the block first on local rank 0 of each node, for folders that nodes do
                not share.

        Raises:
            PeerError: the block failed on the rank that ran it first. On that rank itself, the
                block's own error is raised.
        """
        # All ranks make the same number of calls, so the number of the call names this call on all
        # ranks. With per_node, the node's number gives each node another key.
        key = f"rank_zero_first/{next(self._turns)}/{self.node_rank if per_node else ''}"
        # A download may take longer than --stall-timeout, and no rank makes a step meanwhile.
        heartbeat(last=True)
        if (self.local_rank if per_node else self.rank) == 0:
            try:
                yield
            except BaseException as error:
                # Publish SystemExit and KeyboardInterrupt too: the others wait without a limit.
                self._publish(key, f"{type(error).__name__}: {error}")
                raise
            self._publish(key, "")
        else:
            assert self._store
            if wrong := await_message(self._store, key):
                if per_node:
                    first = f"local rank 0 of node {self.node_rank}"
                else:
                    first = "rank 0"
                raise PeerError(f"{first} failed in rank_zero_first(): {wrong}", code=1)
            yield

    def _publish(self, key: str, text: str) -> None:
        if self._store:
            self._store.set(key, text)

    def close(self) -> None:
        """Destroy the process group unless the script has already done so, and wait until Gloo's
        threads are idle.
        """
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        wait_for_gloo_threads()


def open_world(
    place: ProcessGroupContext, backend: str, timeout: timedelta | None, *, device_id: bool = False
) -> tuple[World, str]:
    """Initialise the default process group on srunddp's store.

    Args:
        place: this rank's place in the world after the rendezvous, with the store.
        backend: ``nccl``, ``gloo`` or ``auto``.
        timeout: the limit of collectives and of the store, as in ``init_process_group``; None for
            torch's default.
        device_id: whether to pass the device to ``init_process_group``; only NCCL uses it.

    Returns:
        The world, and a warning about GPUs that stay idle; the warning is empty if none does.
    """
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

    from srunddp.bootstrap.process_group import device

    environment = place.environment
    meeting = place.meeting
    chosen, backend, warning = device.select_device(
        backend, environment.local_rank, meeting.local_world_size
    )
    store = place.next_store()
    # Look for a GPU that two ranks use now: NCCL would find it too, but only at the first
    # collective, and with a less clear message.
    if backend == "nccl" and (gpu := device.identity(chosen.index)):
        device.claim_gpu(store, environment.node, gpu, environment.rank)
    # init_process_group sets this timeout only in a store that it makes itself. Without this line,
    # srunddp's store would keep the timeout of the rendezvous.
    store.set_timeout(
        timeout or (backend == "nccl" and default_pg_nccl_timeout) or default_pg_timeout
    )
    dist.init_process_group(
        backend,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        # Do not pass the device to a group of Gloo: with a device, torch 2.13 would split subgroups
        # from the world's group. Gloo cannot be split, so new_group() would fail.
        device_id=chosen if device_id and backend == "nccl" else None,
    )
    if backend == "gloo":
        # Wait until all ranks are initialised. If a rank destroyed its group before, Gloo would
        # fail on ranks that are still connecting to it.
        if store.add("ranks_initialised", 1) == environment.world_size:
            store.set("all_initialised", "")
        store.wait(["all_initialised"])
    event("initialised")
    world = World(
        rank=environment.rank,
        local_rank=environment.local_rank,
        world_size=environment.world_size,
        local_world_size=meeting.local_world_size,
        node_rank=meeting.node_rank,
        nnodes=meeting.nnodes,
        device=chosen,
        backend=backend,
        interface=place.interface.name,
        master_addr=meeting.master_addr,
        master_port=meeting.master_port,
        _store=store if environment.world_size > 1 else None,
    )
    return world, warning
