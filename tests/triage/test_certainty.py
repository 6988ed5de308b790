"""What keeps a diagnosis from being called certain: each objection by itself, with its twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from srunddp.triage.certainty import OBJECTIONS, Case, teller
from srunddp.triage.collect import Evidence, collect
from srunddp.triage.diagnose import diagnose
from srunddp.triage.diagnosis import Certainty, Diagnosis
from srunddp.triage.logs import find
from srunddp.triage.rules import PEER
from tests.support.starting import write

LIMIT = (
    "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***\n"
)
EXITED = "srun: error: n1: task 0: Exited with exit code 1\n"
XID = "n2 kernel: NVRM: Xid (PCI:0000:81:00): 79, pid=77, GPU has fallen off the bus.\n"


def uncaught(
    text: str = "PermissionError: [Errno 13] Permission denied: '/out'", by: str = ""
) -> str:
    lines = ("Traceback (most recent call last):", '  File "/p/a.py", line 1, in <module>', text)
    return "".join(f"{by}{line}\n" for line in lines)


# By the objection: logs to which it alone applies, and the same without what it speaks of, which
# are judged with certainty.
CASES = {
    "is_not_said_by_an_authority": (
        "step 1\nthe job exceeded its time limit\n",
        f"step 1\n{LIMIT}",
    ),
    "a_rank_ended_by_itself": (f"step 1\n{EXITED}{LIMIT}", f"step 1\n{LIMIT}"),
    "stood_still_before": (
        f"2026-03-01 09:00:00 step 1\n{LIMIT}",
        f"2026-03-01 09:55:00 step 1\n{LIMIT}",
    ),
    "never_made_a_step": (f"hello\n{LIMIT}", f"step 1\n{LIMIT}"),
    "another_end_is_told": (f"{uncaught()}{LIMIT}", uncaught()),
    "wrote_on_until_stopped": (
        f"{uncaught()}a\nb\nc\nState: CANCELLED\n",
        f"{uncaught()}a\nb\nState: CANCELLED\n",
    ),
    "is_of_an_unknown_rank": (
        f"[rank0]: a\n[rank1]: b\n{uncaught()}",
        f"[rank0]: a\n[rank1]: b\n{uncaught(by='[rank1]: ')}",
    ),
    "made_steps_afterwards": (f"{uncaught()}step 1\n", f"{uncaught()}a\n"),
    # Rank 1 speaks before the line that tells what rank 0's traceback is of.
    "another_cause_may_be_first": (
        uncaught(by="[rank0]: ").replace("\n", "\n[rank1]: MemoryError\n", 1),
        uncaught(by="[rank0]: ") + "[rank1]: MemoryError\n",
    ),
    "launcher_tells_otherwise": (
        f"{uncaught(by='[rank1]: ')}{EXITED}",
        f"{uncaught(by='[rank0]: ')}{EXITED}",
    ),
    "its_log_ends_well": (f"{XID}Job finished\n", XID),
    "its_log_ends_well_unreported": (
        f"{uncaught()}Job finished\n",
        f"{uncaught()}Job finished\n{EXITED}",
    ),
}


def judged(folder: Path, log: str) -> tuple[Diagnosis, Evidence]:
    evidence = collect(find([str(write(folder / "slurm-1.out", log))]))
    return diagnose(evidence), evidence


def objections(found: Diagnosis, evidence: Evidence) -> list[str]:
    """The names of those that apply."""
    assert found.first
    events = [event for event in evidence.events if event.rule != PEER.name]
    case = Case(found, found.first, events, evidence)
    asked = OBJECTIONS[teller(case)]
    assert asked is not None
    return [applies.__name__ for applies in asked if applies(case)]


def test_each_objection_has_a_case() -> None:
    assert {each.__name__ for asked in OBJECTIONS.values() for each in asked or ()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_an_objection_applies_by_itself_and_keeps_certainty_away(name: str, tmp_path: Path) -> None:
    doubtful, certain = CASES[name]
    found, evidence = judged(tmp_path, doubtful)
    assert (objections(found, evidence), found.certainty) == ([name], Certainty.LIKELY)
    found, evidence = judged(tmp_path, certain)
    assert (objections(found, evidence), found.certainty) == ([], Certainty.CERTAIN)
