"""Of a world: its group is closed where all ranks agree, and one rank may go first for as long as
it likes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.process_group import device
from srunddp.bootstrap.process_group.store import ProcessGroupContext
from srunddp.bootstrap.process_group.world import World, open_world
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.errors import PeerError, Stopped
from tests.support.starting import LONG, until
from tests.support.worlds import world

pytestmark = pytest.mark.slow

PER_NODE = 2


class Store:
    """As much of torch's as is needed."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, text: str) -> None:
        self.values[key] = text.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def worlds(size: int) -> list[World]:
    """Of ranks on nodes of two each; a single process needs no store."""
    store: Any = Store() if size > 1 else None
    more: Any = {
        "device": None,
        "backend": "gloo",
        "interface": "lo",
        "master_addr": "127.0.0.1",
        "master_port": 1,
    }
    return [
        World(
            rank=rank,
            local_rank=rank % PER_NODE,
            world_size=size,
            local_world_size=PER_NODE,
            node_rank=rank // PER_NODE,
            nnodes=size // PER_NODE,
            _store=store,
            **more,
        )
        for rank in range(size)
    ]


def on_all(size: int, body: Callable[[World], Any]) -> list[Any]:
    """What the body came to on each rank; an exception is returned."""

    def one(it: World) -> Any:
        try:
            return body(it)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, worlds(size)))


@pytest.mark.parametrize(("first", "how"), [({0}, {}), ({0, 2}, {"per_node": True})])
def test_rank_0_is_through_before_any_other_begins(first: set[int], how: dict[str, bool]) -> None:
    """Those that go first stay within until everybody else had time to come in by mistake."""
    order: list[int] = []
    inside = threading.Barrier(len(first))

    def body(it: World) -> None:
        with it.rank_zero_first(**how):
            order.append(it.rank)
            if it.rank in first:
                inside.wait(LONG)
                time.sleep(0.2)
                seen = set(order)
                inside.wait(LONG)  # the first one to leave lets others in
                assert seen == first

    assert on_all(4, body) == [None] * 4
    assert sorted(order) == [0, 1, 2, 3]


def test_several_in_a_row_and_one_within_another_do_not_mix() -> None:
    order: list[tuple[str, int]] = []

    def body(it: World) -> None:
        for turn in ("a", "b"):
            with it.rank_zero_first():
                order.append((turn, it.rank))
        with it.rank_zero_first(), it.rank_zero_first(per_node=True):
            order.append(("c", it.rank))

    assert on_all(4, body) == [None] * 4
    for turn in ("a", "b", "c"):
        ranks = [rank for name, rank in order if name == turn]
        assert (ranks[0], sorted(ranks)) == (0, [0, 1, 2, 3])
    last = [rank for name, rank in order if name == "c"]
    assert last.index(2) < last.index(3)


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit(3), KeyboardInterrupt()])
def test_rank0_first_others_do_not_begin_after_a_failure(error: BaseException) -> None:
    def body(it: World) -> None:
        with it.rank_zero_first():
            assert it.rank == 0
            raise error

    zero, *others = on_all(4, body)
    assert zero is error
    text = f"rank 0 failed in rank_zero_first(): {type(error).__name__}: {error}"
    assert [(type(each), str(each)) for each in others] == [(PeerError, text)] * 3


SLOW = """
from datetime import timedelta
import srunddp
# In 15 s a busy machine connects them, too.
with srunddp.init("gloo", timeout=timedelta(seconds=15)) as it:
    with it.rank_zero_first():
        say("inside")
        if RANK == 0: wait_for("go")
    import torch
    sum = torch.ones(1)
    torch.distributed.all_reduce(sum)
    say("sum", int(sum))
    with it.rank_zero_first():
        if RANK == 0:
            wait_for("sum.1")
            raise OSError("disk full")
        say("never")
"""


def test_rank0_first_no_time_limit_counts_first_is_blamed(tmp_path: Path) -> None:
    with world(tmp_path, SLOW, size=2) as it:
        until(lambda: it.has_said("inside.0"))
        time.sleep(18.0)  # longer than the group's time limit
        assert not it.has_said("inside.1")
        (tmp_path / "go").touch()
        ended = it.wait()
    assert (tmp_path / "sum.1").read_text() == "2"
    assert [(each.ranks, each.code) for each in ended.verdicts] == [((0,), 1)], ended.text
    assert "OSError: disk full" in ended.verdicts[0].cause
    assert not it.has_said("never.1")


SLOW_TO_CONNECT = """
import srunddp, time, torch.distributed as dist
init = dist.init_process_group
def slow(*args, **kwargs):
    init(*args, **kwargs)
    time.sleep(RANK)
    say("connected")
dist.init_process_group = slow
with srunddp.init("gloo"):
    say("others", os.path.exists("connected.1"))
"""


def test_no_rank_leaves_gloos_group_while_another_connects(tmp_path: Path) -> None:
    """Gloo would fail there: "Connection closed by peer". Seen where a script ends at once on a
    busy machine.
    """
    with world(tmp_path, SLOW_TO_CONNECT, size=2) as it:
        ended = it.wait()
    assert ended.codes == [0, 0], ended.text
    assert (tmp_path / "others.0").read_text() == "True"


LIMITED = """
import socket, srunddp
from datetime import timedelta
from srunddp.bootstrap.process_group.store import current_context
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import _get_default_store
with srunddp.init("gloo", timeout=eval(os.environ["LIMIT"])) as it:
    say("limit", _get_default_store().timeout)
    if RANK == 1:
        where = it.master_addr, current_context().meeting.store_port
        crowd = [socket.create_connection(where) for _ in range(200)]
        store = TCPStore(*where, is_master=False, timeout=timedelta(seconds=10))
        say("found", store.check(["nothing"]))
"""


@pytest.mark.parametrize(
    ("given", "limit"), [("timedelta(minutes=45)", "0:45:00"), ("None", "0:30:00")]
)
def test_the_store_waits_long_and_takes_more_than_the_limit(
    tmp_path: Path, given: str, limit: str
) -> None:
    """It waits as with init_process_group alone; a rank 0 that prepares data first would end the
    others else.

    A torch process has some 20 files open before.
    """
    below = {0: ["prlimit", "--nofile=100:4096"]}
    with world(tmp_path, LIMITED, size=2, variables={"LIMIT": given}, below=below) as it:
        ended = it.wait()
    assert ended.codes == [0, 0], ended.text
    assert [(tmp_path / f"limit.{rank}").read_text() for rank in range(2)] == [limit, limit]
    assert (tmp_path / "found.1").read_text() == "False"


@pytest.mark.parametrize(
    ("backend", "wanted", "given"),
    [("nccl", False, None), ("nccl", True, "cuda:1"), ("gloo", True, None)],
)
def test_a_device_is_handed_to_nccl_alone_where_asked_for(
    monkeypatch: pytest.MonkeyPatch, backend: str, wanted: bool, given: str | None
) -> None:
    """What init_process_group is given; Gloo's subgroups would fail with one."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(device, "select_device", lambda *_: (torch.device("cuda", 1), backend, ""))
    monkeypatch.setattr(device, "identity", lambda _: "")
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **given: options.update(given)
    )
    monkeypatch.setattr(ProcessGroupContext, "next_store", lambda _: torch.distributed.HashStore())
    place = ProcessGroupContext(
        detect({}),
        SelectedInterface("lo", "127.0.0.1", {}, ""),
        RendezvousInfo(master_addr="", master_port=1, run="", master_node="node01"),
        None,
        1.0,
    )
    open_world(place, backend, None, device_id=wanted)
    assert options["device_id"] == (given and torch.device(given))


@pytest.mark.parametrize(
    ("error", "closed"),
    [(Stopped("by SIGUSR2", 75), 1), (SystemExit(0), 1), (SystemExit(75), 0), (OSError(), 0)],
)
def test_the_group_stays_after_a_failure(
    error: BaseException, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[World] = []
    monkeypatch.setattr(World, "close", lambda self: calls.append(self))
    (alone,) = worlds(1)
    with (
        pytest.raises(type(error)),
        alone,
        alone.rank_zero_first(),
        alone.rank_zero_first(per_node=True),
    ):
        raise error
    assert len(calls) == closed
