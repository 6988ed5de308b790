"""The gate runs a test that failed once more, and says what came of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers
from tests.conftest import ROOT
from tests.support.starting import LONG
from tests.tiers import PYTEST, Step, Tier, pytest_step, run

pytestmark = pytest.mark.slow  # each test starts pytest a few times

PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    print('found', 40 + 2)\n    assert False\n"
# It fails in its first run, and passes in each one after that.
FLAKY = """
from pathlib import Path
ran = Path(__file__).with_suffix(".ran")
def test_flaky():
    first = not ran.exists()
    ran.touch()
    assert not first
"""


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(tiers, "BUILD", tmp_path / "build")
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    # hypothesis and the others take a second to import.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def tier_of(folder: Path, *files: str) -> Tier:
    """A tier of one run of pytest on these files, which runs a test that failed once more."""
    for number, text in enumerate(files):
        (folder / f"test_{number}.py").write_text(text)
    return Tier(((pytest_step("tests"),),), second_run=PYTEST)


def test_a_test_that_fails_twice_fails_the_gate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("gate", tier_of(tmp_path, PASSES, FAILS)) == 1
    printed = capfd.readouterr().out
    assert printed.count("found 42") == 2
    assert "FAILED test_1.py::test_fails" in printed.splitlines()
    assert printed.splitlines()[-1] == "gate: failed"


def test_a_test_that_passes_by_itself_is_named_as_flaky(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("gate", tier_of(tmp_path, PASSES, FLAKY, FLAKY)) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("FLAKY")] == [
        "FLAKY test_1.py",
        "FLAKY test_2.py",
    ]
    assert lines[-1] == "gate: passed"


def test_from_the_third_flaky_test_on_the_gate_fails(tmp_path: Path) -> None:
    assert run("gate", tier_of(tmp_path, FLAKY, FLAKY, FLAKY)) == 1


def test_without_a_second_run_a_failure_is_final(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, FLAKY)
    assert run("all", Tier(tier.stages)) == 1


def test_a_file_that_cannot_be_imported_fails_the_gate(tmp_path: Path) -> None:
    assert run("gate", tier_of(tmp_path, PASSES, "import no_such_module\n")) == 1


def test_a_run_without_any_test_fails_the_gate(tmp_path: Path) -> None:
    assert run("gate", tier_of(tmp_path)) == 1


def test_a_tool_that_finds_a_fault_fails_the_gate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lint = Step("lint", (sys.executable, "-c", "print('unused import'); raise SystemExit(3)"))
    tier = tier_of(tmp_path, PASSES)
    assert run("gate", Tier(((*tier.stages[0], lint),), tier.second_run)) == 1
    printed = capfd.readouterr().out
    assert "unused import" in printed
    assert "BROKEN lint" in printed


def test_steps_of_a_stage_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the file that the other one writes."""
    program = "import sys, time\nfrom pathlib import Path\nPath(sys.argv[1]).touch()\n"
    program += "end = time.monotonic() + 60\n"
    program += (
        "while not Path(sys.argv[2]).exists():\n    assert time.monotonic() < end\n   "
        " time.sleep(0.01)\n"
    )
    first = Step("first", (sys.executable, "-c", program, str(tmp_path / "a"), str(tmp_path / "b")))
    second = Step(
        "second", (sys.executable, "-c", program, str(tmp_path / "b"), str(tmp_path / "a"))
    )
    assert run("gate", Tier(((first, second),))) == 0


def test_the_summary_says_what_the_tier_cost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run("quick", tier_of(tmp_path, PASSES))
    assert "wall time 0 min" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["quick", "gate", "all"])
def test_each_step_of_a_tier_has_a_name_of_its_own(name: str) -> None:
    """Its log and its cache are called so."""
    names = [step.name for stage in tiers.tiers()[name].stages for step in stage]
    assert len(names) == len(set(names))


def test_to_collect_the_quick_tier_imports_no_torch() -> None:
    """Each of its processes collects all of it, and torch takes 2 s of CPU time in each."""
    program = (
        "import pytest, sys; pytest.main(['--quick', '--collect-only', '-q']); sys.exit('torch' in"
        " sys.modules)"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), cwd=ROOT, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stdout
    assert "tests/test_main.py::" in done.stdout
