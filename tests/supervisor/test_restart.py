"""What rank 0 makes of a failure, by the starts before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from srunddp.errors import RendezvousError
from srunddp.supervisor.failure import FailureCategory
from srunddp.supervisor.limits import DEFAULT_LIMITS
from srunddp.supervisor.restart import RestartPolicy, Starts, StartSteps, first_step_limit
from srunddp.supervisor.root_cause import Ending, RootCause
from tests.support.connections import Clock
from tests.support.facts import tells

BOOM = "ValueError: boom"


def failure(
    cause: str = BOOM,
    node: str = "n1",
    code: int = 1,
    ending: Ending = Ending.FAILED,
    category: FailureCategory = FailureCategory.OTHER,
) -> RootCause:
    return RootCause((0,), node, cause, code, ending, category=category)


def import_error(node: str, module: str = "m") -> RootCause:
    found = failure(
        f"ImportError: cannot import name 'f' from '{module}' (/scratch/{node}/{module}.py)",
        node,
        category=FailureCategory.IMPORT_FAILED,
    )
    return replace(found, failed_import=f"ImportError {module}")


def history(
    count: int, cause: str = "killed by SIGKILL", node: str = "n1", *, steps: bool = False
) -> Starts:
    return Starts(count, steps, False, cause, node, steps)


@pytest.mark.parametrize(
    ("before", "cause", "steps", "line"),
    [
        (Starts(), failure(), True, "restart 1 of 3: all ranks start anew"),
        (Starts(), failure(), False, "restart 1 of 3: all ranks start anew"),
        (history(2, steps=True), failure(), True, "restart 3 of 3: all ranks start anew"),
        (history(3, steps=True), failure(), True, "not restarted: this was restart 3 of 3"),
        (history(1, steps=True), failure(), False, "restart 2 of 3: all ranks start anew"),
        (history(1), failure(), True, "restart 2 of 3: all ranks start anew"),
        (history(1), failure(), False, "not restarted: two starts in a row without a step"),
        (
            history(1, BOOM, "n2", steps=True),
            failure(),
            False,
            "not restarted: the same cause on n2 and n1, without a step in between",
        ),
        (history(1, BOOM, steps=True), failure(), False, "restart 2 of 3: all ranks start anew"),
        (
            Starts(),
            failure("SyntaxError: invalid syntax", category=FailureCategory.WRONG_SCRIPT),
            False,
            "not restarted: the script would fail again",
        ),
        # What a script calls its own error says nothing.
        (
            Starts(),
            failure("ImportErrorOnNode: n1"),
            False,
            "restart 1 of 3: all ranks start anew",
        ),
        (
            Starts(),
            failure("ModuleNotFoundError: No x", category=FailureCategory.IMPORT_FAILED),
            True,
            "restart 1 of 3: all ranks start anew",
        ),
        (
            Starts(),
            failure("ModuleNotFoundError: No x", category=FailureCategory.IMPORT_FAILED),
            False,
            "not restarted: the script would fail again",
        ),
        # The imports have succeeded before, so this may be of the moment.
        (
            history(1, steps=True),
            failure("ModuleNotFoundError: No x", category=FailureCategory.IMPORT_FAILED),
            False,
            "restart 2 of 3: all ranks start anew",
        ),
        (
            Starts(2, True, False, "killed by SIGKILL", "n1", False),
            failure("ModuleNotFoundError: No x", category=FailureCategory.IMPORT_FAILED),
            False,
            "not restarted: two starts in a row without a step",
        ),
        (
            Starts(1),
            failure("another run has begun", code=78, category=FailureCategory.FINAL),
            True,
            "not restarted: after this error the run must not go on",
        ),
        (
            Starts(),
            failure("sys.exit(2)", code=2),
            False,
            "not restarted: the script would fail again",
        ),
        # Who has sent it is what counts: see test_signals.py.
        (
            Starts(),
            failure("killed by SIGTERM", code=143),
            True,
            "restart 1 of 3: all ranks start anew",
        ),
        (Starts(), failure("stopped after step 7", code=143, ending=Ending.STOPPED), True, ""),
    ],
)
def test_a_failure_is_a_restart_or_not(
    before: Starts, cause: RootCause, steps: bool, line: str
) -> None:
    policy = RestartPolicy(3, before, lambda: "where", lambda: steps)
    published, said = policy.decide(cause, "")
    assert (published, said) == ("where" if line.startswith("restart") else None, line)
    assert policy.history.count == before.count + line.startswith("restart")


def test_an_import_error_on_a_second_node_is_the_scripts() -> None:
    """Even if its ranks move, or other ranks have made steps; the texts differ by the paths of the
    nodes.
    """
    first = import_error("n1")
    before = Starts(2, True, False, first.cause, "n1", False, first.failed_import, True, 5.0)
    policy = RestartPolicy(9, before, lambda: "where", lambda: False)
    for steps in (StartSteps(), StartSteps(True, 4.0)):
        published, said = policy.decide(import_error("n2"), "", moves=True, steps_seen=steps)
        assert published is None
        assert tells(said, "not restarted", "same import error", "n1", "n2")
    other = import_error("n2", module="another")
    assert policy.decide(other, "", moves=True)[0] == "where"
    assert policy.history.failed_import == "ImportError another"


@pytest.mark.parametrize(
    ("before", "is_of_node"),
    [
        (Starts(), False),
        (Starts(1, True, False, BOOM, "n1", False), True),  # an earlier start has made steps
        (Starts(1, False, False, BOOM, "n1", True), True),  # or has taken long
        (Starts(1, False, False, BOOM, "n1", False), False),
        (Starts(2, False, False, BOOM, "n1", False, moved=True), True),
        (Starts(2, True, False, "", "n1", False, "ImportError m", moved=True), False),
        (Starts(2, True, False, "", "n2", False, "ImportError m", moved=True), True),
        (Starts(2, True, False, "", "n1", False, "ImportError k", moved=True), True),
    ],
)
def test_an_import_error_is_the_nodes_if_the_imports_have_succeeded_before(
    before: Starts, is_of_node: bool
) -> None:
    assert before.is_of_node(import_error("n2")) == is_of_node
    assert not before.is_of_node(failure(node="n2"))


def test_steps_of_any_rank_are_progress() -> None:
    policy = RestartPolicy(9, history(1), lambda: "where", lambda: False)
    assert policy.decide(failure(), "", steps_seen=StartSteps(True, 4.0))[0] == "where"
    assert (policy.history.steps, policy.history.progressed) == (True, True)
    assert policy.decide(failure(node="n2", cause="another"), "")[0] == "where"


def test_the_longest_way_to_a_first_step_is_kept() -> None:
    clock = Clock()
    policy = RestartPolicy(9, Starts(), lambda: "where", lambda: False, clock)
    policy.decide(failure(), "", steps_seen=StartSteps(True, 7.0))
    assert policy.history.first_step_after == 7.0
    clock.now += 5.0
    policy.decide(failure(), "", steps_seen=StartSteps(any=True))
    assert policy.history.first_step_after == 7.0
    clock.now += 5.0
    policy.decide(failure(), "", steps_seen=StartSteps(any=True))
    assert policy.history.first_step_after == 10.0, "of such a step the start's length is known"
    policy.decide(failure(), "")
    assert policy.history.first_step_after == 10.0


def test_a_first_step_has_a_limit_if_earlier_starts_have_made_steps() -> None:
    before = Starts(1, True, first_step_after=20.0)
    assert first_step_limit(before, 6.0, DEFAULT_LIMITS) == 120.0
    assert first_step_limit(before, 0.0, DEFAULT_LIMITS) == 0.0
    assert first_step_limit(Starts(1), 6.0, DEFAULT_LIMITS) == 0.0


def test_what_stands_in_the_way_is_said() -> None:
    policy = RestartPolicy(3, Starts(), lambda: "where", lambda: True)
    published, said = policy.decide(failure(), "a node is lost")
    assert published is None
    assert tells(said, "not restarted", "a node is lost")


def test_a_long_start_counts_where_nothing_counts_steps() -> None:
    clock = Clock()
    policy = RestartPolicy(9, history(1), lambda: "where", lambda: False, clock)
    clock.now += 61.0
    assert policy.decide(failure(), "")[0] == "where"
    assert policy.history.progressed
    steps = RestartPolicy(
        9, Starts(2, True, False, BOOM, "n1", False), lambda: "where", lambda: False, clock
    )
    clock.now += 200.0
    published, said = steps.decide(failure(), "")
    assert published is None
    assert tells(said, "not restarted", "without a step")


def test_a_port_that_is_not_free_is_no_restart() -> None:
    def publish() -> str:
        raise RendezvousError("all 2 ports taken")

    policy = RestartPolicy(3, Starts(), publish, lambda: True)
    assert policy.decide(failure(), "") == (None, "not restarted: all 2 ports taken")


def test_of_a_kill_for_memory_the_history_tells() -> None:
    policy = RestartPolicy(3, Starts(), lambda: "where", lambda: True)
    killed = failure("killed by SIGKILL", code=137, category=FailureCategory.OUT_OF_MEMORY)
    policy.decide(killed, "")
    policy.decide(failure(), "")
    assert policy.history.out_of_memory
