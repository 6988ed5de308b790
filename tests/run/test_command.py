"""What the options of ``srunddp run`` become."""

from __future__ import annotations

from dataclasses import fields

import pytest

from srunddp.run.cli import run
from srunddp.run.command import RunCommand


def command(*words: str) -> RunCommand:
    return RunCommand.from_click(run.make_context("run", [*words, "train.py", "--lr=1"]).params)


def test_every_option_is_a_field_and_every_field_an_option() -> None:
    """One that is not taken would do nothing, without a word."""
    assert {each.name for each in fields(RunCommand)} == {each.name for each in run.params}


def test_what_is_given_is_taken() -> None:
    found = command("--grace=3", "--restarts=2", "--port=1024-1030", "--backend=gloo", "--staged")
    assert (found.grace, found.restarts, found.port, found.backend) == (3.0, 2, "1024-1030", "gloo")
    assert (found.staged, found.offline, found.log_dir) == (True, False, None)
    assert command("--signal-grace=1h").signal_grace == 3600.0
    assert (found.script, found.arguments) == ("train.py", ("--lr=1",))


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ((), 60.0),
        (("--spare-nodes=1",), 15.0),
        (("--min-nodes=2",), 15.0),
        (("--spare-nodes=1", "--lost-after=20"), 20.0),
    ],
)
def test_a_node_is_lost_sooner_where_another_takes_over(
    words: tuple[str, ...], seconds: float
) -> None:
    assert command(*words).lost_after == seconds
    (option,) = [each for each in run.params if each.name == "lost_after"]
    if "--lost-after=20" not in words:
        assert f"{seconds:.0f}s" in str(option.to_info_dict()["help"])
