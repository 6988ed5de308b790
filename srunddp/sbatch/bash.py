"""The words of a job script in bash, as far as it takes to find its commands.

Quotes, ``$(...)`` and an array's values belong to a word, and may hold line ends. What is in them
is not looked into: a command there is none of the script's own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # parentheses, three deep at most
_BEFORE_LOOPS = ("then", "do", "else", "{", "time")
_LOOPS = ("for", "while", "until")


class Kind(StrEnum):
    """What a part of the text is."""

    BLANK = "blank"
    COMMENT = "comment"
    HERE_DOCUMENT = "here_document"
    WORD = "word"
    SEPARATOR = "separator"


# The first that fits counts, so that a separator is what nothing else is.
_PATTERNS = {
    # A backslash at the end of a line joins it with the next, and is no word.
    Kind.BLANK: r"(?:[ \t\r]|\\\n)+",
    # Only where a word could begin: in $# or a#b the word has taken the # already.
    Kind.COMMENT: r"\#[^\n]*",
    # From << to the line that ends it; <<< is none.
    Kind.HERE_DOCUMENT: (
        r"(?<!<)<<-?[ \t]*(?P<quote>['\"]?)\\?(?P<end>[\w.-]+)(?P=quote)[^\n]*\n"
        r".*?^\t*(?P=end)$"
    ),
    Kind.WORD: (
        r"(?:"
        rf"(?:\$|(?<==)){_NESTED}"  # $(command), and the values of an array behind its =
        r"|`[^`]*`"
        r'|"(?:[^"\\]|\\.)*"'
        r"|'[^']*'"
        r"|\\."
        r"""|[^\s"'`\\;&|()<>]"""
        r")+"
    ),
    Kind.SEPARATOR: r".",
}
_TOKEN = re.compile(
    "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items()),
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Word:
    """A word of a command.

    Attributes:
        source: as it is written.
        start: its place in the script.
    """

    source: str
    start: int

    @property
    def text(self) -> str:
        """Return it without quotes."""
        return re.sub("[\"']", "", self.source)

    @property
    def name(self) -> str:
        """Return the name of a program: without its folder."""
        return self.text.rpartition("/")[2]


@dataclass(frozen=True)
class Command:
    """A command: its words, at least one, and whether it is in a loop."""

    words: tuple[Word, ...]
    in_loop: bool


def commands(text: str) -> Iterator[Command]:
    """Find the commands of a job script, in their order."""
    words: list[Word] = []
    loops = 0
    # The added line end closes the last command as a separator closes the others.
    for token in _TOKEN.finditer(text + "\n"):
        kind = token.lastgroup
        if kind == Kind.WORD:
            words.append(Word(token[0], token.start()))
        # A here-document's pattern takes the rest of the line on which it begins, with its end.
        elif words and kind in (Kind.SEPARATOR, Kind.HERE_DOCUMENT):
            loops += _opened_loops(words)
            yield Command(tuple(words), loops > 0)
            words = []


def _opened_loops(words: list[Word]) -> int:
    """Return by how many loops deeper a script is behind a command than before it: 1, 0 or -1."""
    first = next((word.source for word in words if word.source not in _BEFORE_LOOPS), "")
    if first in _LOOPS:
        return 1
    if first == "done":
        return -1
    return 0
