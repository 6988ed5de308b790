"""What docs/admin.md lets a site set up: its module file by Lmod, its prolog and its health check
by Slurm.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, Settings, beside
from tests.conftest import ROOT, missing
from tests.docs.packages import environment
from tests.slurm.conftest import SlurmJobRunner
from tests.support.starting import until

LMOD = Path("/usr/share/lmod/lmod/init/bash")
SITES_ROOT = "/opt/srunddp/0.2.0"
LIMIT = 120.0


def blocks(language: str) -> list[str]:
    """Of the page, as it shows them."""
    return re.findall(
        rf"```{language}\n(.*?)```", (ROOT / "docs" / "admin.md").read_text(), re.DOTALL
    )


def test_a_job_uses_the_module(runner: SlurmJobRunner, built: dict[str, Path]) -> None:
    if not LMOD.exists():
        missing(f"{LMOD} is not there (Debian: lmod)")
    folder = runner.cluster.shared / "site"
    root = folder / "0.1.0"
    environment(root, built[".whl"])
    modules = folder / "modules" / "srunddp"
    modules.mkdir(parents=True)
    (module,) = blocks("lua")
    assert SITES_ROOT in module
    (modules / "0.1.0.lua").write_text(module.replace(SITES_ROOT, str(root)))
    (folder / "train.py").write_text("import srunddp\nprint(srunddp.__file__)\n")
    lines = (
        f". {LMOD}",
        f"module use {modules.parent}",
        "module load srunddp/0.1.0",
        f"cd {folder} && srun --nodes=2 srunddp --quiet train.py",
        "man --where srunddp-check",
        'echo "$VIRTUAL_ENV"',
        "module unload srunddp",
        'echo "${VIRTUAL_ENV-none} $(command -v srunddp)"',
    )
    variables = {"PATH": "/usr/bin:/bin", "SRUNDDP_IFACES": str(runner.ifaces), "PYTHONPATH": ""}
    shown = runner.cluster.run("bash", "-c", "\n".join(lines), env=variables).stdout.splitlines()
    assert all(line.startswith(f"{root}/lib/python3") for line in shown[:2]), shown
    assert shown[2:] == [f"{root}/share/man/man1/srunddp-check.1", str(root), "none "]


@pytest.fixture
def site() -> Iterator[Cluster]:
    """A cluster of its own: `set_up` gives it more lines of slurm.conf."""
    with beside(Settings(), 16) as cluster:
        yield cluster


def script(cluster: Cluster, place: int) -> Path:
    """One of the page's, with the srunddp of this environment."""
    text = blocks("bash")[place]
    assert f"{SITES_ROOT}/bin/srunddp" in text
    path = cluster.shared / f"script{place}"
    # The cluster's slurm.conf is not where a site has it, and slurmd does not pass on where.
    text = text.replace(
        "#!/bin/bash\n", f"#!/bin/bash\nexport SLURM_CONF={cluster.folder}/etc/slurm.conf\n"
    )
    path.write_text(
        text.replace(f"{SITES_ROOT}/bin/srunddp", str(Path(sys.executable).with_name("srunddp")))
    )
    path.chmod(0o755)
    return path


def set_up(cluster: Cluster, *lines: str) -> None:
    """Node02 has a full /dev/shm from now on."""
    cluster.on("node02", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
    cluster.reconfigure(replace(cluster.settings, lines=lines))


def drained(cluster: Cluster) -> set[str]:
    """Names and reasons; there is a line for each partition."""
    return {
        *cluster.run(
            "sinfo", "--noheader", "--Node", "--states=drain", "--format=%N %E"
        ).stdout.splitlines()
    }


def test_the_prolog_drains_a_node_that_fails(site: Cluster) -> None:
    set_up(site, f"Prolog={script(site, 0)}")
    site.run("srun", "--nodelist=node02", "true", timeout=LIMIT, check=False)
    assert until(lambda: drained(site), LIMIT) == {"node02 Prolog error"}
    site.run("srun", "--nodes=5", "true", timeout=LIMIT)


def test_the_health_check_drains_a_node_that_fails(site: Cluster) -> None:
    lines = (
        "HealthCheckInterval=15",
        "HealthCheckNodeState=IDLE",
        f"HealthCheckProgram={script(site, 1)}",
    )
    set_up(site, *lines)
    assert until(lambda: drained(site), LIMIT) == {"node02 srunddp check"}
