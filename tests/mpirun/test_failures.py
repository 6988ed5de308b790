"""When one rank fails under mpirun, all end at once and the one that failed is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from srunddp.supervisor.limits import GRACE
from tests.chaos.plan import Fault, Plan
from tests.chaos.run import AT_ONCE, STOPPED, Site, carry_out, check, started
from tests.conftest import PROGRAMS
from tests.mpirun.conftest import MPI_NAMES, Mpi, there
from tests.slurm.conftest import SRUNDDP

pytestmark = [pytest.mark.mpirun, pytest.mark.alone]  # all have to be gone within some seconds


@pytest.fixture(params=MPI_NAMES)
def launcher(request: pytest.FixtureRequest) -> str:
    there(request.param)
    return str(request.param)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("rank", "kind"),
    [(3, "exception"), (0, "exit3"), (2, "sigkill"), (4, "supervisor"), (5, "segv")],
)
def test_all_end_and_the_culprit_is_named(launcher: str, rank: int, kind: str, site: Site) -> None:
    """Hydra leaves no time for a verdict where a supervisor is killed: see Plan.leaves_no_time."""
    check(Plan((Fault(rank, kind),), launcher=launcher, peers="block"), site)


@pytest.mark.parametrize("kind", ["sigkill", "exception"])
def test_peers_that_ignore_sigterm_and_their_children_end_too(
    launcher: str, kind: str, site: Site
) -> None:
    check(
        Plan((Fault(3, kind),), launcher=launcher, peers="block", stubborn=True, children=True),
        site,
    )


def test_a_good_run_has_no_verdict(launcher: str, site: Site) -> None:
    result = carry_out(Plan(launcher=launcher, steps=50), site)
    assert (result.code, result.verdicts, result.left) == (0, (), ()), result.describe()


def test_the_end_of_hydra_s_mpirun_leaves_nothing(site: Site) -> None:
    there("mpich")
    with started(Plan(launcher="mpich", children=True), site) as run:
        run.ready()
        run.failing()
        run.process.kill()
        result = run.finish(15)
    assert result.left == (), result.describe()


@pytest.mark.parametrize(
    ("plan", "within"),
    [
        (Plan((Fault(3, "sigkill"),), launcher="openmpi5", torch=True), AT_ONCE),
        (Plan((Fault(2, "stop"),), launcher="mpich"), STOPPED),
    ],
    ids=["gloo", "stopped"],
)
def test_gloo_s_own_errors_and_a_pause_do_not_hide_the_culprit(
    plan: Plan, within: float, site: Site
) -> None:
    there(plan.launcher)
    check(plan, site, within)


VICTIM = str(PROGRAMS / "victim.py")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_may_save_ends_its_write(mpi: Mpi, ranks: int, tmp_path: Path) -> None:
    """Rank 0 stays until then: mpirun kills all when one leaves."""
    done = mpi.run(ranks, SRUNDDP, VICTIM, "write", str(tmp_path))
    assert done.code == 1, done.errors
    assert "rank 1 on" in done.errors
    assert (tmp_path / "saved").read_text().endswith("END")


@pytest.mark.nightly
def test_a_rank_that_saves_by_one_call_ends_it(mpi: Mpi, tmp_path: Path) -> None:
    """No Python runs meanwhile."""
    done = mpi.run(2, SRUNDDP, "--grace=5m", VICTIM, "save", str(tmp_path))
    assert done.code == 1, done.errors
    assert torch.load(tmp_path / "saved", mmap=True).sum() == 300_000_000


@pytest.mark.parametrize("wait", ["all_reduce", "wait"])
def test_a_rank_that_waits_for_others_does_not_use_the_time(
    mpi: Mpi, wait: str, tmp_path: Path
) -> None:
    """Though it handles SIGTERM."""
    done = mpi.run(2, SRUNDDP, "--grace=5m", VICTIM, wait, str(tmp_path), timeout=2 * GRACE + 60)
    assert done.code == 1, done.errors
    assert (tmp_path / "outlived").exists()
