"""A script that Python itself has started: also there, what its user did wrong is one line and a
fixed exit code.
"""

import functools
import sys
from types import TracebackType

from srunddp.errors import SrunddpError

_below_srunddp = False


def leave_to_srunddp() -> None:
    """Tell that this process is a rank below ``srunddp``, which prints such an error itself."""
    global _below_srunddp
    _below_srunddp = True


def install_excepthook() -> None:
    """Let an uncaught SrunddpError end the program with its line and exit code, and no traceback.

    Nothing is done below ``srunddp``, nor in an interactive Python, which goes on after an error.
    """
    if not (_below_srunddp or sys.flags.interactive or hasattr(sys, "ps1")):
        _set_hook()


# Once in a process: a second hook would have the first one below it, and both would be called.
@functools.cache
def _set_hook() -> None:
    below = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SrunddpError):
            below(kind, error, trace)
            return
        # torch's hook, where it is above, holds sys.stderr back until this one returns.
        print(f"srunddp: error: {error}", file=sys.__stderr__ or sys.stderr)
        raise SystemExit(error.exit_code)

    sys.excepthook = hook
