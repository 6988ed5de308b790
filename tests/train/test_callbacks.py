"""A user's own code at the loop's events."""

from __future__ import annotations

import inspect

import pytest

from srunddp.errors import ConfigError
from srunddp.train.trainer import Callback, overriding


class Parent(Callback):
    def on_step(self, trainer, step, loss) -> None:
        self.seen = step


class Child(Parent):
    pass


class Other(Callback):
    def on_epoch(self, trainer, record) -> None:
        pass


def test_only_methods_that_are_overridden_are_called() -> None:
    child, other, plain = Child(), Other(), Callback()
    assert overriding([plain, child, other], "on_step") == [child.on_step]
    assert overriding([plain, child, other], "on_epoch") == [other.on_epoch]
    assert overriding([plain, child, other], "on_checkpoint") == []
    overriding([child], "on_step")[0](None, 7, None)
    assert child.seen == 7


def test_a_method_of_an_instance_counts() -> None:
    callback = Callback()
    callback.on_step = lambda trainer, step, loss: None
    assert overriding([callback], "on_step") == [callback.on_step]


@pytest.mark.parametrize("wrong", [Parent, object(), print])
def test_what_is_no_callback_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"among the callbacks; expected instances of srunddp.train.Callback -> "):
        overriding([wrong], "on_step")


def test_a_callback_that_overrides_nothing_does_nothing() -> None:
    callback = Callback()
    for name, method in inspect.getmembers(callback, inspect.ismethod):
        assert name.startswith("on_")
        assert method(*[None] * len(inspect.signature(method).parameters)) is None
