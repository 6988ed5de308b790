"""Show the error behind a ``destroy_process_group()`` that does not return.

Many scripts end with ``try: … finally: dist.destroy_process_group()``. After an error in the middle
of a collective that call may never return, and then nobody learns of the error: Python prints it
only when the stack has unwound. All other ranks wait meanwhile.

The error is only printed; the script goes on. srunddp cannot tell whether the script handles the
error or is about to end with it, and destroying a group may take long while another rank saves.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from srunddp import telemetry
from srunddp.util.import_hook import surround_import

# Seconds. A script may also handle the error by destroying the groups and creating them again,
# which takes less time.
_RETURNS_WITHIN = 10.0
_FUNCTION = "destroy_process_group"
_DEFINING_MODULE = "torch.distributed.distributed_c10d"
# Modules that have the function under its name: the one that defines it, and the one from which
# scripts import it.
_MODULES = (_DEFINING_MODULE, "torch.distributed")


def watch(who: str, within: float = _RETURNS_WITHIN) -> None:
    """Print the error that is being handled when ``destroy_process_group()`` does not return.

    Args:
        who: The rank, as the printed line names it.
        within: Seconds that the call may take.
    """

    @contextlib.contextmanager
    def around(defining: ModuleType) -> Iterator[None]:
        yield
        stock = getattr(defining, _FUNCTION)
        replacement = watched(stock, who, within)
        for name in _MODULES:
            module = sys.modules.get(name)
            if getattr(module, _FUNCTION, None) is stock:
                setattr(module, _FUNCTION, replacement)

    surround_import(_DEFINING_MODULE, around)


def watched(destroy: Callable[..., object], who: str, within: float) -> Callable[..., None]:
    """Return a function that calls ``destroy``, and prints the error that is being handled if that
    takes too long.

    Args:
        destroy: torch's ``destroy_process_group``.
        who, within: As for :func:`watch`.
    """

    @functools.wraps(destroy)
    def call(*args: Any, **options: Any) -> None:
        # If there is a group to destroy, this rank has joined others, whatever store they used.
        telemetry.join_others()
        error = sys.exc_info()[1]
        if error is None:
            destroy(*args, **options)
            return
        timer = threading.Timer(within, _print, (error, who, within))
        timer.daemon = True  # Python does not wait for it at exit
        # The error may be that no thread can be started.
        with contextlib.suppress(RuntimeError):
            timer.start()
        try:
            destroy(*args, **options)
        finally:
            timer.cancel()

    return call


def _print(error: BaseException, who: str, after: float) -> None:
    if sys.stderr is None:
        return
    trace = "".join(traceback.format_exception(error))
    print(
        # The script may have left a line unfinished, as a progress bar does.
        f"\nsrunddp: {who}: {_FUNCTION}() has not returned for {after:g} s; it was called"
        f" while this error was handled:\n{trace}",
        end="",
        file=sys.stderr,
        flush=True,
    )
