"""What rank 0 makes of a failure, by the generations before."""

from __future__ import annotations

import pytest

from srunddp.supervisor import restart
from srunddp.supervisor.restart import Generation, RestartPolicy
from srunddp.supervisor.root_cause import RootCause

BOOM = "ValueError: boom"


def failure(cause: str = BOOM, node: str = "n1", code: int = 1, how: str = "failed") -> RootCause:
    return RootCause((0,), node, cause, code, how=how)


def generation(cause: str = "killed by SIGKILL", node: str = "n1", *, steps: bool = False) -> Generation:
    return Generation(cause, node, steps, steps)


@pytest.mark.parametrize(
    ("history", "cause", "steps", "line"),
    [
        ([], failure(), True, "restart 1 of 3: all ranks start anew"),
        ([], failure(), False, "restart 1 of 3: all ranks start anew"),
        ([generation(steps=True)] * 2, failure(), True, "restart 3 of 3: all ranks start anew"),
        ([generation(steps=True)] * 3, failure(), True, "not restarted: this was restart 3 of 3"),
        ([generation(steps=True)], failure(), False, "restart 2 of 3: all ranks start anew"),
        ([generation()], failure(), True, "restart 2 of 3: all ranks start anew"),
        ([generation()], failure(), False, "not restarted: two starts in a row without a step"),
        (
            [generation(BOOM, "n2", steps=True)],
            failure(),
            False,
            "not restarted: the same cause on n2 and n1, without a step in between",
        ),
        ([generation(BOOM, steps=True)], failure(), False, "restart 2 of 3: all ranks start anew"),
        ([], failure("SyntaxError: invalid syntax"), False, "not restarted: the script would fail again"),
        ([], failure("ModuleNotFoundError: No module named 'x'"), True, "restart 1 of 3: all ranks start anew"),
        ([], failure("sys.exit(2)", code=2), False, "not restarted: the script would fail again"),
        ([], failure("killed by SIGTERM", code=143), True, "not restarted: SIGTERM asks for an end"),
        ([], failure("stopped after step 7", code=143, how="ended"), True, ""),
    ],
)
def test_a_failure_is_a_restart_or_not(history: list[Generation], cause: RootCause, steps: bool, line: str) -> None:
    policy = RestartPolicy(3, history, lambda: "where", lambda: steps)
    published, said = policy.decide(cause, "")
    assert (published, said) == ("where" if line.startswith("restart") else None, line)
    assert len(policy.history) == len(history) + line.startswith("restart")


def test_what_stands_in_the_way_is_said() -> None:
    policy = RestartPolicy(3, [], lambda: "where", lambda: True)
    assert policy.decide(failure(), "a node is lost") == (None, "not restarted: a node is lost")


def test_a_long_start_counts_where_nothing_counts_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(restart, "monotonic", lambda: now[0])
    policy = RestartPolicy(9, [generation()], lambda: "where", lambda: False)
    now[0] = 61.0
    assert policy.decide(failure(), "")[0] == "where"
    assert policy.history[-1].progressed
    steps = RestartPolicy(9, [generation(steps=True), generation()], lambda: "where", lambda: False)
    now[0] = 200.0
    assert steps.decide(failure(), "") == (
        None,
        "not restarted: two starts in a row without a step",
    )
