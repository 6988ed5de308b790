"""Options behind SCRIPT are told of where the command would take them; durations are read as they
are shown.
"""

from __future__ import annotations

import click
import pytest

from srunddp.check.cli import check
from srunddp.run.cli import run
from srunddp.util.click_types import Seconds, shown
from srunddp.util.option_groups import after_script


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("--quiet train.py --epochs=3 file", []),
        ("train.py --quiet --lr 3", ["--quiet"]),
        ("train.py --log_dir=logs --monitor", ["--log_dir=logs", "--monitor"]),
        ("train.py --monitor=5 --backend=gloo", ["--monitor=5", "--backend=gloo"]),
        ("train.py --monitor=loss --backend=mpi --quiet=1", []),  # which run would not take
        ("train.py -- --quiet", []),
    ],
)
def test_options_of_run_after_the_script_are_noted(words: str, noted: list[str]) -> None:
    context = run.make_context("run", words.split())
    notes = after_script(context, context.params["arguments"])
    hint = (
        " comes after SCRIPT, so the script gets it -> put it before SCRIPT if it is meant for"
        " srunddp"
    )
    assert notes == [each + hint for each in noted]


@pytest.mark.parametrize("command", [run, check])
def test_a_module_is_asked_for_by_both_names(command: click.Command) -> None:
    for name in ("-m", "--module"):
        params = command.make_context("x", [name, "package.train", "--collective"]).params
        assert (params["module"], params["script"], params["arguments"]) == (
            True,
            "package.train",
            ("--collective",),
        )


@pytest.mark.parametrize(
    ("text", "seconds", "again"),
    [
        ("90", 90.0, "1m30s"),
        ("90s", 90.0, "1m30s"),
        ("5m", 300.0, "5m"),
        ("1h30m", 5400.0, "1h30m"),
        ("0.5", 0.5, "0.5s"),
    ],
)
def test_durations_are_read_and_shown(text: str, seconds: float, again: str) -> None:
    assert Seconds().convert(text, None, None) == seconds
    assert shown(seconds) == again
    assert Seconds().convert(again, None, None) == seconds
