"""The beds of newer Slurms, as far as it shows without one: tests/README.md, Beds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, tool
from tests.support.promises import find_tests

BEDS = ROOT / "tests" / "beds"


def test_the_scripts_pass_shellcheck() -> None:
    shellcheck = tool(str(Path(sys.executable).parent / "shellcheck"), "shellcheck")
    scripts = sorted(map(str, BEDS.glob("*.sh")))
    done = subprocess.run(
        [shellcheck, "--external-sources", *scripts], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_a_slurm_without_a_bed_is_refused_with_those_there_are() -> None:
    done = subprocess.run([BEDS / "run.sh", "23.11"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 78
    assert "no bed of Slurm 23.11; expected 24.11 or 26.05" in done.stderr


@pytest.mark.slow
def test_each_test_for_control_groups_v2_is_there() -> None:
    lines = (BEDS / "cgroup2.txt").read_text().splitlines()
    chosen = [line for line in lines if not line.startswith("#")]
    known = find_tests(ROOT)
    files = {name.partition("::")[0] for name in known}
    assert chosen
    assert [name for name in chosen if name not in known and name not in files] == []
