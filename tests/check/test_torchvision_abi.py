"""A torchvision that does not belong to its torch is named before the job, without an import of either."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from srunddp.check.checks.versions import CHECK, NOT_ASKED
from srunddp.check.finding import Finding, Severity
from tests.support.made_up_site import LOCAL_RANK_1, changed, subject, told, travelled

FAIL, WARN = Severity.FAIL, Severity.WARN
CPU = ["libc10.so", "libtorch.so", "libtorch_cpu.so"]
CUDA = [*CPU, "libc10_cuda.so", "libtorch_cuda.so"]


@pytest.fixture(autouse=True)
def without_torchs_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srunddp.check.checks.versions.import_torch", lambda _: NOT_ASKED)


def found(folder: Path, text: str, **named: Any) -> list[Finding]:
    script = folder / "train.py"
    script.write_text(text)
    return list(CHECK.judge(changed(travelled(CHECK, subject(script=script, **named)), {}, 1)))


def made(folder: Path, torch: str, cuda: str, libraries: list[str], vision: str, needed: list[str], pin: str) -> Path:
    """A torch and a torchvision beside the script, which come before the installed ones."""
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(f"__version__ = '{torch}'\ncuda = '{cuda}'\n")
    for name in libraries:
        (folder / "torch" / "lib" / name).touch()
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").touch()
    (folder / "torchvision" / "version.py").write_text(f"__version__ = '{vision}'\n")
    if needed:
        (folder / "torchvision" / "_C.so").write_bytes(b"\x7fELF\0" + "\0".join(needed).encode() + b"\0_init\0")
    metadata = folder / f"torchvision-{vision.partition('+')[0]}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    requires = f"Requires-Dist: numpy\nRequires-Dist: torch{pin}\n"
    metadata.write_text(f"Metadata-Version: 2.1\nName: torchvision\nVersion: {vision}\n{requires}")
    return folder


BUILDS: dict[str, tuple[tuple[str, str, list[str], str, list[str], str], list[tuple[Severity, str]]]] = {
    "both for the CPU": (("2.13.0+cpu", "", CPU, "0.28.0+cpu", CPU, " (==2.13.0)"), []),
    "both for one CUDA": (("2.13.0+cu130", "13.0", CUDA, "0.28.0", [*CUDA, "libcudart.so.13"], "==2.13.0"), []),
    "CUDA beside CPU": (
        ("2.13.0+cpu", "", CPU, "0.28.0+cu130", [*CUDA, "libcudart.so.13"], "==2.13.0"),
        [(FAIL, "torchvision 0.28.0+cu130 needs libc10_cuda.so, libtorch_cuda.so, which torch 2.13.0+cpu is without")],
    ),
    "ROCm beside CPU": (
        ("2.13.0+cpu", "", CPU, "0.28.0+rocm7", [*CPU, "libtorch_hip.so"], "==2.13.0"),
        [(FAIL, "torchvision 0.28.0+rocm7 needs libtorch_hip.so, which torch 2.13.0+cpu is without")],
    ),
    "CPU beside CUDA": (
        ("2.13.0+cu130", "13.0", CUDA, "0.28.0+cpu", CPU, "==2.13.0"),
        [(WARN, "torchvision 0.28.0+cpu is without CUDA")],
    ),
    "another CUDA": (
        ("2.13.0+cu130", "13.0", CUDA, "0.28.0+cu126", [*CUDA, "libcudart.so.12"], "==2.13.0"),
        [(FAIL, "torchvision 0.28.0+cu126 is for CUDA 12, torch 2.13.0+cu130 for 13.0")],
    ),
    "another version": (
        ("2.12.1+cpu", "", CPU, "0.28.0+cpu", CPU, "==2.13.0"),
        [(WARN, "torchvision 0.28.0+cpu is for torch 2.13.0")],
    ),
    "no version is asked for": (("2.14.0a0+git1", "", CPU, "0.29.0a0", CPU, ""), []),
    "any newer version": (("2.14.0", "", CPU, "0.29.0", CPU, ">=2.13"), []),
    "torch's libraries are elsewhere": (("2.13.0", "", [], "0.28.0", [*CUDA, "libcudart.so.13"], "==2.13.0"), []),
    "a library with a hash in its name": (
        ("2.13.0+cu130", "13.0", CUDA, "0.28.0", [*CUDA, "libcudart-e8e8b82a.so.13.0.96"], "==2.13.0"),
        [],
    ),
    "CUDA's runtime is linked in": (("2.13.0+cu130", "13.0", CUDA, "0.28.0", CUDA, "==2.13.0"), []),
    "any patch release": (("2.13.1", "", CPU, "0.28.0", CPU, "==2.13.*"), []),
    "the same day": (("2.14.0.dev20261101+cpu", "", CPU, "0.29.0.dev20261101", CPU, "==2.14.0.dev20261101"), []),
    "nothing is compiled": (("2.13.0+cu130", "13.0", CUDA, "0.28.0", [], "==2.13.0"), []),
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_torchvision_of_another_build_is_named_and_one_that_fits_is_not(name: str, tmp_path: Path) -> None:
    build, expected = BUILDS[name]
    rows = told(found(made(tmp_path, *build), "import torchvision\n"))
    assert [level for level, *_ in rows] == [level for level, _ in expected]
    assert all(row[1].startswith(text) and row[3] == () for row, (_, text) in zip(rows, expected, strict=True))


MIXED = BUILDS["CUDA beside CPU"][0]


def test_it_stops_the_job_only_where_the_script_imports_it(tmp_path: Path) -> None:
    made(tmp_path, *MIXED)

    def levels(text: str, **named: Any) -> list[Severity]:
        return [one.level for one in found(tmp_path, text, **named)]

    assert levels("def late():\n    from torchvision.transforms import v2\n") == [FAIL]
    assert levels("import torch\n", packages=["torchvision"]) == [WARN]
    assert levels("import torch\nimport torchmetrics\n") == [WARN]
    assert levels("import torch\n") == []
    assert levels("try:\n    import torchvision\nexcept ImportError:\n    pass\n") == [FAIL]
    for guard in ("except:", "except Exception:", "except (ImportError, RuntimeError) as error:"):
        assert levels(f"try:\n    import torchvision\n{guard}\n    torchvision = None\n") == [WARN]
    assert levels("import typing\nif typing.TYPE_CHECKING:\n    import torchvision\n") == [WARN]
    declares = 'import torch\ntorch.library.define("torchvision::nms", "() -> ()")\nimport torchvision\n'
    assert levels(declares) == [WARN]
    provided = "from srunddp.train import import_torchvision\nimport_torchvision()\nfrom torchvision import models\n"
    assert levels(provided) == []
    assert levels("import srunddp.train as t\nt.import_torchvision()\nimport torchvision\n") == []


def test_the_hint_is_one_line_and_names_the_function_that_does_without_the_operators(tmp_path: Path) -> None:
    (mixed,) = found(made(tmp_path / "mixed", *MIXED), "import torchvision\n")
    assert mixed.expected == "the torchvision of torch 2.13.0+cpu"
    assert mixed.hint.startswith("install torchvision from the same index as torch")
    assert mixed.hint.endswith("or import it by srunddp.train.import_torchvision()")
    (other,) = found(made(tmp_path / "other", *BUILDS["another CUDA"][0]), "import torchvision\n")
    assert "import_torchvision" not in other.hint
    assert "\n" not in mixed.found + mixed.hint + other.hint


def test_without_torchvision_only_the_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [folder for folder in sys.path if (Path(folder) / "torchvision").is_dir()]
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in installed])
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)  # of a test before
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    assert found(tmp_path, "import torchvision\n") == []
    assert [one.found for one in found(tmp_path, "", packages=["torchvision"])] == ["no package torchvision"]


def test_one_rank_of_a_node_looks_and_it_does_in_the_nodes_copy(tmp_path: Path) -> None:
    script = made(tmp_path, *MIXED) / "train.py"
    script.write_text("import torchvision\n")
    assert CHECK.collect(subject(LOCAL_RANK_1, script=script)).vision is None
    staged: Any = SimpleNamespace(shared=lambda path: path.replace(str(tmp_path), "/shared"))
    facts = CHECK.collect(replace(subject(script=script), staged=staged))
    assert (facts.packages["torch"]["place"], facts.vision and facts.vision["lacks"]) == ("/shared", CUDA[3:])


def test_the_torchvision_that_is_installed_is_judged_as_its_import_ends(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 or "operator torchvision::nms does not exist" in done.stderr, done.stderr
    levels = [one.level for one in found(tmp_path, "import torchvision\n")]
    assert (FAIL in levels) == (done.returncode != 0)
