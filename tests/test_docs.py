"""The pages keep what they promise: every link leads somewhere."""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest

from srunddp.config.schema import fields_of
from srunddp.sbatch.spec import SlurmJob
from tests.conftest import ROOT
from tests.support.site import PAGES

REFERENCE = ROOT / "docs" / "reference"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)  # their headings are on the site alone
    titles = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return titles | set(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text()), target


def test_every_test_and_benchmark_that_a_page_names_is_there() -> None:
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    known = "".join(
        f"{path}\n" + "\n".join(re.findall(r"def (test_\w+)", text)) for path, text in tests.items()
    )
    for page in PAGES:
        text = page.read_text()
        chosen = re.findall(r'bin/test[^`\n]*? -k (?:"([^"]+)"|([\w.-]+))', text)
        words = {word for found in chosen for word in re.findall(r"\w+", "".join(found))} - {
            "and",
            "or",
            "not",
        }
        assert {word for word in words if word not in known} == set(), page
        modules = set(re.findall(r"python -m (tests\.[\w.]+)", text))
        assert {name for name in modules if what_python_runs(name) not in tests} == set(), page


def what_python_runs(module: str) -> Path:
    """The file that ``python -m`` runs, which of a package is one within it."""
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def cells(page: str, first: str, title: str = "") -> dict[str, list[str]]:
    """The rows of the tables of a page, or of a section of it, whose first column is called so; by
    that column.
    """
    text = (REFERENCE / page).read_text()
    section = re.split(rf"\n#+ {re.escape(title)}\n", text)[1].split("\n#")[0] if title else text
    tables = [
        text.split("\n\n")[0].splitlines()[2:] for text in section.split(f"\n| {first} |")[1:]
    ]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for table in tables
        for line in table
    ]
    return {name: row[1:] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_job_key_is_an_option_in_the_reference() -> None:
    text = (REFERENCE / "sbatch.md").read_text()
    options = {name: f"--{name.replace('_', '-')}" for name in fields_of(SlurmJob)}
    assert {name for name in options if options[name] not in text} == {"script", "arguments"}


@pytest.mark.slow
def test_the_page_of_settings_is_that_of_the_code() -> None:
    # Not at the top: each process that collects tests would import torch.
    from tests.support.reference_pages import settings_page

    assert (REFERENCE / "settings.md").read_text() == settings_page()


def public_objects() -> dict[str, object]:
    """All public names of Python, those of srunddp and of srunddp.train, with what they stand
    for.
    """
    import srunddp
    from srunddp import train

    names = [
        f"{module.__name__}.{name}"
        for module in (srunddp, train)
        for name in module.__all__
        if name[0] != "_"
    ]
    return {
        name: getattr(train if ".train." in name else srunddp, name.rpartition(".")[2])
        for name in names
    }


@pytest.mark.slow
def test_every_public_name_is_on_a_page_of_python() -> None:
    """Where both modules have it, once."""
    pages = "".join((REFERENCE / name).read_text() for name in ("python.md", "python-train.md"))
    found = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    known = public_objects()
    assert len(found) == len(set(found))
    assert set(found) - known.keys() == {"srunddp.errors"}
    twice = {
        name
        for name in known
        if known[name] is known.get(name.replace(".train.", ".")) and ".train." in name
    }
    assert known.keys() - set(found) == twice


def undocumented(called: Any, own: str, around: str = "") -> list[str]:
    """The arguments that a docstring does not explain; one without a list of them has to name them,
    or its class.
    """
    if re.search(r"^ *(Args|Attributes):$", own, re.MULTILINE):
        pattern = r"^ *{0}: \S|``{0}``"
    else:
        pattern = r"\b{0}\b"
    names = [
        name for name in inspect.signature(called).parameters if name != "self" and name[0] != "_"
    ]
    return [
        name for name in names if not re.search(pattern.format(name), own + around, re.MULTILINE)
    ]


@pytest.mark.slow
def test_every_public_argument_is_in_a_docstring() -> None:
    missing: dict[str, list[str]] = {}
    for name, kind in public_objects().items():
        text = inspect.getdoc(kind) or ""
        if inspect.isfunction(kind) or is_dataclass(kind) or hasattr(kind, "_fields"):
            missing[name] = undocumented(kind, text)
        if inspect.isclass(kind):
            for method in vars(kind):
                called = getattr(kind, method)
                if (
                    inspect.isroutine(called)
                    and called.__doc__
                    and (method == "__init__" or method[0] != "_")
                ):
                    missing[f"{name}.{method}"] = undocumented(
                        called, cleandoc(called.__doc__), text
                    )
    assert {name: each for name, each in missing.items() if each} == {}
    assert {
        "srunddp.init",
        "srunddp.Config",
        "srunddp.Trainer.fit",
        "srunddp.train.Batch",
    } <= missing.keys()


def test_every_column_of_the_monitors_files_is_in_the_reference() -> None:
    from srunddp.util.sample_files import GPU_FAULTS, MARKS, OF_A_NODE, STEPS

    files = {f"NODE.{name}.csv": kind for name, kind in OF_A_NODE.items()}
    files |= {"NODE.rankR.steps.csv": STEPS, "NODE.rankR.marks.csv": MARKS}
    files["NODE.gpu_faults.csv"] = GPU_FAULTS
    for name, kind in files.items():
        assert list(cells("files.md", "column", name)) == list(kind.names)


def test_every_module_of_gpu_checks_is_in_the_measurements() -> None:
    section = (
        (ROOT / "docs" / "measurements.md").read_text().split("\n## On GPUs\n")[1].split("\n## ")[0]
    )
    listed = re.findall(r"^\| `(test_\w+)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(
        path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    )


def test_every_mark_is_in_the_reference() -> None:
    from srunddp.telemetry import EVENTS

    assert set(cells("files.md", "mark", "NODE.rankR.marks.csv")) == {
        "process",
        "meeting",
        "met",
        "end",
        *EVENTS,
    }


def test_every_note_is_in_the_reference_with_its_threshold(tmp_path: Path) -> None:
    from srunddp.report import advice
    from tests.report.test_planted import PLANTED, noted

    table = cells("report.md", "note")
    planted = {rule: made_up for rule, made_up, *_ in PLANTED}
    made = [note for rule in planted for note in noted(planted[rule], tmp_path / rule)]
    assert {name: row[0] for name, row in table.items()} == {
        note.rule: note.threshold for note in made
    }
    assert f"below {advice.OTHER_LINK_RATE / 2**20:.0f} MiB/s" in table["wrong interface"][2]
    assert f"less than {advice.TIME_SAVED / 60:.0f} min to be saved" in table["time limit"][2]
    assert f"less than {advice.MEMORY_UNUSED / 2**30:.0f} GiB unused" in table["memory unused"][2]
    assert all(
        f"fewer than {advice.FEWEST_READINGS} readings" in table[name][2]
        for name in ("gpu idle", "gpu throttled")
    )
    few = (
        f"With fewer than {advice.FEWEST_STEPS} steps (if steps are counted), or fewer than"
        f" {advice.FEWEST_READINGS} readings"
    )
    assert few in (REFERENCE / "report.md").read_text()


def names(found: object) -> set[str]:
    """All keys of a JSON document, but for numbers."""
    if isinstance(found, dict):
        inner = list(found.values())
    elif isinstance(found, list | tuple):
        inner = list(found)
    else:
        inner = []
    if isinstance(found, dict):
        own = {name for name in found if isinstance(name, str)}
    else:
        own = set()
    return own.union(*map(names, inner))


def test_every_key_of_json_is_in_the_reference(tmp_path: Path) -> None:
    from srunddp.explain.explain import ExplainOptions, explain
    from srunddp.report.cli import record
    from srunddp.report.run import read
    from srunddp.report.summarize import summary_of
    from tests.support.made_up_run import MadeUp

    summary = summary_of(
        read(MadeUp(nodes=1, ranks_per_node=2, gpus_per_node=2, slow={1: 0.05}).write(tmp_path))
    )
    explained = explain({}, ExplainOptions(channel="pmi"), None)
    for page, found in (("report.md", record(summary)), ("explain.md", explained.record)):
        tables = (REFERENCE / page).read_text()
        assert names(found) - set(re.findall(r"`(\w+)`", tables)) == set(), page
