"""The right note, and only that: what is planted in a made-up run is named, and a healthy one has
none.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from srunddp.cli import main
from srunddp.report import advice as judging
from srunddp.report.advice import Advice
from srunddp.report.format import duration, moment, percent
from srunddp.report.format import number as number_in_words
from srunddp.report.overview import tiles
from srunddp.report.run import read
from srunddp.report.summarize import summary_of
from tests.support.made_up_run import GIB, MadeUp

ON_GPUS = MadeUp(nodes=2, ranks_per_node=4, gpus_per_node=4, cpus=32)
RING: dict[str, Any] = {"chosen_link": 1e3, "other_link": 60e6}


def noted(made_up: MadeUp, folder: Path) -> tuple[Advice, ...]:
    return judging.notes(summary_of(read(made_up.write(folder))))


HEALTHY = {
    "CPUs": MadeUp(),
    "GPUs": ON_GPUS,
    "one rank": MadeUp(nodes=1, ranks_per_node=1),
    "16 nodes": MadeUp(nodes=16, ranks_per_node=4, gpus_per_node=4, seconds=300),
    "only heartbeats": MadeUp(trainer=False),
    "no epochs": MadeUp(epoch_s=0),
    "counters begin anew": replace(ON_GPUS, renewed=True),
    "clocks apart": MadeUp(ahead={1: 12.0, 2: -30.0}),
    "all CPUs used, none waited for": MadeUp(busy=0.99),
    "waiting for a CPU, others free": MadeUp(busy=0.5, delay=0.5),
    "data over another network": MadeUp(chosen_link=1e4, download=500e6),
    "a file server over another network": MadeUp(chosen_link=1e5, download=300e6, other_link=2e6),
    "a file server that is read and written": MadeUp(
        chosen_link=1e7, download=100e6, other_link=12e6
    ),
    "RDMA carries the training": MadeUp(chosen_link=1e3, rdma=1e9, other_link=2e6),
    "one node needs no network": MadeUp(nodes=1, chosen_link=0, other_link=60e6),
    "little traffic on another link": MadeUp(chosen_link=1e3, other_link=4e5),
    "data wait below the threshold": MadeUp(data=0.09),
    "a rank that is a little slower": MadeUp(slow={3: 0.018}),
    "a rank that stalled once": MadeUp(stall={3: 90.0}),
    "data that came late once": MadeUp(seconds=1200, data_stall=300.0),
    "GPUs above the threshold": replace(ON_GPUS, utilization=19.0),
    "time limit used": MadeUp(time_limit=1400.0),
    "nearly half of a long limit": MadeUp(seconds=2000, interval=20, time_limit=4500.0),
    "little time saved": MadeUp(time_limit=2300.0),
    "crashed early with much memory left": MadeUp(
        time_limit=36000.0, memory_limit=64 * GIB, code=1
    ),
    "killed early with much memory left": MadeUp(
        time_limit=36000.0, memory_limit=64 * GIB, code=None
    ),
    "the rest of a run": MadeUp(time_limit=36000.0, resumed=5000),
    "one of a job's steps": MadeUp(time_limit=36000.0, name="4711.3"),
    "little memory unused": MadeUp(memory=1 * GIB, memory_limit=4 * GIB),
    "finite losses": MadeUp(nan_after=600.0),
    "memory used": MadeUp(memory=40 * GIB, memory_limit=64 * GIB),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_note(name: str, tmp_path: Path) -> None:
    assert noted(HEALTHY[name], tmp_path) == ()


HOT_GPU = replace(ON_GPUS, hot=((0, 3),))
HEATED = "GPU 3 on node01 throttled (thermal or power brake) for 9"
SLOW_AND_HOT = (
    "°C at most; rank 3 on node01: 99.9 ms longer for its part of each step than the others,"
    " 33 % of the step"
)
# Its rule; what is planted; words of the finding; words of the hint.
PLANTED = [
    ("slow rank", replace(ON_GPUS, slow={5: 0.05}), "rank 5 on node02: 50", "--exclude=node02"),
    ("slow rank", MadeUp(nodes=2, ranks_per_node=1, slow={1: 0.1}), "rank 1 on node02", "node02"),
    (
        "slow rank",
        replace(ON_GPUS, slow=dict.fromkeys(range(4, 8), 0.06)),
        "ranks 4-7 on node02",
        "node02",
    ),
    ("slow rank", MadeUp(slow={2: 0.1}), "its own work, not the wait for data", "node02"),
    (
        "slow rank",
        MadeUp(slow_data={2: 0.1}),
        "the extra time is its wait for data",
        "how fast node02",
    ),
    ("slow rank", MadeUp(slow={0: 0.1}), "rank 0", "see what rank 0 alone does in each step"),
    (
        "slow rank",
        MadeUp(nodes=1, ranks_per_node=4, slow={2: 0.1}),
        "rank 2",
        "see what else runs on node01",
    ),
    # It starves the GPUs, too.
    ("slow rank", replace(ON_GPUS, slow={5: 0.5}, utilization=12), "rank 5", "node02"),
    ("data wait", MadeUp(data=0.4), "4", "--dataloader.num_workers"),
    ("data wait", replace(ON_GPUS, data=0.7, utilization=9), "7", "num_workers"),
    ("data wait", MadeUp(data=0.4, workers=0, busy=0.3), "4", "num_workers=2 (now 0)"),
    # The workers that are there take all CPUs, though nothing waits for one yet.
    ("data wait", MadeUp(data=0.4, workers=4, busy=0.94), "4", "as no CPU is left"),
    ("data wait", MadeUp(data=0.4, step_s=0.001, workers=2), "4", "num_workers=0"),
    ("data wait", MadeUp(data=0.4, step_s=0.001, workers=0), "4", "a larger --batch_size"),
    (
        "gpu idle",
        replace(ON_GPUS, utilization=8.0),
        "8 GPUs on node[01-02] used for",
        "--batch_size",
    ),
    (
        "gpu idle",
        replace(ON_GPUS, evaluation_s=140.0),
        "8 GPUs",
        "rarer or quicker evaluations and checkpoints: 6.",
    ),
    (
        "gpu idle",
        replace(ON_GPUS, idle=((1, 2),)),
        "GPU 2 on node02 used for 0.0 %",
        "--gpus-per-node",
    ),
    ("wrong interface", MadeUp(**RING), "eno1 carries 114 MiB/s on node[01-03]", "ifaces.conf"),
    ("wrong interface", MadeUp(**RING, rdma=1e3), "eno1 carries", "ifaces.conf"),
    ("cpu oversubscribed", MadeUp(busy=1.0, delay=0.5), "100 % of 8 CPUs", "--cpus-per-task"),
    # Too few for the loader, too.
    ("cpu oversubscribed", MadeUp(busy=1.0, delay=0.5, data=0.4), "CPUs", "cpus-per-task"),
    ("time limit", MadeUp(time_limit=7200.0), "10 min 5 s of 2 h used, 8.4 %", "--time=0:20:00"),
    ("memory unused", MadeUp(memory_limit=64 * GIB), "6.00 GiB of 64.0 GiB", "--mem=8G"),
    ("gpu throttled", HOT_GPU, HEATED, "--exclude=node01"),
    (
        "gpu fault",
        replace(ON_GPUS, faults=((1, "GPU-1-2,2,hardware,79,Xid 79; fallen off the bus"),)),
        "GPU 2 (GPU-1-2) of node02: Xid 79; fallen off the bus, first at 1:4",
        "--exclude=node02",
    ),
    (
        "gpu fault",
        replace(ON_GPUS, faults=((0, "GPU-0-0,0,program,31,Xid 31"),)),
        "GPU 0 (GPU-0-0) of node01: Xid 31",
        "the program's own fault",
    ),
    ("gpu throttled", replace(HOT_GPU, slow={3: 0.1}), SLOW_AND_HOT, "node01"),
    (
        "not finite",
        MadeUp(nan_after=62.0),
        "loss is nan, first at step 350, 1:10 after the start",
        "learning rate",
    ),
    (
        "not finite",
        MadeUp(nan_after=6.0, seconds=15),
        "loss is nan, first at step 50",
        "learning rate",
    ),
]


@pytest.mark.parametrize(("rule", "made_up", "found", "hint"), PLANTED)
def test_what_is_planted_is_named_and_nothing_else(
    rule: str, made_up: MadeUp, found: str, hint: str, tmp_path: Path
) -> None:
    (note,) = noted(made_up, tmp_path)
    assert note.rule == rule
    assert found in note.found
    assert hint in note.hint
    assert note.threshold


def test_more_workers_are_advised_only_where_a_cpu_is_unused(tmp_path: Path) -> None:
    """Neither in steps too short for them, nor where those that are there use all CPUs."""
    for number, made_up in enumerate(
        (
            MadeUp(data=0.4, workers=4, busy=0.94),
            MadeUp(data=0.4, step_s=0.001, workers=2),
            MadeUp(data=0.4, step_s=0.001, workers=0),
        )
    ):
        (note,) = noted(made_up, tmp_path / str(number))
        assert not note.hint.startswith("more --dataloader.num_workers"), note
        assert not re.match(r"--dataloader.num_workers=[1-9]", note.hint), note


def test_a_note_s_figure_is_above_its_threshold(tmp_path: Path) -> None:
    """Also where most ranks wait for data, and the average of all is below it."""
    waiting = {rank: 0.03 for rank in range(5)}
    made_up = MadeUp(nodes=4, ranks_per_node=2, data=0.0, slow_data=waiting)
    summary = summary_of(read(made_up.write(tmp_path)))
    for note in judging.notes(summary):
        assert note.rule != "data wait" or (note.cost or 0.0) > judging.DATA_WAIT, note
    assert summary.data_share is not None
    assert summary.data_share < judging.DATA_WAIT


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_quantity_has_one_value_wherever_it_is_shown(ranks: int, tmp_path: Path) -> None:
    """Ranks that wait for unlike times have several averages: card, note, legend and JSON show the
    same one.
    """
    folder = MadeUp(nodes=1, ranks_per_node=ranks, data=0.4, slow_data={0: 0.015}).write(tmp_path)
    found = json.loads(shown(folder, "--json"))
    (note,) = found["notes"]
    assert note["cost"] == found["data_share"]
    share = percent(found["data_share"])
    assert share in note["found"]
    (card,) = (tile for tile in tiles(summary_of(read(folder))) if tile.name == "waiting for data")
    assert card.value == share
    shown(folder)
    page = words((folder.parent / "report.html").read_text())
    for figure in (
        share,
        duration(found["step_s"]),
        f"{number_in_words(found['throughput']['per_s'])}",
    ):
        assert f": {figure} on average" in page


SMALL = MadeUp(nodes=2, ranks_per_node=2, gpus_per_node=2, seconds=200)
# The rule, what is planted, and the share of the step time that it costs; None where that is not
# known.
SHOWN = [
    ("slow rank", replace(SMALL, slow={3: 0.05}), 0.2),
    ("data wait", replace(SMALL, data=0.35, utilization=60), 0.35),
    ("gpu idle", replace(SMALL, idle=((1, 1),)), None),
    ("cpu oversubscribed", replace(SMALL, busy=0.99, delay=0.4), 0.4),
    ("wrong interface", replace(SMALL, chosen_link=1e4, other_link=90e6), None),
    ("gpu throttled", replace(SMALL, hot=((1, 1),)), None),
    ("gpu throttled", replace(SMALL, hot=((1, 1),), slow={3: 0.05}), 0.2),
    ("memory unused", replace(SMALL, memory_limit=64 * GIB), None),
    ("gpu fault", replace(SMALL, faults=((1, "GPU-1-1,1,hardware,79,Xid 79"),)), None),
    ("not finite", replace(SMALL, nan_after=62.0), None),
]


def shown(folder: Path, *options: object) -> str:
    """What the command prints, where there is no Slurm."""
    done = CliRunner(env={"PATH": ""}).invoke(main, ["report", str(folder), *map(str, options)])
    assert done.exit_code == 0, done.output
    return done.stdout


def words(text: str) -> str:
    return " ".join(unescape(text).split())


@pytest.mark.parametrize(("rule", "made_up", "cost"), SHOWN)
def test_text_page_and_json_name_one_trouble(
    rule: str, made_up: MadeUp, cost: float | None, tmp_path: Path
) -> None:
    folder = made_up.write(tmp_path)
    text = words(shown(folder))
    page = words((folder.parent / "report.html").read_text())
    (note,) = json.loads(shown(folder, "--json"))["notes"]
    assert (note["rule"], note["cost"]) == (rule, cost and pytest.approx(cost, abs=0.01))
    assert note["severity"] == ("unused" if rule == "memory unused" else "lost")
    for output in (text, page):
        assert all(note[name] in output for name in ("rule", "found", "threshold", "hint"))
        assert output.count("threshold: ") == 1


def test_text_page_and_json_say_why_a_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRUNDDP_LOG_DIR", str(tmp_path))
    folder = replace(SMALL, code=1, codes={3: 137}).write(tmp_path)
    said = {"rank": 3, "node": "node02", "cause": "killed by SIGKILL: out of memory"}
    folder.with_name("failure.json").write_text(json.dumps(said))
    outputs = [shown(folder), (folder.parent / "report.html").read_text(), shown(folder, "--json")]
    for words_of_it in (
        "run failed",
        "rank 3 on node02: killed by SIGKILL: out of memory",
        "srunddp triage 4711",
    ):
        assert all(words_of_it in output for output in outputs)
    assert all("threshold: " not in output for output in outputs[:2])
    found = json.loads(outputs[-1])
    assert (found["failure"]["severity"], found["notes"]) == ("failed", [])


def test_the_time_used_is_the_jobs_where_slurm_says_it(tmp_path: Path) -> None:
    """Staging and other steps are in it; and the rest of a requeued run says nothing of its whole
    time.
    """
    rest = MadeUp(time_limit=36000.0).write(tmp_path, restart=1)
    assert judging.notes(summary_of(read(rest))) == ()
    summary = summary_of(read(MadeUp(time_limit=36000.0, name="4711.3").write(tmp_path)))
    (note,) = judging.notes(replace(summary, job_s=7200.0))
    assert (note.found, note.hint[:14]) == ("2 h of 10 h used, 20 %", "--time=3:00:00")
    assert judging.notes(replace(summary, job_s=20000.0)) == ()


def test_unrelated_problems_are_notes_by_their_cost(tmp_path: Path) -> None:
    """What costs most of the step time is first, and what was requested in vain is last."""
    made_up = replace(
        ON_GPUS, slow={5: 0.05}, time_limit=36000.0, memory_limit=64 * GIB, hot=((0, 3),), **RING
    )
    rules = ["slow rank", "gpu throttled", "wrong interface", "time limit", "memory unused"]
    assert [note.rule for note in noted(made_up, tmp_path / "slow")] == rules
    waits = noted(replace(made_up, data=0.4), tmp_path / "waits")
    assert [note.rule for note in waits] == ["data wait", *rules]


@pytest.mark.parametrize(
    "made_up", [MadeUp(seconds=15, data=0.5), MadeUp(step_s=100.0, seconds=600, data=0.5)]
)
def test_of_a_short_run_nothing_is_concluded_and_that_is_said(
    made_up: MadeUp, tmp_path: Path
) -> None:
    summary = summary_of(read(made_up.write(tmp_path)))
    assert (judging.notes(summary), "only" in judging.too_short(summary)) == ((), True)
    assert "nothing is concluded" in judging.too_short(summary)


def started(folder: Path, number: str, *names: str, at: float) -> Path:
    """A start of the run on these nodes, two ranks on each."""
    made_up = MadeUp(
        nodes=len(names), seconds=60, start=at, node_name=names.__getitem__, time_limit=None
    )
    written = made_up.write(folder / number)
    return written.rename(folder / f"monitor.{number}")


def test_a_node_that_left_is_named_with_where_its_ranks_went(tmp_path: Path) -> None:
    """One before the third start, two before the fourth; the second start wrote nothing, one of
    Slurm is another.
    """
    started(tmp_path, "0", "node07", "node08", at=1_700_000_000)
    started(tmp_path, "1", "node01", "node02", "node03", at=1_800_000_000)
    (tmp_path / "monitor.1.1").mkdir()
    third = started(tmp_path, "1.2", "node01", "node06", "node03", at=1_800_000_200)
    last = started(tmp_path, "1.10", "node05", "node06", "node04", at=1_800_000_400)
    first = f"node02 left: ranks 2-3 on node06 since {moment(1_800_000_200.5)}"
    then = moment(1_800_000_400.5)
    said = [
        first,
        f"node01 left: ranks 0-1 on node05 since {then}",
        f"node03 left: ranks 4-5 on node04 since {then}",
    ]
    assert summary_of(read(third)).moves == (first,)
    assert summary_of(read(tmp_path / "monitor.1")).moves == ()
    tasks = last / "node05.tasks.csv"
    # Of another number before it moved.
    tasks.write_text(tasks.read_text() + "1800000430.0,7,1.0,1000,2,0.1\n")
    assert [*read(last).ranks] == [0, 1, 2, 3, 4, 5]
    done = CliRunner().invoke(main, ["report", str(tmp_path), "--output", str(tmp_path)])
    assert [line for line in done.output.splitlines() if " left: " in line] == said
    page = unescape((tmp_path / "report.html").read_text())
    assert all(f"<p>{line}</p>" in page for line in said)
    assert (
        json.loads(CliRunner().invoke(main, ["report", str(last), "--json"]).output)["moves"]
        == said
    )
