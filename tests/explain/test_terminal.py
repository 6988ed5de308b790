"""What variables hold is explained, and no terminal obeys it."""

from __future__ import annotations

from srunddp.explain.explain import Explanation, Row

COMMAND = "a\x1b]0;owned\x07b\rc\nd"
SHOWN = r"a\x1b]0;owned\x07b\rc\nd"


def test_a_line_of_an_explanation_stays_one_and_is_printable() -> None:
    rows = (Row("master", COMMAND, f"MASTER_ADDR={COMMAND}", (f"OTHER={COMMAND}: {COMMAND}",)),)
    text = Explanation(0, rows, (COMMAND,), ()).text
    lines = text.splitlines()
    assert (len(lines), text.count(SHOWN)) == (3, 5)
    assert all(line.isprintable() and line.startswith("[rank 0] ") for line in lines)
