"""Splits a bash job script into words, just well enough to find its commands.

A word may contain quotes, ``$(...)`` and an array's values, and these may contain newlines.
Commands inside a word are not found.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # parentheses, nested at most three deep
# Parentheses as in _NESTED, without quotes and backslashes in them.
NESTED_WITHOUT_QUOTES = _NESTED.replace("[^()", r"[^()\"'\\")
_REST = re.compile(r"(?:[ \t]|\\\n)*((?:\d*[<>]|\|(?!\|)|&(?!&))(?:\\\n|[^\n;#])*)")
_BEFORE_LOOPS = ("then", "do", "else", "{", "time")
_LOOPS = ("for", "while", "until")


class Kind(StrEnum):
    """The kind of a token, which is a part of a job script."""

    BLANK = "blank"
    COMMENT = "comment"
    HERE_DOCUMENT = "here_document"
    REDIRECTED = "redirected"
    WORD = "word"
    SEPARATOR = "separator"


# The first pattern that matches wins, so a separator is any character that no other pattern takes.
_PATTERNS = {
    # A backslash at the end of a line joins that line with the next one.
    Kind.BLANK: r"(?:[ \t\r]|\\\n)+",
    # A comment begins only where a word could begin. In $# or a#b, the # is already in the word.
    Kind.COMMENT: r"\#[^\n]*",
    # From << to the line that ends the document. The here-string <<< is no here-document.
    Kind.HERE_DOCUMENT: (
        r"(?<!<)<<-?[ \t]*(?P<quote>['\"]?)\\?(?P<end>[\w.-]+)(?P=quote)[^\n]*\n"
        r".*?^\t*(?P=end)$"
    ),
    # A file descriptor before a redirection, such as the 2 of 2>&1, is no word of the command.
    Kind.REDIRECTED: r"\d+(?=[<>])",
    Kind.WORD: (
        r"(?:"
        rf"(?:\$|(?<==)){_NESTED}"  # $(command), and the values of an array behind its =
        r"|`[^`]*`"
        # Quotes inside "$(…)" do not end the quotes around it.
        rf'|"(?>\${_NESTED}|[^"\\]|\\.)*"'
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
        source: The word as the script has it.
        start: The offset of the word's first character in the script.
    """

    source: str
    start: int

    @property
    def text(self) -> str:
        """The word roughly as bash would pass it on: all quotes are dropped, and nothing is
        expanded.
        """
        return re.sub("[\"']", "", self.source)

    @property
    def name(self) -> str:
        """The name of a program: the word without a folder before it."""
        return self.text.rpartition("/")[2]


@dataclass(frozen=True)
class Command:
    """The words of a command, at least one, and whether the command is in a loop."""

    words: tuple[Word, ...]
    in_loop: bool


def rest_of_line(text: str, last: Word) -> str:
    """Return the redirections, the pipe or the ``&`` that follow a command on its line; empty if
    none follow.

    Args:
        text: The script.
        last: The last word of the command.
    """
    found = _REST.match(text, last.start + len(last.source))
    return found[1].rstrip() if found else ""


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a job script in the order of the script."""
    words: list[Word] = []
    loops = 0
    # Add a line end, so that a separator closes the last command too.
    for token in _TOKEN.finditer(text + "\n"):
        kind = token.lastgroup
        if kind == Kind.WORD:
            words.append(Word(token[0], token.start()))
        # The tokenizer's pattern of a here-document matches the rest of the line, too, so it ends
        # the command.
        elif words and kind in (Kind.SEPARATOR, Kind.HERE_DOCUMENT, Kind.REDIRECTED):
            loops += _opened_loops(words)
            yield Command(tuple(words), loops > 0)
            words = []


def _opened_loops(words: list[Word]) -> int:
    """Return 1 if a command opens a loop, -1 if it closes one, else 0."""
    first = next((word.source for word in words if word.source not in _BEFORE_LOOPS), "")
    if first in _LOOPS:
        return 1
    if first == "done":
        return -1
    return 0
