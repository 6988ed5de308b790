"""Writes the tables of messages in docs/how-it-works.md: ``python -m tests.support.message_table``.

Each table lies between two marks, and is made from the docstrings of the messages' classes.
"""

from __future__ import annotations

import re
from inspect import cleandoc

from srunddp.bootstrap.rendezvous import messages as rendezvous
from srunddp.supervisor import messages as supervisor
from srunddp.util.messages import Message
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "how-it-works.md"
BEGIN = "<!-- messages of {}: begin -->"
END = "<!-- messages of {}: end -->"
Kinds = tuple[type[Message], ...]


def table(from_a_rank: Kinds, from_rank_zero: Kinds) -> str:
    """Return a table in Markdown: each message, who sends it, and what it means."""
    rows = ["| message | from | meaning |", "|---|---|---|"]
    for kind in dict.fromkeys((*from_a_rank, *from_rank_zero)):
        senders = []
        if kind in from_a_rank:
            senders.append("a rank")
        if kind in from_rank_zero:
            senders.append("rank 0")
        rows.append(f"| `{kind.kind}` | {', '.join(senders)} | {_meaning(kind)} |")
    return "\n".join(rows)


def rendered(page: str) -> str:
    """Return the page with the present tables between their marks."""
    rendezvous_table = table(rendezvous.FROM_A_RANK, rendezvous.FROM_RANK_ZERO)
    page = _replaced(page, "the rendezvous", rendezvous_table)
    supervisor_table = table(supervisor.FROM_A_RANK, supervisor.FROM_RANK_ZERO)
    return _replaced(page, "the supervisor", supervisor_table)


def _replaced(page: str, name: str, text: str) -> str:
    begin = BEGIN.format(name)
    end = END.format(name)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def _meaning(kind: type[Message]) -> str:
    """Return the docstring of a message in one line, with the names of its attributes as code."""
    text, _, attributes = cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")
    explained = re.sub(r"(?m)^    ([\w, ]+): ", r"`\1`: ", attributes)
    explained = re.sub(r"; (\w+): ", r"; `\1`: ", explained)
    line = " ".join(f"{text} {explained}".split())
    return re.sub(r":\w+:`(\w+)`", r"`\1`", line).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
