"""An error before the script is printed once, by the rank that is to."""

from __future__ import annotations

import time

import pytest

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.rendezvous.rank_setup import Rejoin, RendezvousOptions, SpareNodeTerms
from srunddp.errors import ConfigError, PeerError, Scope, SrunddpError
from srunddp.run import last_error
from srunddp.spare_nodes import srun
from tests.support.launchers import PID, step

TERMS = SpareNodeTerms(rank=1, lost_after=15.0, within=20.0, expected=(), not_before=0.0, quorum=1)
AGAIN = Rejoin(generation=1, published="", channel="slurm", run="1207.0.0", spare_nodes=TERMS)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that are slept, and not slept here."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def error(scope: Scope = Scope.RANK) -> SrunddpError:
    return ConfigError("no file", expected="a script", scope=scope)


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("rank", "scope", "prints"),
    [
        (0, Scope.JOB, True),
        (1, Scope.JOB, False),
        (2, Scope.NODE, True),
        (3, Scope.NODE, False),
        (3, Scope.RANK, True),
    ],
)
def test_of_those_that_see_an_error_one_prints_it(
    rank: int,
    scope: Scope,
    prints: bool,
    capfd: pytest.CaptureFixture[str],
    waits: list[float],
) -> None:
    """The others end later: a launcher kills all ranks at the first bad end."""
    with pytest.raises(SystemExit) as ended:
        last_error.leave(error(scope), detect(step(rank), pid=PID), None)
    assert ended.value.code == 78
    text = "srunddp: error: no file; expected a script\n"
    assert (printed(capfd), bool(waits)) == (text if prints else "", not prints)


def test_where_the_rank_is_not_known_the_variables_tell(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, text in (("1", ""), ("0", "srunddp: error: no file; expected a script\n")):
        monkeypatch.setenv("SLURM_PROCID", rank)
        with pytest.raises(SystemExit):
            last_error.leave(error(Scope.JOB), None, None)
        assert printed(capfd) == text


def test_what_has_been_printed_is_not_printed_again(
    capfd: pytest.CaptureFixture[str], waits: list[float]
) -> None:
    failed = PeerError("rank 1 failed", code=7)
    failed.said = True
    with pytest.raises(SystemExit) as ended:
        last_error.leave(failed, detect(step(0), pid=PID), None)
    assert (ended.value.code, printed(capfd), waits) == (7, "", [])


@pytest.mark.parametrize(
    ("rank", "scope", "told", "known", "prints"),
    [
        (0, Scope.RANK, True, True, True),
        (1, Scope.RANK, True, True, False),
        (1, Scope.RANK, True, False, True),  # rank 0 cannot be reached
        (1, Scope.JOB, False, True, False),  # which rank 0 sees, too
    ],
)
def test_before_the_ranks_meet_rank_0_prints_what_it_knows(
    rank: int,
    scope: Scope,
    told: bool,
    known: bool,
    prints: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = []

    def report(*_: object) -> bool:
        reports.append(printed(capfd))
        return known

    monkeypatch.setattr(last_error, "report_early_failure", report)
    with pytest.raises(SystemExit) as ended:
        last_error.leave_before_meeting(
            error(scope), detect(step(rank), pid=PID), RendezvousOptions(), None
        )
    assert ended.value.code == 78
    assert len(reports) == told
    assert bool("".join([*reports, printed(capfd)])) == prints
    if rank == 0:  # before the others are told: a launcher may kill all at once then
        assert reports[0]


@pytest.mark.parametrize("scope", [Scope.RANK, Scope.JOB])
def test_a_node_that_is_cut_off_says_so_and_waits_for_srun(
    scope: Scope, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where all ranks see the error: nobody is cut off then."""
    awaited = []
    monkeypatch.setattr(srun, "await_srun", lambda: awaited.append(True))
    with pytest.raises(SystemExit) as ended:
        last_error.leave(error(scope), detect(step(2), pid=PID), AGAIN)
    if scope is Scope.JOB:
        assert (ended.value.code, printed(capfd), awaited) == (78, "", [])
        return
    assert (ended.value.code, awaited) == (69, [True])
    assert printed(capfd).startswith(
        "srunddp: error: node03 did not rejoin the other ranks: no file"
    )
