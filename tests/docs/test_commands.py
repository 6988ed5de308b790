"""Each block of shell commands on a page is run, in an allocation on the test cluster, or listed
with its reason.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from tests.conftest import ROOT
from tests.mpirun.conftest import ALLOW_ROOT
from tests.slurm.conftest import SlurmJobRunner
from tests.support.site import PAGES

LIMIT = 180
NOT_RUN: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("not_run.yaml").read_text()
)
SCRIPT = "import os, sys\nprint('rank', os.environ.get('RANK'), *sys.argv[1:])\n"
# mpirun starts its ranks on this node, as where there is no Slurm.
WITHOUT_SLURM = 'mpirun() { env $(compgen -e SLURM_ | sed "s/^/--unset=/") mpirun "$@"; }'
# Also inside a list, where it is indented.
BLOCK = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks() -> Iterator[tuple[str, str]]:
    """The page and the text of each."""
    for page in PAGES:
        for _, block in BLOCK.findall(page.read_text()):
            yield str(page.relative_to(ROOT)), dedent(block)


def reason(page: str, block: str) -> str | None:
    """Why it is not run; a listed block is known by how it begins."""
    return next(
        (why for start, why in NOT_RUN.get(page, {}).items() if block.startswith(start)), None
    )


RUN = [(page, block) for page, block in blocks() if reason(page, block) is None]


@pytest.mark.parametrize(("page", "block"), RUN, ids=lambda each: " ".join(each.split())[:50])
def test_a_block_runs(page: str, block: str, runner: SlurmJobRunner) -> None:
    """With a small script under each name that the block has."""
    folder = runner.cluster.shared / "user"
    folder.mkdir(exist_ok=True)
    for name in {*re.findall(r"(?<![\w/.-])[\w/.-]+\.py\b", block), "train.py"}:
        if not name.startswith(("/", "..")) and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            source = ROOT / name
            (folder / name).write_text(source.read_text() if source.exists() else SCRIPT)
    for name in (".venv", "venv"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / ".venv")
    ifaces = folder / "ifaces.conf"
    ifaces.write_text(f"{runner.ifaces.read_text()}- nodes: login\n  interface: auto\n")
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    variables = {
        "PATH": path,
        "VIRTUAL_ENV": str(ROOT / ".venv"),
        "SRUNDDP_IFACES": str(ifaces),
        **ALLOW_ROOT,
    }
    variables |= {"OMP_NUM_THREADS": "1", "SLURM_OVERCOMMIT": "1"}
    variables["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    command = f"cd {shlex.quote(str(folder))}\n{WITHOUT_SLURM}\nset -e\n{block}"
    words = ("salloc", "--nodes=2", "--overcommit", "bash", "-c", command)
    done = runner.cluster.run(*words, env=variables, timeout=LIMIT, check=False)
    assert done.returncode == 0, f"{page}:\n{block}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


def test_what_is_listed_is_on_its_page() -> None:
    for page, listed in NOT_RUN.items():
        there = [block for name, block in blocks() if name == page]
        assert [
            start for start in listed if not any(block.startswith(start) for block in there)
        ] == [], page
        assert all(listed.values()), page
