"""Report a user's mistake in one line and with a fixed exit code, even in a script that Python
starts without ``srunddp``.
"""

import functools
import sys
from types import TracebackType

from srunddp.errors import SrunddpError

_under_srunddp = False


def leave_to_srunddp() -> None:
    """Note that this process is a rank under ``srunddp``, so that :func:`install_excepthook` does
    nothing: ``srunddp`` prints uncaught errors itself.
    """
    global _under_srunddp
    _under_srunddp = True


def install_excepthook() -> None:
    """Make an uncaught SrunddpError print one line instead of a traceback, and end with its exit
    code.

    This does nothing under ``srunddp``, or in an interactive Python, which goes on after an error.
    """
    if not (_under_srunddp or sys.flags.interactive or hasattr(sys, "ps1")):
        _set_hook()


# Cached, so that the hook is set only once per process: a second hook would call the first hook.
@functools.cache
def _set_hook() -> None:
    below = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SrunddpError):
            below(kind, error, trace)
            return
        # Print to the original standard error: if torch's hook has called this hook, it captures
        # sys.stderr until this hook returns.
        print(f"srunddp: error: {error}", file=sys.__stderr__ or sys.stderr)
        raise SystemExit(error.exit_code)

    sys.excepthook = hook
