"""Programs of many kinds are trained as a plain loop of one process does, on any number of ranks,
also when another number goes on with them after any step.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings

from tests.train.referee.programs import PROGRAMS
from tests.train.referee.verdicts import BOUND, Verdict, judge_interrupted, judge_whole

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Referee:
    """What it has found.

    Attributes:
        seed: Of the steps after which other ranks go on.
        verdicts: By program.
    """

    seed: int
    verdicts: Mapping[str, Sequence[Verdict]]


@pytest.fixture(scope="module")
def referee(tmp_path_factory: pytest.TempPathFactory) -> Referee:
    """All programs are trained in the same few worlds, as a world takes long to start.

    At night after new steps, from each number of ranks to another, and also without an
    interruption, which the interrupted ones cover.
    """
    folder = tmp_path_factory.mktemp("referee")
    names = [*PROGRAMS]
    is_night = settings.get_current_profile_name() == "many"
    if is_night:
        seed = secrets.randbelow(1_000_000)
    else:
        seed = 0
    found = defaultdict(list)
    for each in judge_interrupted(folder, seed, names, in_turn=not is_night):
        found[each.program].append(each)
    if is_night:
        for each in judge_whole(folder, names):
            found[each.program].append(each)
    return Referee(seed, found)


# At night all is trained in the set-up of the first test, beside other tests on few cores.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", PROGRAMS)
def test_any_ranks_train_as_a_plain_loop_does(program: str, referee: Referee) -> None:
    """Weights, rates, figures, and which step was best."""
    verdicts = referee.verdicts[program]
    assert verdicts
    wrong = [str(each) for each in verdicts if each.worst > BOUND]
    assert not wrong, f"python -m tests.train.referee --seed {referee.seed} {program!r}: {wrong}"
