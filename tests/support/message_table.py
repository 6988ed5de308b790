"""Writes the table of messages in docs/how-it-works.md: ``python -m tests.support.message_table``.

It lies between two marks, and is made from the docstrings of ``srunddp.supervisor.messages``.
"""

from __future__ import annotations

import re
from inspect import cleandoc

from srunddp.supervisor.messages import FROM_A_RANK, FROM_RANK_ZERO, RankMessage
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "how-it-works.md"
BEGIN = "<!-- messages: begin -->"
END = "<!-- messages: end -->"


def table() -> str:
    """The table in Markdown: each message, who sends it, and what it means."""
    rows = ["| message | from | meaning |", "|---|---|---|"]
    rows += [f"| `{kind.kind}` | a rank | {_meaning(kind)} |" for kind in FROM_A_RANK]
    rows += [f"| `{kind.kind}` | rank 0 | {_meaning(kind)} |" for kind in FROM_RANK_ZERO]
    return "\n".join(rows)


def rendered(page: str) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _meaning(kind: type[RankMessage]) -> str:
    """The docstring as one line, with its attributes as code."""
    text, _, attributes = cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")
    explained = re.sub(r"(?m)^    ([\w, ]+): ", r"`\1`: ", attributes)
    explained = re.sub(r"; (\w+): ", r"; `\1`: ", explained)
    line = " ".join(f"{text} {explained}".split())
    return re.sub(r":\w+:`(\w+)`", r"`\1`", line).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
