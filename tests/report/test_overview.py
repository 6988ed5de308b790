"""The run at a glance: its figures, and why it failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from srunddp.report.overview import ends, failure, tiles
from srunddp.report.run import read
from srunddp.report.summarize import summary_of
from srunddp.report.summary import Summary
from tests.support.made_up_run import MadeUp

RUN = MadeUp(nodes=2, ranks_per_node=2, gpus_per_node=2, seconds=100, epoch_s=0)
STOPPED = "stopped after step 40 by SIGUSR1; checkpoint 40; the job is requeued"


@pytest.mark.parametrize(
    ("day", "cause"), [("2027-01-15", "rank 3 on node02: x"), ("2027-01-16", "")]
)
def test_a_failure_is_of_this_start_and_shown_at_once(day: str, cause: str, tmp_path: Path) -> None:
    folder = replace(RUN, code=None, codes={1: 137}, interval=1.0).write(tmp_path)
    said = {"rank": 3, "node": "node02", "cause": "x", "time": f"{day}T08:01:00.000+00:00"}
    folder.with_name("failure.json").write_text(json.dumps(said))
    summary = summary_of(read(folder), RUN.start + 115)
    assert (summary.ending.running, summary.ending.cause) == (True, cause)
    assert [*ends(summary)] == ["exit code 137 (SIGKILL, often out of memory) on rank 1 on node01"]
    assert failure(summary)


def summed(made_up: MadeUp, folder: Path, cause: str = "") -> Summary:
    written = made_up.write(folder)
    if cause:
        said = {"rank": 3, "node": "node02", "cause": cause}
        written.with_name("failure.json").write_text(json.dumps(said))
    return summary_of(read(written))


def test_tiles_are_the_figures_since_the_first_step(tmp_path: Path) -> None:
    made_up = replace(RUN, idle=((1, 1),), slow={3: 0.05}, seconds=300)
    summary = summed(made_up, tmp_path)
    found = {tile.name: tile for tile in tiles(summary)}
    assert [*found] == ["GPU", "GPU memory", "CPUs", "waiting for data", "samples/s"]
    assert found["GPU"].value == "68 %"
    assert found["GPU"].share == pytest.approx(0.68, abs=0.01)
    assert found["GPU"].detail == "4 GPUs, 0 to 91 %"
    assert (found["GPU memory"].share, found["GPU memory"].detail) == (
        0.525,
        "at most 42.0 GiB of 80.0 GiB",
    )
    assert found["CPUs"].value == "80 %"
    assert found["CPUs"].share == pytest.approx(0.8, abs=0.01)
    assert found["CPUs"].detail == "12.8 of 16; memory at most 6.00 GiB of 8.00 GiB, 75 %"
    assert (found["waiting for data"].value, found["waiting for data"].detail) == (
        "1.6 %",
        "of a step of 250 ms",
    )
    assert float(found["samples/s"].value.replace(",", "")) == pytest.approx(1024, rel=0.02)
    own = summary.throughput.own_share
    assert own == pytest.approx(0.83, abs=0.02)
    assert (found["samples/s"].share, found["samples/s"].detail) == (
        None,
        f"4 ranks together; computing {own:.0%} of the step time".replace("%", " %"),
    )


def test_a_job_without_gpus_has_no_tiles_of_them(tmp_path: Path) -> None:
    found = [tile.name for tile in tiles(summed(replace(RUN, gpus_per_node=0), tmp_path))]
    assert found == ["CPUs", "waiting for data", "samples/s"]


@pytest.mark.parametrize("missing", ["*", "*.csv", "*.gpus.csv", "*.steps.csv"])
def test_tiles_of_what_is_not_known_have_no_bar(missing: str, tmp_path: Path) -> None:
    folder = RUN.write(tmp_path)
    for path in folder.glob(missing):
        path.unlink()
    unknown = [tile for tile in tiles(summary_of(read(folder))) if tile.value == "?"]
    assert len(unknown) == {"*": 3, "*.csv": 3, "*.gpus.csv": 0, "*.steps.csv": 4}[missing]
    assert all(tile.share is None and tile.detail for tile in unknown)


# What is planted, and what failure.json has; what is said of it.
FAILED = [
    (
        replace(RUN, code=1),
        "ValueError: no such file",
        "rank 3 on node02: ValueError: no such file",
    ),
    (replace(RUN, code=None), "lost", "rank 3 on node02: lost"),
    (replace(RUN, code=137), "", "exit code 137 (SIGKILL, often out of memory) on all ranks"),
    (replace(RUN, code=42), "", "exit code 42 on all ranks"),
    (
        replace(RUN, code=1, codes={3: 139}),
        "",
        "exit code 139 (SIGSEGV, a crash in native code) on rank 3 on node02; "
        "exit code 1 (an exception) on ranks 0-1 on node01, rank 2 on node02",
    ),
    (
        replace(RUN, code=None),
        "",
        "no end recorded of all ranks: killed; last reading at 1:41",
    ),
    (
        replace(RUN, nodes=1, ranks_per_node=1, code=78),
        "",
        "exit code 78 (the configuration is wrong) on rank 0 on node01",
    ),
    (
        replace(RUN, code=None, codes={0: 0, 1: 143}),
        "",
        "exit code 143 (SIGTERM, as by scancel or at the time limit) on rank 1 on node01; "
        "no end recorded of ranks 2-3 on node02: killed; last reading at 1:45",
    ),
]


@pytest.mark.parametrize(("made_up", "cause", "found"), FAILED)
def test_failure_names_the_culprit_or_the_exit_codes(
    made_up: MadeUp, cause: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = summed(made_up, tmp_path, cause)
    assert (
        getattr(failure(summary), "hint", "") == f"srunddp triage {summary.folder}"
    )  # not where a number is looked for
    monkeypatch.setenv("SRUNDDP_LOG_DIR", str(tmp_path))
    note = failure(summary)
    assert note is not None
    assert (note.rule, note.severity, note.hint) == ("run failed", "failed", "srunddp triage 4711")
    assert note.found == found
    assert str(note) == f"run failed: {found}"


# What is planted, what failure.json has, and whether the run is looked at while it runs.
WELL = {
    "ended": (RUN, "", False),
    "an old failure.json": (RUN, "ValueError", False),
    "still running": (replace(RUN, code=None), "", True),
    "stopped and requeued": (replace(RUN, code=143), STOPPED, False),
    "stopped, not requeued": (replace(RUN, code=75), "", False),
}


@pytest.mark.parametrize("name", WELL)
def test_failure_is_none_for_a_run_that_went_well(name: str, tmp_path: Path) -> None:
    made_up, cause, now = WELL[name]
    summary = summed(made_up, tmp_path, cause)
    if now:
        summary = replace(summary, ending=replace(summary.ending, running=True))
    assert failure(summary) is None


def test_failure_outside_slurm_names_no_job(tmp_path: Path) -> None:
    summary = replace(summed(replace(RUN, code=1), tmp_path), job="")
    note = failure(summary)
    assert note is not None
    assert note.hint == f"srunddp triage {tmp_path / '4711.0'}"
