"""How a command ends that prints an answer: what may exit, for several of them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from srunddp.errors import SrunddpError
from srunddp.run.verdict import say

_CANNOT_PRINT = 74  # sysexits' EX_IOERR


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Around all that it does: an error is one line and a fixed exit code, also where nothing can be printed."""
    try:
        yield
        sys.stdout.flush()
    except SrunddpError as error:
        say(f"srunddp: error: {error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        say(f"srunddp: error: standard output: {os.strerror(error.errno or 0)}; expected one that can be written\n")
        os._exit(_CANNOT_PRINT)  # Python's own end would try to write once more
