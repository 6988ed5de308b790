"""``srunddp report``: from a run's folder, or a job's number, to a summary, a page with charts."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen

import pytest

from srunddp.report import format, text
from srunddp.report.advice import notes
from srunddp.report.format import format_number
from srunddp.report.html import page
from srunddp.report.panels import sections
from srunddp.report.run import read
from srunddp.report.summarize import summary_of
from srunddp.report.summary import Summary
from tests.support.facts import tells
from tests.support.made_up_run import MadeUp
from tests.support.starting import LONG, SRUNDDP, bare, one_message, srunddp, write

pytestmark = pytest.mark.slow

ON_GPUS = MadeUp(nodes=2, ranks_per_node=4, gpus_per_node=4, cpus=32, slow={5: 0.05})
SHORT = MadeUp(nodes=2, ranks_per_node=1, seconds=60)
HOSTILE = '$\\frac$<b onload="x">&\x1b[31m_'


def summed(made_up: MadeUp, folder: Path) -> Summary:
    return summary_of(read(made_up.write(folder)))


def shown(summary: Summary) -> str:
    return "\n".join(text.lines(summary, notes(summary)))


def report(*arguments: object, folder: Path, **variables: str) -> CompletedProcess[str]:
    return srunddp("report", *arguments, folder=folder, **variables)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedProcess[str]]:
    """A run on GPUs, and what the command printed of it."""
    folder = tmp_path_factory.mktemp("reported")
    ON_GPUS.write(folder / "logs")
    return folder / "logs" / "4711.0", report("logs/4711.0", folder=folder)


def test_the_figures_are_those_of_the_run(tmp_path: Path) -> None:
    """A step of 0.25 s on 8 ranks with 64 samples each; evaluations and checkpoints stop it for 9 s
    in each 150 s.
    """
    summary = summed(ON_GPUS, tmp_path)
    assert (summary.world_size, summary.nodes, summary.steps) == (8, ("node01", "node02"), 2256)
    assert summary.step_s == pytest.approx(0.25, rel=0.01)
    assert summary.data_share == pytest.approx(0.004 / 0.25, rel=0.05)
    assert summary.slowest_rank == 5
    assert summary.ranks[5].own_s == pytest.approx(0.13, rel=0.01)
    assert summary.throughput.samples == 2256 * 512
    assert summary.throughput.per_s == pytest.approx(2048 * 141 / 150, rel=0.02)
    assert summary.throughput.own_share == pytest.approx(1 - 0.016 - 0.05 / 0.25 * 7 / 8, abs=0.01)
    assert (
        summary.checkpoints.count,
        summary.checkpoints.stood_s,
        summary.checkpoints.background_s,
    ) == (4, 4.0, 12.0)
    assert [each.number for each in summary.epochs] == [1, 2, 3, 4]
    begins = [5.008 + 150 * number for number in range(4)]
    assert [each.begin_s for each in summary.epochs] == pytest.approx(begins, abs=0.01)
    assert len(summary.evaluations) == 4
    gpu = summary.gpus[0]
    assert gpu.utilization_percent == pytest.approx(92 * 141 / 150, rel=0.05)
    assert gpu.energy_j == pytest.approx((gpu.power_w or 0) * 600, rel=0.05)
    assert f", {format_number((summary.energy_j or 0) / (2256 * 512))} J per sample" in shown(
        summary
    )
    assert summary.ranks[0].delay_share == pytest.approx(0.01, rel=0.01)
    node = summary.per_node[0]
    assert node.used_cpus == pytest.approx(0.8 * 32, rel=0.01)
    assert node.cpus == 32
    assert node.read_bytes_per_s == pytest.approx(20e6, rel=0.03)


def test_json_has_the_figures_of_the_text(
    reported: tuple[Path, CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, printed = reported
    there = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    done = report("--json", folder, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == there
    found = json.loads(done.stdout)
    duration = format.duration
    size = format.size
    percent = format.percent
    number = format.number
    words = " ".join(printed.stdout.split())
    for note in found["notes"]:
        assert (
            f"{note['rule']}: {note['found']} (threshold: {note['threshold']}) -> {note['hint']}"
            in words
        )
    slow = found["ranks"][found["slowest_rank"]]
    steps = f"{found['steps']:,} of {duration(found['step_s'])}, "
    joules = f"{number(found['energy_j'] / 3.6e6)} kWh"
    samples = f"; {found['throughput']['samples']:,.0f} samples"
    said = [steps, duration(slow["own_s"]), joules, samples, duration(found["seconds"])]
    assert [each for each in said if each not in words] == []
    assert (bool(found["notes"]), found["failure"]) == (True, None)
    tables = {
        noun: format.cells(rows)
        for noun, rows in text.tables(summary_of(read(folder / "monitor.0"))).items()
    }
    for noun, key in (("node", "per_node"), ("rank", "ranks"), ("GPU", "gpus")):
        assert len(tables[noun]) == len(found[key]) + 1
    for each, row in zip(found["ranks"], tables["rank"][1:], strict=True):
        times = [duration(each[name]) for name in ("step_s", "own_s")]
        rest = [percent(each["delay_share"]), size(each["rss_bytes"])]
        share = percent(each["data_s"] / each["step_s"])
        assert row == [str(each["rank"]), each["node"], *times, share, *rest]
    for each, row in zip(found["per_node"], tables["node"][1:], strict=True):
        figures = [number(each["used_cpus"]), number(each["cpus"]), size(each["memory_bytes"])]
        storage = [f"{size(each[f'{name}_bytes_per_s'])}/s" for name in ("read", "written")]
        assert row[:6] == [each["node"], *figures, *storage]
    for each, row in zip(found["gpus"], tables["GPU"][1:], strict=True):
        used = f"{each['utilization_percent']:.0f} %"
        power = f"{each['power_w']:.0f} W"
        assert row[:4] == [each["index"], each["node"], used, power]


def test_json_leaves_a_page_in_the_folder_that_is_named(tmp_path: Path) -> None:
    SHORT.write(tmp_path / "logs")
    done = report("--json", "--output=page", "--follow", "4711", folder=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["world_size"]) == (0, 2)
    assert (tmp_path / "page" / "report.html").exists()
    assert not (tmp_path / "logs" / "4711.0" / "report.html").exists()


def test_the_phases_of_the_launch_are_those_of_each_rank(tmp_path: Path) -> None:
    summary = summed(MadeUp(nodes=1, ranks_per_node=2), tmp_path)
    first, second = summary.launches.values()
    names = ["python", "meeting", "import", "init", "script", "prepare", "first step"]
    assert [[*first], [*second]] == [names, ["srun", *names]]
    lasted = {name: end - begin for name, (begin, end) in second.items()}
    expected = {
        "srun": 0.02,
        "python": 0.3,
        "init": 0.4,
        "script": 0.1,
        "prepare": 0.802,
        "first step": 0.2,
    }
    assert {name: lasted[name] for name in expected} == pytest.approx(expected, abs=2e-3)
    assert second["first step"][1] == pytest.approx(5.202, abs=2e-3)
    (launch,) = summed(
        MadeUp(nodes=1, ranks_per_node=1, trainer=False), tmp_path / "own loop"
    ).launches.values()
    assert [*launch][-1] == "script"
    assert launch["script"] == pytest.approx((3.36, 5.201), abs=2e-3)


def test_a_baseline_gives_the_scaling_efficiency(tmp_path: Path) -> None:
    replace(SHORT, nodes=1, name="4710.0").write(tmp_path / "logs")
    replace(SHORT, step_s=0.25).write(tmp_path / "logs")
    done = report("--text", "--baseline", "4710", "4711", folder=tmp_path)
    assert done.returncode == 0
    assert tells(done.stdout, "scaling", "80 %", "4710.0", "1 rank")


def test_counters_that_begin_anew_change_no_figure(tmp_path: Path) -> None:
    runs = [replace(ON_GPUS, renewed=each) for each in (False, True)]
    whole, renewed = (summed(run, tmp_path / str(run.renewed)) for run in runs)
    assert renewed.per_node[0].used_cpus == pytest.approx(whole.per_node[0].used_cpus, rel=0.02)
    assert renewed.ranks[0].cpu_s == pytest.approx(whole.ranks[0].cpu_s, rel=0.02)


def test_clocks_that_differ_move_no_phase_and_are_named(tmp_path: Path) -> None:
    right = summed(MadeUp(), tmp_path / "right")
    wrong = summed(MadeUp(ahead={1: 12.0, 2: -30.0}), tmp_path / "wrong")
    phases = [
        [
            (name, round(begin, 2), round(end, 2))
            for each in run.launches.values()
            for name, (begin, end) in each.items()
        ]
        for run in (right, wrong)
    ]
    assert phases[0] == phases[1]
    assert wrong.seconds == pytest.approx(right.seconds, abs=0.01)
    assert tells(shown(wrong), "clock", "node02", "12 s ahead", "rank 0")
    assert "the clock of node03 is 30 s behind rank 0's: corrected in this report" in shown(wrong)
    assert "clock" not in shown(right)


def test_a_short_run_is_not_slower_for_its_last_interval(tmp_path: Path) -> None:
    for seconds in (20, 22, 24):
        made_up = MadeUp(seconds=seconds, epoch_s=seconds, evaluation_s=0.1, checkpoint_s=0)
        assert summed(made_up, tmp_path / str(seconds)).throughput.per_s == pytest.approx(
            1920, rel=0.02
        )


def test_what_only_newer_gpus_measure_has_columns_where_known(tmp_path: Path) -> None:
    folder = ON_GPUS.write(tmp_path)
    assert "tensor cores" not in shown(summary_of(read(folder)))
    for path in folder.glob("*.gpus.csv"):
        path.write_text(path.read_text().replace(",,,,,,\n", ",,,63,40,27,51\n"))
    header, *rows = format.cells(text.tables(summary_of(read(folder)))["GPU"])
    assert header[2:6] == ["used", "SMs active", "tensor cores", "power"]
    assert [row[3:5] for row in rows] == [["63 %", "27 %"]] * 8


def test_many_rows_are_folded_to_those_that_stand_out(tmp_path: Path) -> None:
    """Those of a note are among them; what is the same for all stands in the title."""
    made_up = MadeUp(
        nodes=8, ranks_per_node=8, gpus_per_node=8, seconds=100, slow={37: 0.06}, hot=((4, 5),)
    )
    summary = summed(replace(made_up, idle=((6, 1),)), tmp_path)
    lines = shown(summary).splitlines()
    assert max(map(len, lines)) <= 120
    rows = [re.split(r"  +", line) for line in lines]
    header, *gpus = rows[
        next(at for at, row in enumerate(rows) if row[0] == "GPU" and "node" in row) :
    ]
    assert sorted(row[:2] for row in gpus) == [
        ["1", "node07"],
        ["5", "node05"],
        ["62 others", "node[01-08]"],
    ]
    used = [
        each.utilization_percent or 0.0
        for each in summary.gpus
        if (each.node, each.index) != ("node07", "1")
    ]
    assert gpus[2][header.index("used")] == f"{min(used):.0f}–{max(used):.0f} %"
    ranks = [row for row in rows if row[0] in ("37", "63 others")]
    assert [row[1] for row in ranks] == ["node05", "node[01-08]"]
    assert any(line.startswith("8 nodes, each: CPUs used 6.4, CPUs 8, read") for line in lines)


def test_how_each_rank_ended_is_shown(tmp_path: Path) -> None:
    killed = shown(summed(MadeUp(code=None), tmp_path / "killed"))
    assert tells(killed, "FAIL  run failed", "killed", "10:05")
    assert re.search(r"FAIL  run failed: .*\n      -> ", killed)
    some = shown(summed(MadeUp(code=None, codes={1: 7, 2: 7, 4: 1}), tmp_path / "some"))
    for said in (
        "1 (an exception) on rank 4 on node03",
        "7 on rank 1 on node01",
        "of rank 0 on node01, rank 3 on node02",
    ):
        assert said in some
    run = read(tmp_path / "killed" / "4711.0" / "monitor.0")
    last = MadeUp.start + 607
    assert tells(shown(summary_of(run, last)), "still running", "10:05")
    assert "killed" in shown(summary_of(run, last + 30))
    folder = MadeUp(code=1).write(tmp_path / "failed")
    write(folder.parent / "failure.json", '{"rank": 2, "node": "node02", "cause": "OSError: no"}')
    failed = shown(summary_of(read(folder)))
    assert tells(failed, "exit code 1", "all ranks")
    assert tells(failed, "FAIL  run failed", "rank 2", "node02", "OSError: no")
    assert re.search(r"FAIL  run failed: .*\n      -> ", failed)
    assert "notes: none" not in failed
    nobody = {"rank": None, "node": "", "cause": "node02 and node03 cannot reach each other by TCP"}
    write(folder.parent / "failure.json", json.dumps(nobody))
    failed = shown(summary_of(read(folder)))
    assert tells(failed, "FAIL  run failed: node02 and node03 cannot reach each other")
    assert "rank None" not in failed
    stopped = shown(summed(MadeUp(code=75), tmp_path / "stopped"))
    assert "\nexit code 75 on all ranks\n" in stopped
    assert "FAIL" not in stopped


class Page(HTMLParser):
    """What stands in a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words += data


def test_the_page_is_one_file_that_needs_nothing_else(
    reported: tuple[Path, CompletedProcess[str]],
) -> None:
    html = (reported[0] / "report.html").read_text()
    found = Page(html)
    assert not {"script", "link", "iframe", "object", "form"} & {tag for tag, _ in found.tags}
    for _, attributes in found.tags:
        assert not any(name in ("href", "srcset") or name.startswith("on") for name in attributes)
        assert "src" not in attributes
    assert not re.search(r"url\(|@import|https?:", html)
    assert "<title>Run 4711.0: 8 ranks, train.py --epochs=20</title>" in html


def test_every_chart_has_a_text_and_the_page_says_all(
    reported: tuple[Path, CompletedProcess[str]],
) -> None:
    folder, done = reported
    assert [path.name for path in folder.glob("report*")] == ["report.html"]
    assert done.stdout.splitlines()[-1] == "written: logs/4711.0/report.html"
    found = Page((folder / "report.html").read_text())
    charts = [attributes for _, attributes in found.tags if attributes.get("role") == "img"]
    assert len(charts) > 10
    assert all(chart["aria-label"] for chart in charts)
    assert done.stderr == ""
    for each in (
        "rank 5 on node02",
        "2,256 of 250 ms, ",
        "computing 81 % of the step time",
        "0.786 kWh by 8 GPUs",
    ):
        assert each in done.stdout
        assert each in found.words


def test_the_page_begins_with_the_failure_and_what_costs_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red with the command to go on; then a bar for each share, the notes by their cost, charts,
    and tables closed.
    """
    monkeypatch.setenv("SRUNDDP_LOG_DIR", str(tmp_path))
    made_up = replace(
        ON_GPUS, seconds=60, code=1, codes={5: 137}, slow={5: 0.05}, hot=((1, 2),), data=0.3
    )
    run = read(made_up.write(tmp_path))
    summary = summary_of(run)
    html = page(summary, notes(summary), sections(run, summary))
    classes = [attributes.get("class") for _, attributes in Page(html).tags]
    assert (classes.count("note failed"), classes.count("tile"), classes.count("bar")) == (1, 5, 4)
    assert (
        classes.index("note failed")
        < classes.index("tile")
        < classes.index("note lost")
        < classes.index("chart")
    )
    assert re.search(
        r'class="note failed">.*exit code 137 .*SIGKILL.* rank 5 on node02.*srunddp triage 4711',
        html,
    )
    costs = [float(each) for each in re.findall(r'class="cost">([\d.]+) %', html)]
    assert costs == sorted(costs, reverse=True)
    assert len(costs) > 1
    assert html.count("<details>") == html.count("</table>\n</details>") == 3
    assert 'class="none"' not in html
    fine = summed(SHORT, tmp_path / "fine")
    assert 'class="note failed"' not in page(fine, notes(fine), [])


def test_names_from_files_are_words_and_nothing_more(tmp_path: Path) -> None:
    """In a page and in a terminal; and charts are drawn with them."""
    made_up = replace(
        ON_GPUS,
        seconds=60,
        epoch_s=30,
        script=(HOSTILE, "x"),
        node_name=lambda n: f"_{HOSTILE}{n}",
        model=HOSTILE,
    )
    folder = made_up.write(tmp_path)
    summary = summary_of(read(folder))
    assert HOSTILE in summary.script
    html = page(summary, notes(summary), [])
    assert "\x1b" not in html + shown(summary)
    assert "<b" not in html.replace("<body", "").replace("<br", "")
    tame = summed(replace(made_up, script=("x",), node_name=str, model="x"), tmp_path / "tame")
    same = page(tame, notes(summary), [])
    assert {tag for tag, _ in Page(html).tags} == {tag for tag, _ in Page(same).tags}
    done = report(tmp_path, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("what", ["logs", "logs/4711.0", "logs/4711.0/monitor.0", "4711", "4711.0"])
def test_a_run_is_found_by_its_folder_the_parent_and_its_number(what: str, tmp_path: Path) -> None:
    """Its text alone; nothing is written."""
    SHORT.write(tmp_path / "logs")
    done = report("--text", what, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "run 4711.0: train.py --epochs=20\n2 ranks on 2 nodes (node[01-02]), Slurm, gloo, network"
        " ens1f1\n"
    )
    assert [path.name for path in (tmp_path / "logs" / "4711.0").iterdir()] == ["monitor.0"]


def test_of_several_steps_and_starts_the_newest_is_taken(tmp_path: Path) -> None:
    for step in (2, 10):
        replace(SHORT, name=f"4711.{step}").write(tmp_path / "mine")
    replace(SHORT, seconds=90).write(tmp_path / "mine")
    replace(SHORT, name="4711.10", seconds=90).write(tmp_path / "mine", restart=1)
    last = report("--text", "--monitor-dir", "mine", "4711", folder=tmp_path)
    assert "run 4711.10, restart 1: " in last.stdout
    runs, starts = last.stderr.splitlines()
    assert tells(runs, "note: ", "job 4711", "4711.0, 4711.2, 4711.10", "4711.10")
    assert tells(starts, "note: ", "mine/4711.10", "2 starts", 1, "--restart N")
    first = report("--text", "--monitor-dir", "mine", "--restart", "0", "4711.10", folder=tmp_path)
    assert first.stdout.startswith("run 4711.10: ")
    assert first.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["empty"], "no run that was monitored in empty"),
        (["logs"], "2 runs in logs; expected one -> name one, as logs/4712.0"),
        (["4711.1"], "no files of job 4711.1 in logs; expected a folder 4711.1/monitor.0"),
        (["4711;x"], "no folder 4711;x"),
        (["--restart", "3", "4711"], "--restart 3: logs/4711.0 has 0"),
        (["--restart", "3", "logs/4711.0/monitor.0"], "logs/4711.0 has 0; expected one of these"),
        (["4711"], "nothing was written to logs/4711.0/monitor.0"),
        (["--baseline", "4713", "4711"], "no files of job 4713"),
        (["--baseline", "4712", "4711"], "--baseline 4712: its throughput is not known"),
    ],
)
def test_what_leads_to_no_run_is_one_message(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    for name in ("4711.0", "4712.0"):
        (tmp_path / "logs" / name / "monitor.0").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    assert said in one_message(report("--text", *arguments, folder=tmp_path))


def test_output_is_another_folder_or_one_message(tmp_path: Path) -> None:
    """What was not sampled is a sentence there, and no empty chart."""
    SHORT.write(tmp_path)
    write(tmp_path / "file", "")
    done = report("--output", "file/there", "4711.0", folder=tmp_path)
    assert (done.returncode, done.stdout[:10]) == (78, "run 4711.0")
    assert tells(done.stderr, "error: ", "file/there", "Not a directory", "; expected ")
    assert report("--output", "new/there", "4711.0", folder=tmp_path).returncode == 0
    assert "No GPU was monitored." in (tmp_path / "new" / "there" / "report.html").read_text()
    assert [path.name for path in (tmp_path / "4711.0").iterdir()] == ["monitor.0"]


def test_without_jinja2_there_is_the_text_and_one_message(tmp_path: Path) -> None:
    SHORT.write(tmp_path / "logs")
    write(
        tmp_path / "none" / "jinja2.py", "raise ModuleNotFoundError(\"No module named 'jinja2'\")"
    )
    without = {"PYTHONPATH": str(tmp_path / "none")}
    done = report("4711", folder=tmp_path, **without)
    assert (done.returncode, done.stdout[:10]) == (78, "run 4711.0")
    (said,) = done.stderr.splitlines()
    assert tells(said, "error: ", "'jinja2'", "; expected ", " -> pip install ", "--text")
    assert not list(tmp_path.rglob("report.html"))
    for option in ("--text", "--json"):
        done = report(option, "4711", folder=tmp_path, **without)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_link_of_the_pages_name_is_replaced_and_not_followed(tmp_path: Path) -> None:
    folder = SHORT.write(tmp_path).parent
    (folder / "report.html").symlink_to(write(tmp_path / "mine", "mine"))
    report(folder, folder=tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (folder / "report.html").is_symlink()
    os.umask(mask := os.umask(0))
    assert (folder / "report.html").stat().st_mode & 0o777 == 0o666 & ~mask


def until_shown(terminal: int, words: str) -> str:
    """What a terminal gets until these words come."""
    end = time.monotonic() + LONG
    got = ""
    while words not in got:
        assert time.monotonic() < end, got
        if select.select([terminal], [], [], 0.1)[0]:
            got += os.read(terminal, 1 << 16).decode()
    return got


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    both = pty.openpty()
    yield both
    for descriptor in both:
        os.close(descriptor)


def follow(folder: Path, stdout: int, *options: str) -> Popen[bytes]:
    """Of a run that has begun a minute ago."""
    replace(SHORT, code=None, seconds=55, start=time.time() - 60, interval=5).write(folder)
    command = [*SRUNDDP, "report", "--follow", *options, "4711.0"]
    return Popen(command, cwd=folder, env=bare(), stdin=DEVNULL, stdout=stdout, stderr=PIPE)


def test_a_followed_run_is_shown_in_place_until_its_end(
    tmp_path: Path, terminal: tuple[int, int]
) -> None:
    with follow(tmp_path, terminal[1], "--text") as process:
        before = until_shown(terminal[0], "still running")
        shutil.rmtree(tmp_path / "4711.0")
        replace(SHORT, code=3).write(tmp_path)
        after = until_shown(terminal[0], "exit code 3 on all ranks")
        assert process.wait(LONG) == 0
    assert before.startswith("\x1b[H\x1b[J\r\nrun 4711.0")
    assert "\x1b[H\x1b[Jrun 4711.0" in after
    assert "\x1b[31mFAIL\x1b[0m  run failed: " in after


def test_a_narrow_terminal_has_all_words_in_its_width(
    tmp_path: Path, terminal: tuple[int, int]
) -> None:
    fcntl.ioctl(terminal[1], termios.TIOCSWINSZ, struct.pack("4H", 60, 50, 0, 0))
    with follow(tmp_path, terminal[1], "--text") as process:
        until_shown(terminal[0], "still running")
        got = until_shown(terminal[0], "interface")
        process.send_signal(signal.SIGINT)
        process.wait(LONG)
    rows = re.sub(r"\x1b\[[0-9]*[A-Zm]", "", got).splitlines()
    assert max(map(len, rows)) <= 50
    assert "of the step time" in " ".join(got.split())


def test_without_a_terminal_summaries_follow_each_other(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with follow(tmp_path, writing, "--text") as process:
        os.close(writing)
        before = until_shown(reading, "still running")
        shutil.rmtree(tmp_path / "4711.0")
        replace(SHORT, code=0).write(tmp_path)
        after = until_shown(reading, "ended with exit code 0 on all ranks")
        assert process.wait(LONG) == 0
    os.close(reading)
    assert before.startswith("run 4711.0")
    assert (before + after).count("run 4711.0") == 2
    assert "\x1b" not in before + after


def test_ctrl_c_ends_following_and_leaves_the_summary(
    tmp_path: Path, terminal: tuple[int, int]
) -> None:
    with follow(tmp_path, terminal[1]) as process:
        until_shown(terminal[0], "still running")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert (process.wait(LONG), process.stderr.read()) == (0, b"")
    assert not (tmp_path / "4711.0" / "report.html").exists()


def test_a_command_of_an_advice_is_safe_to_paste() -> None:
    """Names come from a run's files, and a run may be somebody else's."""
    assert format.exclude(["node01", "node02"]) == "--exclude=node[01-02]"
    words = shlex.split(format.exclude(["$(touch x)", "a; b"]))
    assert words == ["--exclude=$(touch x),a; b"]
