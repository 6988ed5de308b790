"""The pages keep what they promise: every link leads somewhere."""

from __future__ import annotations

import inspect
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


def test_every_test_and_benchmark_that_a_page_names_is_there() -> None:
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    known = "".join(f"{path}\n" + "\n".join(re.findall(r"def (test_\w+)", text)) for path, text in tests.items())
    for page in PAGES:
        text = page.read_text()
        chosen = re.findall(r'bin/test[^`\n]*? -k (?:"([^"]+)"|([\w.-]+))', text)
        words = {word for found in chosen for word in re.findall(r"\w+", "".join(found))} - {"and", "or", "not"}
        assert {word for word in words if word not in known} == set(), page
        modules = {ROOT / f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m (tests\.[\w.]+)", text)}
        assert modules <= tests.keys(), page


def cells(title: str, first: str) -> dict[str, list[str]]:
    """The rows of the tables in a section of the reference whose first column is called so, by that."""
    section = re.split(rf"\n#+ {re.escape(title)}\n", (ROOT / "docs" / "reference.md").read_text())[1].split("\n### ")[
        0
    ]
    tables = [text.split("\n\n")[0].splitlines()[2:] for text in section.split(f"\n| {first} |")[1:]]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for table in tables for line in table]
    return {name: row[1:] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_setting_and_job_key_is_in_the_reference() -> None:
    from srunddp.train.config import Config

    for kind, title in ((Config, "Settings"), (SlurmJob, "srunddp sbatch")):
        defaults = {name: text_of(key.default) or "''" for name, key in fields_of(kind).items()}
        assert {name: row[0].strip("`") for name, row in cells(title, "key").items()} == defaults


def test_every_public_name_and_argument_is_in_the_reference() -> None:
    import srunddp
    from srunddp import train

    text = (ROOT / "docs" / "reference.md").read_text()
    assert [name for name in srunddp.__all__ if f"srunddp.{name}" not in text] == ["__version__"]
    assert {re.findall(r"\w+", name)[0] for name in cells("`srunddp.train`", "name")} == set(train.__all__)
    for called in (train.Trainer, train.Trainer.fit, train.DistributedDataLoader):
        (title,) = re.findall(rf"^#+ (`(?:srunddp\.(?:train\.)?)?{called.__qualname__}\(.*)$", text, re.MULTILINE)
        assert set(cells(title, "argument")) == set(inspect.signature(called).parameters) - {"self"}, title
    for kind in (train.CheckpointManager, train.Preemption):
        section = re.split(rf"^#+ `srunddp.train.{kind.__name__}\(", text, flags=re.MULTILINE)[1].split("\n#")[0]
        assert [name for name in vars(kind) if name[0] != "_" and f"`{name}" not in section] == [], kind


def test_every_column_of_the_monitors_files_is_in_the_reference() -> None:
    from srunddp.monitor import monitor
    from srunddp.monitor.sampler import gpu, node, process_tree

    files = {"node": node.COLUMNS, "tasks": process_tree.COLUMNS, "links": node.LINK_COLUMNS, "gpus": gpu.COLUMNS}
    for name, expected in files.items():
        assert list(cells(f"NODE.{name}.csv", "column")) == list(expected)
    for name, expected in (("steps", monitor.STEPS), ("marks", monitor.MARKS)):
        assert list(cells(f"NODE.rankR.{name}.csv", "column")) == expected.strip().split(",")


def test_every_module_of_gpu_checks_is_in_the_measurements() -> None:
    section = (ROOT / "docs" / "measurements.md").read_text().split("\n## On GPUs\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(test_\w+)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


def test_every_mark_is_in_the_reference() -> None:
    from srunddp.telemetry import EVENTS

    assert set(cells("NODE.rankR.marks.csv", "mark")) == {"process", "meeting", "met", "end", *EVENTS}


def test_every_note_is_in_the_reference_with_its_threshold(tmp_path: Path) -> None:
    from srunddp.report import advice
    from tests.report.test_planted import PLANTED, noted

    table = cells("Notes", "note")
    planted = {rule: made_up for rule, made_up, *_ in PLANTED}
    made = [note for rule in planted for note in noted(planted[rule], tmp_path / rule)]
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
    from srunddp.check.cli import check
    from srunddp.explain.cli import explain
    from srunddp.report.cli import report
    from srunddp.run.cli import run
    from srunddp.triage.cli import triage

    named = {f"srunddp {each.name}": each for each in (check, explain, report, triage)}
    for title, command in {"Command line": run, **named}.items():
        wanted = {name for option in command.params for name in option.opts if name.startswith("-")}
        listed = {re.split(r"[ \[]", name)[0] for name in cells(title, "option")}
        assert wanted - listed == set()
        assert listed - wanted <= {"-h", "--help", "--version"}


def names(found: object) -> set[str]:
    """All keys of a JSON document, but for numbers."""
    inner = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list | tuple) else []
    own = {name for name in found if isinstance(name, str)} if isinstance(found, dict) else set()
    return own.union(*map(names, inner))


def test_every_key_of_json_is_in_the_reference(tmp_path: Path) -> None:
    from srunddp.explain.explain import ExplainOptions, explain
    from srunddp.report.cli import record
    from srunddp.report.run import read
    from srunddp.report.summarize import summary_of
    from tests.support.made_up_run import MadeUp

    summary = summary_of(read(MadeUp(nodes=1, ranks_per_node=2, gpus_per_node=2, slow={1: 0.05}).write(tmp_path)))
    explained = explain({}, ExplainOptions(channel="pmi"), None)
    for title, found in (("srunddp report", record(summary)), ("srunddp explain", explained.record)):
        tables = re.split(rf"\n### {title}\n", (ROOT / "docs" / "reference.md").read_text())[1].split("\n### ")[0]
        assert names(found) - set(re.findall(r"`(\w+)`", tables)) == set(), title
