"""The pages keep what they promise: every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from srunddp.config.schema import fields_of, text_of
from srunddp.sbatch.spec import SlurmJob
from tests.conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text()), target


def named(title: str) -> dict[str, str]:
    """The keys of a section's tables in the reference, with their defaults."""
    section = (ROOT / "docs" / "reference.md").read_text().split(f"\n### {title}\n")[1].split("\n### ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", section, re.MULTILINE))


def keys(kind: type) -> dict[str, str]:
    return {name: text_of(key.default) or "''" for name, key in fields_of(kind).items()}


def test_every_setting_of_the_loop_is_in_the_reference() -> None:
    from srunddp.train.config import Config

    assert named("Settings") == keys(Config)


def test_every_key_of_a_job_script_is_in_the_reference() -> None:
    assert named("srunddp sbatch") == keys(SlurmJob)


def columns(file: str) -> list[str]:
    """The columns of a file of ``--monitor``, as the reference lists them."""
    section = (ROOT / "docs" / "reference.md").read_text().split(f"\n### {file}\n")[1].split("\n### ")[0]
    table = section.split("\n| column |")[1].split("\n\n")[0]
    return [
        name for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]


def test_every_column_of_the_monitors_files_is_in_the_reference() -> None:
    from srunddp.monitor import monitor
    from srunddp.monitor.sampler import gpu, node, tasks

    files = {"node": node.COLUMNS, "tasks": tasks.COLUMNS, "links": node.LINK_COLUMNS, "gpus": gpu.COLUMNS}
    for name, expected in files.items():
        assert columns(f"NODE.{name}.csv") == list(expected)
    assert columns("NODE.rankR.steps.csv") == monitor.STEPS.strip().split(",")
    assert columns("NODE.rankR.marks.csv") == monitor.MARKS.strip().split(",")


def test_every_module_of_gpu_checks_is_in_the_measurements() -> None:
    section = (ROOT / "docs" / "measurements.md").read_text().split("\n## On GPUs\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(test_\w+)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


def cells(title: str, first: str) -> dict[str, list[str]]:
    """The rows of a section's table whose first column is called so, by that."""
    section = re.split(rf"\n#+ {title}\n", (ROOT / "docs" / "reference.md").read_text())[1]
    table = section.split(f"\n| {first} |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    return {name: row[1:] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_mark_is_in_the_reference() -> None:
    from srunddp.telemetry import EVENTS

    assert set(cells("NODE.rankR.marks.csv", "mark")) == {"process", "meeting", "met", "end", *EVENTS}


def test_every_note_is_in_the_reference_with_its_threshold(tmp_path: Path) -> None:
    from srunddp.report import advice
    from tests.report.test_advice import PLANTED, noted

    table = cells("Notes", "note")
    made = [note for name in PLANTED for note in noted(PLANTED[name][0], tmp_path / name)]
    assert {name: row[0] for name, row in table.items()} == {note.rule: note.threshold for note in made}
    assert f"below {advice.OTHER_LINK_RATE / 2**20:.0f} MiB/s" in table["wrong interface"][2]
    assert f"less than {advice.TIME_SAVED / 60:.0f} min to be saved" in table["time limit"][2]
    assert f"less than {advice.MEMORY_UNUSED / 2**30:.0f} GiB unused" in table["memory unused"][2]
    assert all(
        f"fewer than {advice.FEWEST_SAMPLES} samples" in table[name][2] for name in ("gpu idle", "gpu throttled")
    )
    few = f"Below {advice.FEWEST_STEPS} steps, where steps are counted, or {advice.FEWEST_SAMPLES} samples"
    assert few in (ROOT / "docs" / "reference.md").read_text()


def test_every_option_is_in_the_reference() -> None:
    from srunddp.report.cli import report
    from srunddp.run.cli import run
    from srunddp.triage.cli import triage

    for command, title in ((run, "Command line"), (report, "srunddp report"), (triage, "srunddp triage")):
        wanted = {name for option in command.params for name in option.opts if name.startswith("-")}
        listed = {re.split(r"[ \[]", name)[0] for name in cells(title, "option")}
        assert wanted - listed == set()
        assert listed - wanted <= {"-h", "--help", "--version"}
