"""A script that Python itself has started: also there, what its user did wrong is one line and a fixed exit code."""

from __future__ import annotations

import functools
import sys
from types import TracebackType

from srunddp.bootstrap.process_group import store
from srunddp.errors import SrunddpError


def end_in_one_line() -> None:
    """From now on an uncaught SrunddpError ends the program with its line, without a traceback.

    Below ``srunddp`` that is so anyway, and an interactive Python goes on.
    """
    if not (store.joined() or sys.flags.interactive or hasattr(sys, "ps1")):
        _hook_in()


@functools.cache
def _hook_in() -> None:
    below = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SrunddpError):
            below(kind, error, trace)
            return
        # torch's hook, where it is above, holds sys.stderr back until this one returns.
        print(f"srunddp: error: {error}", file=sys.__stderr__ or sys.stderr)
        raise SystemExit(error.exit_code)

    sys.excepthook = hook
