"""The lines of docs/recipes.md for hosts without Slurm start the ranks, with the variables that
they hand on.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, ROOT
from tests.mpirun.conftest import LIMIT, Mpi

pytestmark = pytest.mark.mpirun


@dataclass(frozen=True)
class Recipe:
    """How the page starts the ranks on two hosts under one MPI, and this test on one.

    Attributes:
        block: Which of the page's blocks it is; the first one comes before all others.
        hosts: The option of the page that names the hosts.
        here: The same of this machine.
        file: The option of a file of hosts, as the page says.
        line: Of such a file, for this machine.
    """

    block: int
    hosts: str
    here: str
    file: str
    line: str


RECIPES = {
    "Open MPI": Recipe(
        1, "--host a:4,b:4", "--host localhost:2", "--hostfile hosts", "localhost slots=2"
    ),
    "Hydra": Recipe(2, "-hosts a:4,b:4", "-hosts localhost:2", "-f hosts", "localhost:2"),
    "Intel MPI": Recipe(3, "-hosts a,b", "-hosts localhost", "-f hosts", "localhost:2"),
}


def blocks() -> list[str]:
    """What comes beforehand, and the line of each MPI."""
    section = (
        (ROOT / "docs" / "recipes.md")
        .read_text()
        .split("\n## Without Slurm\n")[1]
        .split("\n## ")[0]
    )
    return re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("where", ["host", "hostfile"])
def test_recipe_starts_the_ranks_with_their_variables(mpi: Mpi, where: str, tmp_path: Path) -> None:
    recipe = RECIPES[mpi.name]
    before = blocks()[0]
    line = blocks()[recipe.block]
    assert recipe.hosts in line
    hosts = recipe.here if where == "host" else recipe.file
    line = line.replace(recipe.hosts, hosts)
    line = re.sub(r"(-np?) 8 ", r"\1 2 ", line)
    line = (
        line.replace("ppr:4:", "ppr:2:")
        .replace("-ppn 4", "-ppn 2")
        .replace("mpirun", f"'{mpi.mpirun}'", 1)
    )
    (tmp_path / "hosts").write_text(f"{recipe.line}\n")
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
