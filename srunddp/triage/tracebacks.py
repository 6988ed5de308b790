"""Python's tracebacks in a stream of lines, several at a time: type, message, the user's last frame, and the chain."""

import re
from dataclasses import dataclass, field

from srunddp.triage.progress import HANDLED

_HEADER = re.compile(r"(?:Original )?Traceback \(most recent call last\):?")
_FRAME = re.compile(r'\s*File "([^"]{1,500})", line (\d+)(?:, in (.{1,200}))?')
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_RAISED = re.compile(rf"({_NAME})(?:: (.*)|:)?$")
_SURELY = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Timeout|Warning|error|timeout|gaierror|herror|StopIteration|BadZipFile|"
    r"NotFound|Fault|Failure|Failed|Killed|Unavailable|RuntimeErr|OutOfMemory)$"
)
_AROUND = re.compile(r"Caught \w+ in (?:DataLoader worker|replica|pin memory)")
_EXPLAINED = "The above exception was the direct cause"
_FOLLOWS = ("During handling of the above exception", _EXPLAINED)
# Threads and tasks whose end is not the process's.
_ASIDE = re.compile(r"^(?:Exception in thread|(?:Task|Future) exception was never retrieved|Exception in callback)")
_IGNORED = ("Exception ignored in", "--- Logging error ---", "Error in atexit")
_TOP = ("<module>", "_run_module_as_main", "_wrap", "_run_module_code")
_LIBRARY = re.compile(
    r"\.(?:pyx|pxd|pxi|cpp|so)$|site-packages|dist-packages|/lib(?:64)?/python\d|^<frozen|^<string>|importlib"
)
_BOX = ("│", "╭", "╰", "┃")  # as rich draws a traceback
_MOST_STRAY = 30
_MOST_OPEN = 64


@dataclass
class PythonException:
    """An exception that ended, or nearly ended, a script.

    Attributes:
        chain: number and text of its line, and of those of the exceptions that came of it.
        began: number of its traceback's first line; previous: the line before that.
        frame: the user's last one, ``train.py:15 in load``; code: the source lines of its frames.
        inner: the user's own code raised it, no library below.
        top: nobody caught it: its first frame is the program's.
        aside: of a thread, ignored, or somebody who caught it said that it goes on.
        explained: the last of the chain was raised from the one before.
    """

    chain: list[tuple[int, str]]
    began: int
    previous: str
    frame: str = ""
    code: str = ""
    inner: bool = False
    top: bool = False
    aside: bool = False
    explained: bool = False

    @property
    def kind(self) -> str:
        """The type of the first of the chain."""
        return self.chain[0][1].partition(":")[0]


@dataclass
class Tracebacks:
    """The tracebacks of one stream: a file, or one rank's lines in it.

    After :meth:`feed` says that a line belongs to a traceback, nobody else is to read it.
    """

    done: list[PythonException] = field(default_factory=list)
    raised: int = 0  # how many exceptions were told of, each of a chain
    _open: int = 0
    _began: int = 0
    _stray: int = 0
    _frames: list[str] = field(default_factory=list)
    _code: list[str] = field(default_factory=list)
    _just_code: bool = False
    _inner: bool = False
    _ignored: bool = False
    _follows: str = ""
    _around: bool = False
    _first: str = ""
    _previous: str = ""

    def feed(self, number: int, text: str) -> bool:
        """Read a line."""
        if match := _HEADER.search(text, 0, 300):
            self._began = self._began if self._open else number
            self._open, self._stray = min(self._open + 1, _MOST_OPEN), 0
            self._frames, self._code, self._first = [], [], ""
            self._inside(number, text[match.end() :].strip() or "    ")
            return True
        if text.lstrip().startswith(_FOLLOWS):
            self._follows = text.strip() if self.done else ""
            return True
        if text.startswith(_IGNORED):
            self._ignored = True
            return True
        inside = bool(self._open) and self._inside(number, text)
        self._previous = self._previous if inside else text
        return inside

    def _inside(self, number: int, text: str) -> bool:
        if match := _FRAME.match(text):
            self._first = self._first or match[3] or "<module>"
            if not _LIBRARY.search(match[1]) or not self._frames:
                function = f" in {match[3]}" if match[3] else ""
                self._frames.append(f"{match[1].rpartition('/')[2]}:{match[2]}{function}")
            self._just_code, self._inner = True, not _LIBRARY.search(match[1])
            return True
        if text.startswith(("    ", "  [Previous line", *_BOX)):
            self._code.append(text.strip()[:300])
            return True
        text = text.lstrip() if text[:1] == " " and self._just_code else text
        match = _RAISED.match(text)
        # Below its code also a name that ends like no exception's: project.errors.BadConfig.
        if match and (_SURELY.search(match[1]) or (self._just_code and ("." in match[1] or match[1][:1].isupper()))):
            self._raise(number, match[2] or "", text)
            return True
        self._stray += 1
        self._just_code = False
        if self._stray > _MOST_STRAY:
            self._open = 0
        return False

    def _raise(self, number: int, message: str, text: str) -> None:
        self._open, self._stray, self._just_code = self._open - 1, 0, False
        self.raised += 1
        if self._follows:
            self.done[-1].chain.append((number, text))
            self.done[-1].explained = self._follows.startswith(_EXPLAINED)
            self.done[-1].top |= self._first in _TOP
        elif self._around:
            outer, self.done[-1] = self.done[-1], self._new(number, text)
            self.done[-1].top |= outer.top  # it was handed on, and nobody caught it there
            self.done[-1].began = outer.began
        else:
            self.done.append(self._new(number, text))
        self._follows, self._around, self._ignored = "", bool(_AROUND.search(message)), False

    def _new(self, number: int, text: str) -> PythonException:
        frame = self._frames[-1] if self._frames else ""
        top, code = self._first in _TOP, "\n".join(self._code[-12:])
        # Whoever is below a caught exception has a function's name; a warning before it tells that it was caught.
        said = not top and bool(HANDLED.search(self._previous) or "WARN" in self._previous[:90].upper())
        aside = said or self._ignored or bool(_ASIDE.match(self._previous))
        return PythonException([(number, text)], self._began, self._previous, frame, code, self._inner, top, aside)
