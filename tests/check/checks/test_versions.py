"""Versions before a job: who has another Python, another torch or none is named, without this
process importing any.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from srunddp.check.checks.versions import CHECK, VersionFacts, find, import_torch
from srunddp.check.finding import Finding, Severity
from tests.support.facts import tells
from tests.support.made_up_site import LOCAL_RANK_1, changed, reported, subject, travelled
from tests.support.many_nodes import quick
from tests.support.starting import write

pytestmark = pytest.mark.slow

FAIL = Severity.FAIL
WARN = Severity.WARN
SITE = "sys.prefix/lib/python3.11/site-packages"


def imported(seconds: float = 2.0, **changes: Any) -> dict[str, Any]:
    return dict(torch="2.13.0+cu130", cuda="13.0", nccl="2.29.3", seconds=seconds) | changes


WELL = VersionFacts(
    python="3.11.2",
    executable="/shared/env/bin/python",
    prefix="/shared/env",
    versions={"torch": "2.13.0+cu130", "numpy": "1.0"},
    places={"torch": SITE, "numpy": SITE},
)
HEALTHY: dict[int, dict[str, Any]] = {rank: imported() for rank in range(0, 12, 2)}


def package(name: str, version: str, place: str = SITE) -> dict[str, Any]:
    return {"versions": WELL.versions | {name: version}, "places": WELL.places | {name: place}}


NO_TORCH = package("torch", "", "")
FOUND: dict[str, tuple[dict[int, dict[str, Any]], list[tuple[Severity, str, tuple[int, ...]]]]] = {
    "nothing": ({}, []),
    "another Python": ({5: {"python": "3.12.1"}}, [(FAIL, "Python 3.12", (5,))]),
    "another patch level": ({5: {"python": "3.11.9"}}, [(WARN, "Python 3.11.9", (5,))]),
    "another environment": (
        {5: {"executable": "/usr/bin/python3", "prefix": "/usr"}},
        [(WARN, "Python is /usr/bin/python3 of /usr", (5,))],
    ),
    "no torch": ({5: NO_TORCH}, [(FAIL, "no package torch", (5,))]),
    "no numpy": ({5: package("numpy", "", "")}, [(FAIL, "no package numpy", (5,))]),
    "another torch": ({5: package("torch", "9.9", "/x")}, [(FAIL, "torch 9.9", (5,))]),
    "another numpy": ({5: package("numpy", "2.0")}, [(WARN, "numpy 2.0", (5,))]),
    "another CUDA": ({4: imported(cuda="12.8")}, [(FAIL, "torch for CUDA 12.8", ())]),
    "no CUDA": ({4: imported(cuda="")}, [(FAIL, "torch for CUDA unknown", ())]),
    "a copy": (
        {5: package("torch", "2.13.0+cu130", "/home/me")},
        [(WARN, "torch of /home/me", (5,))],
    ),
    "another NCCL": ({4: imported(nccl="2.27.1")}, [(FAIL, "NCCL 2.27.1", ())]),
    "another torch brings another NCCL": (
        {4: package("torch", "9.9") | imported(torch="9.9", nccl="2.27.1")},
        [(FAIL, "torch 9.9", (4,))],
    ),
    "no import": (
        {4: imported(torch="", error="ImportError: libcudart.so.13")},
        [(FAIL, "import torch: ImportError: libcudart.so.13", ())],
    ),
    "no end of it": (
        {4: imported(torch="", error="it took more than 120 s")},
        [(WARN, "import torch: it took more than 120 s", ())],
    ),
    "slow": ({4: imported(10.5)}, [(WARN, "import torch took 10 s", ())]),
    "not that slow": ({4: imported(9.5)}, []),
    "slow on all": ({rank: imported(15.0 + rank) for rank in range(0, 12, 2)}, []),
}


@pytest.mark.parametrize("name", FOUND)
def test_who_has_another_version_is_named(name: str) -> None:
    changes, expected = FOUND[name]
    ranks = changed(
        WELL, {rank: HEALTHY.get(rank, {}) | changes.get(rank, {}) for rank in range(12)}
    )
    assert reported(CHECK.evaluate(ranks)) == [
        (level, found, ("node03",), who) for level, found, who in expected
    ]


def test_of_two_ranks_the_one_that_differs_from_rank_0_is_named() -> None:
    (finding,) = CHECK.evaluate(changed(WELL, {1: package("torch", "9.9")}, 2))
    assert finding.ranks == (1,)
    assert tells(finding.expected, "2.13.0+cu130")
    (finding,) = CHECK.evaluate(changed(WELL, {0: package("torch", "9.9")}, 3))
    assert finding.ranks == (0,)
    without = {rank: package("nope", "", "") for rank in range(4)}
    (finding,) = CHECK.evaluate(changed(WELL, without, 4))
    assert (finding.found, finding.ranks) == ("no package nope", (0, 1, 2, 3))


def test_thousands_of_ranks_are_judged_in_seconds() -> None:
    without = {rank: NO_TORCH for rank in range(1, 8000, 2)}
    with quick():
        (finding,) = CHECK.evaluate(changed(WELL, without, 8000))
    assert (finding.found, len(finding.nodes)) == ("no package torch", 4000)


def test_torch_is_imported_in_a_process_of_its_own(tmp_path: Path) -> None:
    before = "torch" in sys.modules  # by another test
    facts = travelled(
        CHECK, subject(script=tmp_path / "train.py", packages=["pytest", "PyYAML", "no.such"])
    )
    assert (facts.error, facts.torch) == ("", facts.versions["torch"])
    assert 0 < facts.seconds < 60
    assert facts.versions["pytest"] == pytest.__version__
    assert (facts.versions["PyYAML"] != "", facts.places["no.such"]) == (True, "")
    assert ("torch" in sys.modules) == before
    assert "no.such missing" in CHECK.summary(changed(facts, {}, 1))
    assert CHECK.summary(changed(facts, {}, 1)).startswith(
        f"Python {facts.python}, torch {facts.torch}, "
    )


def shadow(folder: Path, text: str) -> Path:
    return write(folder / "torch" / "__init__.py", text).parents[1]


def test_a_folder_that_hides_torch_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PYTHONPATH or beside the script, and both by its text and by the import."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # another test's
    shadow(tmp_path, "__version__ = '9.9'\n")
    assert find("torch", str(tmp_path)) == ("9.9", str(tmp_path))
    assert import_torch(str(tmp_path))["torch"] == "9.9"
    assert find("torch")[0] != "9.9"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_torch("")["torch"] == "9.9"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find("torch")[0] == "9.9"
    monkeypatch.chdir(shadow(tmp_path / "here", "__version__ = '8.8'\n"))  # which hides none
    assert import_torch("")["torch"] == "9.9"


def test_a_copy_of_a_package_has_not_the_version_installed(tmp_path: Path) -> None:
    write(tmp_path / "yaml" / "__init__.py", "")
    assert find("yaml", str(tmp_path)) == ("", str(tmp_path))
    write(
        tmp_path / "yaml-7.0.dist-info" / "METADATA",
        "Metadata-Version: 2.1\nName: yaml\nVersion: 7.0\n",
    )
    assert find("yaml", str(tmp_path))[0] == "7.0"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("import os; os.abort()", "exit code -6"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import time; time.sleep(60)", "it took more than 0.5 s"),
    ],
)
def test_an_import_that_fails_says_why(tmp_path: Path, text: str, error: str) -> None:
    patience = 0.5 if "sleep" in text else 60.0
    assert import_torch(str(shadow(tmp_path, text)), patience)["error"] == error


# torchvision.

MIXED = "raise RuntimeError('operator torchvision::nms does not exist')"


def of_vision(folder: Path, script: str, vision: str = MIXED, **named: Any) -> list[Finding]:
    """What is found where this torchvision lies beside a script, as does a torch."""
    for name, text in {"torch": "__version__ = '2.13.0+cpu'\n", "torchvision": vision}.items():
        write(folder / name / "__init__.py", text)
    write(folder / "torch" / "version.py", "__version__ = '2.13.0+cpu'\n")
    facts = travelled(CHECK, subject(script=write(folder / "train.py", script), **named))
    return list(CHECK.evaluate(changed(facts, {}, 1)))


@pytest.mark.parametrize(
    ("script", "level"),
    [
        ("def late():\n    from torchvision.transforms import v2\n", FAIL),
        ("if __name__ == '__main__':\n    import torchvision\n", FAIL),
        ("import torch\n", None),
        ("try:\n    import torchvision\nexcept Exception:\n    pass\n", None),
        ("import typing\nif typing.TYPE_CHECKING:\n    import torchvision\n", None),
        (
            (
                "import torch\ntorch.library.define('torchvision::nms', '() -> ()')\nimport"
                " torchvision\n"
            ),
            None,
        ),
        ("import srunddp.train as t\nt.import_torchvision()\nimport torchvision\n", None),
    ],
)
def test_a_mixed_build_stops_a_script_that_imports_it(
    tmp_path: Path, script: str, level: Severity | None
) -> None:
    found = of_vision(tmp_path, script)
    assert [one.level for one in found] == ([level] if level is not None else [])
    for one in found:
        assert (
            one.found
            == "import torchvision: RuntimeError: operator torchvision::nms does not exist"
        )
        assert tells(one.expected, "torchvision", "2.13.0+cpu")
        assert tells(one.hint, "torchvision", "index", "srunddp.train.import_torchvision()")


@pytest.mark.parametrize(
    ("vision", "expected"),
    [
        ("class version: cuda = 13000", []),
        ("raise RuntimeError('other CUDA major versions')", ["RuntimeError: other CUDA major"]),
        ("import os; os.abort()", ["exit code -6"]),
    ],
)
def test_torchvision_is_judged_by_import(tmp_path: Path, vision: str, expected: list[str]) -> None:
    found = of_vision(tmp_path, "import torchvision\n", vision)
    assert len(found) == len(expected)
    for one, words in zip(found, expected, strict=True):
        assert one.found.startswith(f"import torchvision: {words}")
        assert "import_torchvision" not in one.hint


def test_a_named_torchvision_is_imported_by_local_rank_0(tmp_path: Path) -> None:
    assert [
        one.level for one in of_vision(tmp_path, "import torch\n", packages=["torchvision"])
    ] == [FAIL]
    script = write(tmp_path / "train.py", "import torchvision\n")
    assert CHECK.collect(subject(LOCAL_RANK_1, script=script)).torch == ""  # nor torch


def test_a_missing_torchvision_is_missed_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "path", [folder for folder in sys.path if not (Path(folder) / "torchvision").is_dir()]
    )
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)  # of a test before
    write(tmp_path / "torch" / "__init__.py", "__version__ = '2.13.0'\n")
    script = write(tmp_path / "train.py", "import torchvision\n")
    for packages, expected in (((), []), (("torchvision",), ["no package torchvision"])):
        facts = travelled(CHECK, subject(script=script, packages=packages))
        assert [one.found for one in CHECK.evaluate(changed(facts, {}, 1))] == expected
