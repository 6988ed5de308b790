"""Programs of many kinds are trained as a plain loop of one process does, on any number of ranks, and
when others go on with them after any step.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import settings

from tests.train.referee.programs import PROGRAMS
from tests.train.referee.verdicts import BOUND, Verdict, judge

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def seed() -> int:
    """Of the steps after which other ranks go on: new ones each night."""
    if settings.get_current_profile_name() == "many":
        return secrets.randbelow(1_000_000)
    return 0


@pytest.fixture(scope="module")
def verdicts(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Sequence[Verdict]]:
    """By program; all of them are trained in the same few worlds, as a world takes long to start."""
    found = defaultdict(list)
    for each in judge(tmp_path_factory.mktemp("referee"), seed, [*PROGRAMS]):
        found[each.program].append(each)
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_any_ranks_train_as_a_plain_loop_does(
    program: str, seed: int, verdicts: Mapping[str, Sequence[Verdict]]
) -> None:
    """Weights, rates, figures, and which step was best."""
    wrong = [str(each) for each in verdicts[program] if each.worst > BOUND]
    assert not wrong, f"python -m tests.train.referee --seed {seed} {program!r}: {wrong}"
