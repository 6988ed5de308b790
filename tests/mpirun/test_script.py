"""The script of ``srunddp mpirun`` with every MPI."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, ROOT
from tests.mpirun.conftest import Mpi

pytestmark = pytest.mark.mpirun

SRUNDDP = str(ROOT / "bin" / "srunddp")


@pytest.mark.parametrize("where", ["--hosts=localhost:2", "--hostfile=my hosts"])
def test_the_ranks_start_with_their_environment_and_arguments(mpi: Mpi, where: str, tmp_path: Path) -> None:
    kind = "mpich" if mpi.name == "Hydra" else "openmpi"
    (tmp_path / "my hosts").write_text("localhost:2\n" if kind == "mpich" else "localhost slots=2\n")
    (tmp_path / "report.py").symlink_to(PROGRAMS / "report.py")
    (tmp_path / "train.py").write_text(
        "import os, runpy, sys\n"
        "assert os.environ['MY_OWN'] == \"it's $(touch canary) mine\"\n"
        "assert os.environ['VIRTUAL_ENV'] == sys.prefix\n"
        "runpy.run_path('report.py')\n"
    )
    layout = (f"--mpi={kind}", f"--mpirun={mpi.mpirun}", where, "--ntasks-per-node=2", f"--venv={mpi.environment}")
    wished = (*layout, "--env=MY_OWN=it's $(touch canary) mine", f"--srunddp={SRUNDDP}", "--output=job.sh")
    words = (*wished, "train.py", "a b", "$(touch canary)")
    variables = {**os.environ, **mpi.env()}
    subprocess.run([SRUNDDP, "mpirun", *words], cwd=tmp_path, env=variables, check=True, timeout=60)
    plain = {name: value for name, value in variables.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(["./job.sh"], cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(report["rank"] for report in reports) == [0, 1], done
    assert {report["world_size"] for report in reports} == {2}
    assert {tuple(report["arguments"]) for report in reports} == {("a b", "$(touch canary)")}
    assert not list(tmp_path.rglob("canary*"))
