"""Series as pictures show them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from srunddp.report.csv_files import NAN, TimeSeries
from srunddp.report.plots import style
from srunddp.report.plots.style import TimeAxis
from srunddp.report.plots.timeline import timeline
from srunddp.report.run import read
from srunddp.report.summarize import summary_of
from tests.support.made_up_run import MadeUp


def test_before_both_counters_are_known_a_cell_is_empty() -> None:
    """As a recorder writes it: until the first step nothing but that there was none."""
    columns = {"own_s": [NAN, NAN, 0.9, 1.9, 2.9], "steps": [0.0, 0.0, 9.0, 19.0, 29.0]}
    found = style.heat(TimeSeries([0.0, 1.0, 2.0, 3.0, 4.0], columns), "own_s", "steps", style.grid(0.0, 4.0, 1.0))
    assert math.isnan(found[0])
    assert math.isnan(found[1])
    assert found[2:] == [pytest.approx(0.1), pytest.approx(0.1)]


def test_of_many_epochs_not_all_are_marked(tmp_path: Path) -> None:
    run = read(MadeUp(epoch_s=2, evaluation_s=0.1, checkpoint_s=0).write(tmp_path))
    summary = summary_of(run)
    figure = timeline(run, summary, TimeAxis(summary.seconds, 5.0, summary.epochs)).figure
    assert figure is not None
    assert len(summary.epochs) == 300
    assert len(figure.axes[-1].lines) < 70


@pytest.mark.parametrize("code", [0, None])
def test_the_interval_in_which_training_ended_is_no_drop(code: int | None, tmp_path: Path) -> None:
    """One that was killed trained to its end."""
    run = read(replace(MadeUp(epoch_s=0, seconds=62, code=code)).write(tmp_path))
    summary = summary_of(run)
    figure = timeline(run, summary, TimeAxis(summary.seconds, 5.0, ())).figure
    assert figure is not None
    shown = list(figure.axes[-1].lines[0].get_ydata())
    assert len(shown) == 13
    assert shown[-1] == pytest.approx(1920, rel=0.02)
