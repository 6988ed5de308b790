"""The lines of docs/recipes.md for hosts without Slurm start the ranks, with the variables that
they hand on.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, ROOT
from tests.mpirun.conftest import LIMIT, Mpi

pytestmark = pytest.mark.mpirun


def lines() -> list[str]:
    """The blocks of the recipe: what comes beforehand, Open MPI's line, and MPICH's."""
    section = (
        (ROOT / "docs" / "recipes.md")
        .read_text()
        .split("\n## Without Slurm\n")[1]
        .split("\n## ")[0]
    )
    return re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[:3]


@pytest.mark.parametrize("where", ["host", "hostfile"])
def test_recipe_starts_the_ranks_with_their_variables(mpi: Mpi, where: str, tmp_path: Path) -> None:
    before, openmpi, mpich = lines()
    line, option = (mpich, "-hosts a:4,b:4") if mpi.name == "Hydra" else (openmpi, "--host a:4,b:4")
    assert option in line
    name, _, _ = option.partition(" ")
    if where == "host":
        hosts = f"{name} localhost:2"
    elif mpi.name == "Hydra":
        hosts = "-f hosts"
    else:
        hosts = "--hostfile hosts"
    line = re.sub(r"(-np?) 8 ", r"\1 2 ", line.replace(option, hosts))
    line = (
        line.replace("ppr:4:", "ppr:2:")
        .replace("-ppn 4", "-ppn 2")
        .replace("mpirun", f"'{mpi.mpirun}'", 1)
    )
    (tmp_path / "hosts").write_text(
        "localhost:2\n" if mpi.name == "Hydra" else "localhost slots=2\n"
    )
    (tmp_path / ".venv").symlink_to(mpi.environment)
    (tmp_path / "report.py").symlink_to(PROGRAMS / "report.py")
    (tmp_path / "train.py").write_text(
        "import os, runpy\n"
        "assert os.environ['NCCL_DEBUG'] == 'WARN'\n"
        "assert os.path.samefile(os.environ['VIRTUAL_ENV'], '.venv')\n"
        "runpy.run_path('report.py')\n"
    )
    text = before + line.replace("srunddp run", f"'{ROOT}/bin/srunddp' run")
    variables = mpi.here()
    del variables["VIRTUAL_ENV"]
    done = subprocess.run(
        ["bash", "-euc", text],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done
    reports = [json.loads(shown) for shown in done.stdout.splitlines() if shown.startswith("{")]
    assert sorted(report["rank"] for report in reports) == [0, 1], done
    assert {report["world_size"] for report in reports} == {2}
    assert {tuple(report["arguments"]) for report in reports} == {("--epochs=10",)}
