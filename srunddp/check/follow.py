"""What the commands have in common that run on many ranks before a job: rank 0 leads, the others follow."""

from __future__ import annotations

from srunddp.check import join
from srunddp.check.coordinator import Act, LostError
from srunddp.check.finding import Subject
from srunddp.errors import SrunddpError
from srunddp.util.click_types import limit
from srunddp.util.console import say

come_within = limit("--timeout", 30.0, "How long rank 0 waits for the others.")


def followed(command: str, subject: Subject, act: Act, timeout: float, ports: range | None = None) -> tuple[int, bool]:
    """On another rank than 0: answer rank 0, or say why it is not found.

    Args:
        command: for the message; for the others see :func:`srunddp.check.join.follow`.

    Returns:
        This rank's exit code, and whether rank 0 was found. Where it was not, that is 0: rank 0 misses this rank, and
        its exit code is the job's, whereas another one here would have the launcher end rank 0 before it has reported.

    Raises:
        LostError: rank 0 was found, and is gone.
    """
    try:
        return join.follow(subject, act, timeout, ports), True
    except LostError:
        raise
    except SrunddpError as error:
        say(f"srunddp: {command} on {subject.environment.node}: error: {error}\n")
        return 0, False
