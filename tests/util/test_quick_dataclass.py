"""Classes made by `quick_dataclass` behave as those of the standard library do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from typing import Any

import pytest

from srunddp.util import quick_dataclass
from tests.conftest import ROOT

BOTH = pytest.mark.parametrize("dataclass", [quick_dataclass.dataclass, dataclasses.dataclass])


@quick_dataclass.dataclass(frozen=True)
class Pickled:
    """Pickle finds a class by its name in a module."""

    number: int
    names: list[str] = field(default_factory=list, compare=False)


@pytest.fixture
def frozen(dataclass: Callable[..., Any]) -> Any:
    @dataclass(frozen=True)
    class Node:
        name: str
        port: int = 29500
        seen: list[str] = field(default_factory=list, compare=False, repr=False)

        def __post_init__(self) -> None:
            if self.port < 0:
                raise ValueError("a port is not negative")

    return Node


@BOTH
def test_a_frozen_class_compares_hashes_and_prints_its_fields(frozen: Any) -> None:
    assert frozen("a", seen=["x"]) == frozen("a", 29500)
    assert frozen("a") != frozen("b")
    assert frozen("a") != "a"
    assert len({frozen("a"), frozen("a", seen=["x"]), frozen("b")}) == 2
    assert repr(frozen("a")).endswith("Node(name='a', port=29500)")


@BOTH
def test_a_frozen_instance_cannot_be_changed(frozen: Any) -> None:
    node = frozen("a")
    for name in ("name", "port", "other"):
        with pytest.raises(FrozenInstanceError):
            setattr(node, name, "b")
    with pytest.raises(FrozenInstanceError):
        del node.name
    assert node == frozen("a")


@BOTH
def test_the_tools_of_dataclasses_work(frozen: Any) -> None:
    node = frozen("a")
    assert replace(node, port=1) == frozen("a", 1)
    assert copy.deepcopy(node) == node
    assert asdict(node) == {"name": "a", "port": 29500, "seen": []}
    assert [each.name for each in fields(node)] == ["name", "port", "seen"]
    assert frozen.__match_args__ == ("name", "port", "seen")
    with pytest.raises(ValueError, match="negative"):
        replace(node, port=-1)


@BOTH
def test_equal_values_of_two_classes_are_not_equal(dataclass: Callable[..., Any]) -> None:
    @dataclass(frozen=True)
    class First:
        value: int

    @dataclass(frozen=True)
    class Second(First):
        pass

    assert First(1) != Second(1)
    assert Second(1) == Second(1)


@BOTH
def test_a_class_that_is_not_frozen_can_be_changed_and_not_hashed(
    dataclass: Callable[..., Any],
) -> None:
    @dataclass(kw_only=True)
    class Count:
        steps: int = 0

    count = Count()
    count.steps += 1
    assert count == Count(steps=1)
    with pytest.raises(TypeError):
        hash(count)
    with pytest.raises(TypeError):
        Count(1)  # type: ignore[call-arg]


@BOTH
def test_without_eq_an_instance_equals_only_itself(dataclass: Callable[..., Any]) -> None:
    @dataclass(frozen=True, eq=False)
    class Handle:
        number: int

    handle = Handle(1)
    assert handle == handle
    assert handle != Handle(1)
    assert hash(handle) == hash(handle)


@BOTH
def test_methods_of_the_class_stay(dataclass: Callable[..., Any]) -> None:
    @dataclass(frozen=True)
    class Loud:
        word: str

        def __repr__(self) -> str:
            return self.word.upper()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Loud) and other.word.lower() == self.word.lower()

        def __hash__(self) -> int:
            return hash(self.word.lower())

    assert repr(Loud("a")) == "A"
    assert Loud("a") == Loud("A")
    assert len({Loud("a"), Loud("A")}) == 1


@BOTH
def test_a_class_that_holds_itself_prints(dataclass: Callable[..., Any]) -> None:
    @dataclass
    class Link:
        to: object = None

    link = Link()
    link.to = link
    assert repr(link).endswith("Link(to=...)")


def test_an_instance_is_pickled() -> None:
    pickled = Pickled(1, ["a"])
    again = pickle.loads(pickle.dumps(pickled))
    assert again == pickled
    assert again.names == ["a"]


def test_a_rank_defines_no_class_by_the_slower_decorator_at_its_start() -> None:
    program = """\
import dataclasses, os, sys
slow = []
make = dataclasses._process_class
def note(cls, init, repr, eq, *others):
    if repr or eq:
        slow.append(cls.__module__)
    return make(cls, init, repr, eq, *others)
dataclasses._process_class = note
def end(code):
    os.write(1, " ".join(["slow:", *slow]).encode())
    leave(code)
leave, os._exit = os._exit, end
sys.argv = ["srunddp", "--quiet", sys.argv[1]]
from srunddp.cli import main
try:
    main()
finally:
    end(0)
"""
    script = ROOT / "tests" / "util" / "__init__.py"
    command = [sys.executable, "-c", program, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "slow:" in done.stdout, done.stderr
    assert "srunddp" not in done.stdout
