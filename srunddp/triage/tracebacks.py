"""Reads Python tracebacks in a stream of lines: the chain of exceptions with types and messages,
and the last frame of the user's code. Tracebacks of several ranks may be interleaved.
"""

import re
from dataclasses import dataclass, field

from srunddp.triage.signatures import says

_HEADER = re.compile(r"(?:Original )?Traceback \(most recent call last\):?")
_FRAME = re.compile(r'\s*File "([^"]{1,500})", line (\d+)(?:, in (.{1,200}))?')
# Matches "ValueError: bad", "project.errors.BadConfig", "KeyboardInterrupt".
_RAISED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:: (.*)|:)?$")
_SURELY = re.compile(r"(?:[Ee]rror|Exception|Interrupt|Exit|[Tt]imeout|Warning|StopIteration)$")
# Matches "RuntimeError: Caught KeyError in DataLoader worker process 0.", which the traceback of
# the worker process follows.
_AROUND = re.compile(r"Caught \w+ in (?:DataLoader worker|replica|pin memory)")
_FOLLOWS = ("During handling of the above exception", "The above exception was the direct cause")
_IGNORED = ("Exception ignored in", "--- Logging error ---", "Error in atexit")
# The first frame of a program's stack: its file, runpy (for python -m), or _wrap() of
# torch.multiprocessing in a spawned process.
_TOP = ("<module>", "_run_module_as_main", "_wrap", "_run_module_code")
_LIBRARY = re.compile(
    r"\.(?:pyx|pxd|pxi|cpp|so)$|site-packages|dist-packages|/lib(?:64)?/python\d|^<frozen|^<string>|importlib"
)
_MOST_STRAY = 30  # lines in an open traceback that are no part of it; then it counts as over


@dataclass
class PythonException:
    """An exception that ended a script, or may have ended it.

    Attributes:
        chain: The number and the text of the exception's line, then those of the exceptions that
            followed from it.
        began: The number of the traceback's first line.
        previous: The line before the traceback.
        frame: The last frame in the user's code, for example ``train.py:15 in load``; a library's
            frame if there is none of the user's code.
        below: The file and the code of the last frame of all, each on a line.
        inner: Whether the user's own code raised the exception, not a library.
        top: Whether nobody caught the exception: the traceback begins with the program's first
            frame.
        aside: Whether the exception was ignored or ended only a thread or a task, or the line
            before the traceback says that it was handled.
    """

    chain: list[tuple[int, str]]
    began: int
    previous: str
    frame: str
    below: str
    inner: bool
    top: bool
    aside: bool


@dataclass
class Tracebacks:
    """The tracebacks in one stream of lines: a whole file, or one rank's lines in it.

    A line for which :meth:`feed` returns True belongs to a traceback. Its text must not be read as
    an ordinary line.

    Attributes:
        done: The exceptions of the tracebacks that are read to their end, one for each chain.
        raised: The number of exceptions read, counting each exception of a chain.
        previous: The last line outside of tracebacks.
        open: The number of tracebacks that have begun and not ended.
    """

    done: list[PythonException] = field(default_factory=list)
    raised: int = 0
    previous: str = ""
    open: int = 0
    _began: int = 0  # the number of the first line of the open traceback
    _stray: int = 0  # lines since the last line that was part of the open traceback
    _frame: str = ""  # as PythonException.frame
    _file: str = ""  # the file of the last frame
    _code: str = ""  # the code of the last frame
    _just_code: bool = False  # whether the last line was a frame or its code
    _ignored: bool = False  # whether a line said that Python ignored the next exception
    _follows: bool = False  # whether the next traceback continues the last chain
    _around: bool = False  # whether the last exception came from a process whose traceback follows
    _first: str = ""  # the function of the first frame

    def feed(self, number: int, text: str) -> bool:
        """Read a line; return whether it belongs to a traceback."""
        if _HEADER.search(text, 0, 300):
            # Another rank's traceback may begin inside an open one. Then both count as begun at the
            # first line of the open traceback.
            self._began = self._began if self.open else number
            self.open = self.open + 1
            self._stray = 0
            self._first = ""
            self._frame = ""
            self._file = ""
            self._code = ""
            return True
        if text.lstrip().startswith(_FOLLOWS):
            self._follows = bool(self.done)
            return True
        if text.startswith(_IGNORED):
            self._ignored = True
            return True
        inside = bool(self.open) and self._inside(number, text)
        self.previous = self.previous if inside else text
        return inside

    def _inside(self, number: int, text: str) -> bool:
        if match := _FRAME.match(text):
            self._just_code = True
            self._file = match[1]
            self._code = ""
            self._first = self._first or match[3] or "<module>"
            # Keep the last frame of the user's own code. Keep a library's frame only until there is
            # a frame of the user's code.
            if not _LIBRARY.search(match[1]) or not self._frame:
                if match[3]:
                    function = f" in {match[3]}"
                else:
                    function = ""
                self._frame = f"{match[1].rpartition('/')[2]}:{match[2]}{function}"
            return True
        # Code is indented. The last three texts begin the lines that rich draws around a traceback.
        if text.startswith(("    ", "  [Previous line", "│", "╭", "╰")):
            # A line of carets may follow the code. Nothing of it is left after strip(), so the code
            # is kept.
            self._code = text.strip(" ~^")[:300] or self._code
            return True
        match = _RAISED.match(text)
        # Right below a line of code, also accept other class names, such as
        # project.errors.BadConfig.
        if match and (
            _SURELY.search(match[1])
            or (self._just_code and ("." in match[1] or match[1][:1].isupper()))
        ):
            self._raise(number, match[2] or "", text)
            return True
        self._stray += 1
        self._just_code = False
        if self._stray > _MOST_STRAY:
            self.open = 0
        return False

    def _raise(self, number: int, message: str, text: str) -> None:
        self.open = self.open - 1
        self._stray = 0
        self._just_code = False
        self.raised += 1
        if self._follows:
            self.done[-1].chain.append((number, text))
        elif self._around:
            # Keep whether nobody caught the exception in the process that it was passed on to.
            top = self.done[-1].top
            self.done[-1] = self._new(number, text)
            self.done[-1].top |= top
        else:
            self.done.append(self._new(number, text))
        self._follows = False
        self._around = bool(_AROUND.search(message))
        self._ignored = False

    def _new(self, number: int, text: str) -> PythonException:
        inner = bool(self._file) and not _LIBRARY.search(self._file)
        top = self._first in _TOP
        # If the traceback does not begin with the program's first frame, something caught the
        # exception, and the line before the traceback may say that it was handled.
        aside = self._ignored or bool(
            says("aside", self.previous) or (not top and says("handled", self.previous))
        )
        below = f"{self._file.rpartition('/')[2]}\n{self._code}"
        return PythonException(
            [(number, text)], self._began, self.previous, self._frame, below, inner, top, aside
        )
