"""The charts of the page: what is drawn of a run, that no average hides what stands out, and what
is missing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from srunddp.report.html import chart
from srunddp.report.panels import Section, sections
from srunddp.report.run import RunData, read
from srunddp.report.summarize import summary_of
from srunddp.report.summary import NotFinite
from tests.support.facts import tells
from tests.support.made_up_run import MadeUp

ON_GPUS = MadeUp(
    nodes=2, ranks_per_node=4, gpus_per_node=4, seconds=120, epoch_s=60, slow={5: 0.05}
)
MANY = replace(ON_GPUS, gpus_per_node=8, slow={})
# Two samples are put together, and four of those.
LONG = replace(MANY, ranks_per_node=1, seconds=8000, epoch_s=0)


def drawn(run: RunData) -> dict[str, Section]:
    return {each.title: each for each in sections(run, summary_of(run))}


def written(made_up: MadeUp, folder: Path) -> dict[str, Section]:
    return drawn(read(made_up.write(folder)))


def figures(section: Section) -> dict[str, ElementTree.Element]:
    """The charts of a section by their titles."""
    html = "".join(chart(figure) for figure in section.figures)
    found = ElementTree.fromstring(f"<div>{html}</div>")
    return {
        svg.get("aria-label", ""): figure
        for figure in found
        for svg in figure
        if svg.get("role") == "img"
    }


def said(figure: ElementTree.Element) -> dict[str, str]:
    """What is shown when the mouse is over a column, by its time, or over a row, by its name."""
    parts = [re.split(r"\n|: ", title.text or "", maxsplit=1) for title in figure.iter("title")]
    return {part[0]: part[-1] for part in parts}


def count(figure: ElementTree.Element, kind: str) -> int:
    return sum(each.get("class") == kind for each in figure.iter())


def plant(path: Path, key: str, begin: float, end: float, **values: object) -> None:
    """Other values of one GPU from one time to another, since the start."""
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    for row in rows:
        if row[1] == key and begin <= float(row[0]) - MadeUp.start < end:
            for name, value in values.items():
                row[header.index(name)] = str(value)
    path.write_text("".join(f"{','.join(row)}\n" for row in [header, *rows]))


@pytest.mark.slow
def test_one_sample_of_one_gpu_is_the_end_of_a_band(tmp_path: Path) -> None:
    """Of a run that is thinned: an idle sample is the least of its column, and a minute of heat the
    most.
    """
    folder = LONG.write(tmp_path)
    plant(folder / "node02.gpus.csv", "GPU-1-3", 4000, 4005, utilization_percent=0)
    plant(folder / "node02.gpus.csv", "GPU-1-6", 4000, 4060, temperature_c=95)
    charts = figures(drawn(read(folder))["GPUs"])
    used = said(charts["GPU utilization (%)"])
    # Before the first step and after the last one all are idle.
    assert [time for time, words in used.items() if "(0–" in words][1:-1] == ["1:06:40"]
    assert re.search(r"of 16 GPUs \(range\): 9\d\S* \(0–9\d\) %", used["1:06:40"])
    hot = said(charts["Temperature (°C)"])
    assert [time for time, words in hot.items() if "–95)" in words] == ["1:06:40", "1:07:20"]
    assert "hottest: node02:6" in "".join(charts)
    # A few GPUs have their own line, with a band of its own.
    few = replace(LONG, nodes=1, gpus_per_node=2)
    folder = few.write(tmp_path / "few")
    plant(folder / "node01.gpus.csv", "GPU-0-1", 4000, 4005, utilization_percent=0)
    used = said(figures(drawn(read(folder))["GPUs"])["GPU utilization (%)"])
    assert re.search(
        r"GPU 0: 9\d\S* \([89]\d–9\d\) %\nnode01 GPU 1: 9\d\S* \(0–9\d\) %", used["1:06:40"]
    )


def test_all_charts_of_a_run_have_one_axis_of_time(tmp_path: Path) -> None:
    """Also where the series of one kind are longer, and all have the epochs."""
    folder = replace(LONG, gpus_per_node=1, epoch_s=1000).write(tmp_path)
    found = drawn(read(folder))
    marks = set()
    for title in ("Time line", "GPUs", "Nodes", "Step time by rank"):
        for figure in figures(found[title]).values():
            marks.add(
                tuple(
                    (each.get("x"), each.text)
                    for each in figure.iter("text")
                    if each.get("x") != "-6"
                )
            )
    assert len(marks) == 1
    words = [word for _, word in marks.pop()]
    assert (words[:5], words[5:]) == (
        [*"12345"],
        ["6", "7", "8", *(f"{minutes} min" for minutes in range(0, 121, 30))],
    )


def test_gpus_that_stand_out_are_marked_and_named(tmp_path: Path) -> None:
    odd = figures(written(replace(MANY, idle=((1, 3),), hot=((0, 2),)), tmp_path / "odd")["GPUs"])
    for title in (
        "Utilization by GPU (%); least: node02:3",
        "Highest temperature by GPU (°C); hottest: node01:2",
    ):
        assert count(odd[title], "marked") == 1
    assert "SM clock (MHz)" in odd
    healthy = figures(written(MANY, tmp_path / "healthy")["GPUs"])
    assert {"Utilization by GPU (%)", "Highest temperature by GPU (°C)"} <= {*healthy}
    assert "SM clock (MHz)" not in healthy
    # Where half of them are idle it is none of them that stands out.
    half = tuple((1, index) for index in range(8))
    assert "Utilization by GPU (%)" in figures(
        written(replace(MANY, idle=half), tmp_path / "half")["GPUs"]
    )


def test_mig_instances_of_one_gpu_are_told_apart(tmp_path: Path) -> None:
    folder = replace(ON_GPUS, nodes=1, gpus_per_node=2).write(tmp_path)
    file = folder / "node01.gpus.csv"
    file.write_text(
        file.read_text().replace("GPU-0-1,1,", "MIG-9b2f-1,0,").replace("GPU-0-0,", "MIG-77aa-0,")
    )
    run = read(folder)
    used = figures(drawn(run)["GPUs"])["GPU utilization (%)"]
    words = [each for each in used.itertext() if each.startswith("node01")]
    assert [each.partition(":")[0] for each in words if "\n" not in each] == [
        "node01 GPU 0 MIG-77aa-0",
        "node01 GPU 0 MIG-9b2f-1",
    ]
    assert [each.index for each in summary_of(run).gpus] == ["0 MIG-77aa-0", "0 MIG-9b2f-1"]


def test_few_gpus_have_lines_and_their_limit_of_memory(tmp_path: Path) -> None:
    section = written(ON_GPUS, tmp_path)["GPUs"]
    charts = figures(section)
    assert [*charts] == [
        "GPU utilization (%)",
        "GPU memory (GiB)",
        "Memory bandwidth (%)",
        "Power (W)",
        "Temperature (°C)",
    ]
    assert section.missing == "Not known: SM activity, Tensor core activity."
    memory = charts["GPU memory (GiB)"]
    assert [count(memory, each) for each in ("line c7", "line limit", "limit")] == [1, 0, 2]
    assert "limit: 80" in "".join(memory.itertext())


def test_the_slow_rank_and_the_phases_have_a_row_each(tmp_path: Path) -> None:
    found = written(ON_GPUS, tmp_path)
    ((title, steps),) = figures(found["Step time by rank"]).items()
    assert tells(title, "step", "(ms)", "slow", "rank 5 on node02")
    assert count(steps, "marked") == 1
    (launch,) = figures(found["Launch"]).values()
    assert said(launch)["3"].startswith("srun: 60.0 ms\npython: 300 ms\nmeeting: ")


def test_many_epochs_are_not_all_marked_and_pauses_are_shown(tmp_path: Path) -> None:
    charts = figures(
        written(MadeUp(seconds=300, epoch_s=2, evaluation_s=0.1), tmp_path)["Time line"]
    )
    assert [*charts] == [
        "Throughput (samples/s)",
        "Step time (ms)",
        "Waiting for data (% of the step time)",
        "Evaluations and checkpoints",
    ]
    assert all(30 < count(figure, "mark") <= 60 for figure in charts.values())
    pauses = said(charts["Evaluations and checkpoints"])
    assert re.fullmatch(r"evaluation: 14.9 s, 149 times", pauses["evaluation"])


@pytest.mark.parametrize("code", [0, None])
def test_the_end_of_a_run_is_no_drop_of_throughput(code: int | None, tmp_path: Path) -> None:
    """Nor is it where the run was killed."""
    charts = figures(written(MadeUp(epoch_s=0, seconds=62, code=code), tmp_path)["Time line"])
    words = [*said(charts["Throughput (samples/s)"]).values()]
    assert len(words) == 13
    assert re.fullmatch(r"all ranks: 19\d\d samples/s", words[-1].replace(",", ""))


def test_what_the_training_logged_is_drawn_by_its_last_word(tmp_path: Path) -> None:
    run = read(ON_GPUS.write(tmp_path))
    assert "Training" not in drawn(run)
    run.metrics = {
        "loss": [(10.0, 2.0), (90.0, 1.0)],
        "val/loss": [(60.0, 3.0)],
        "accuracy": [(60.0, 0.5)],
    }
    charts = figures(drawn(run)["Training"])
    assert [*charts] == ["Loss", "Accuracy"]
    assert "loss: 1.5 (1–2)val/loss: 3" in "".join(charts["Loss"].itertext())
    # What there is no room for is counted.
    run.metrics |= {f"{part}/F{number}": [(60.0, 1.0)] for number in range(20) for part in "ab"}
    found = drawn(run)["Training"]
    assert ([*figures(found)][2:4], len(figures(found))) == (["F0", "F1"], 12)
    assert found.missing == "Not drawn: 20 more of metrics.jsonl."
    # One line from the first value to the last, whatever lies between them.
    assert count(charts["Loss"], "line c0") == 1
    run.not_finite = NotFinite("loss", "nan", 62.0, 5)
    assert tells(next(iter(figures(drawn(run)["Training"]))), "Loss", "nan", "1:02")


def test_what_was_not_sampled_is_a_sentence(tmp_path: Path) -> None:
    found = written(MadeUp(trainer=False, epoch_s=0, seconds=60), tmp_path)
    missing = {each.title: each.missing for each in found.values()}
    assert (missing["Nodes"], missing["Launch"]) == ("", "")
    assert tells(missing["Time line"], "throughput, step time, waiting for data")
    assert tells(missing["GPUs"], "No GPU")
    assert tells(missing["Step time by rank"], "not timed")
    assert len(missing) == 5
