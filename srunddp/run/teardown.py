"""Show the error behind a ``destroy_process_group()`` that does not return.

Many scripts end with ``try: … finally: dist.destroy_process_group()``. If the script fails in the
middle of a collective, this call may never return. Then all other ranks wait, and nobody learns of
the error, because Python prints it only after the ``finally`` block.

srunddp only prints the error and lets the script go on, because it cannot tell whether the script
handles the error or is about to end with it. The call may also just take long, while another rank
saves.
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

# Seconds that the call may take. This is longer than it takes to destroy the groups and to create
# them again, as a script may do to handle an error.
_RETURNS_WITHIN = 10.0
_FUNCTION = "destroy_process_group"
_DEFINING_MODULE = "torch.distributed.distributed_c10d"
# The modules in which the function is replaced: the module that defines it, and the module from
# which scripts import it.
_MODULES = (_DEFINING_MODULE, "torch.distributed")


def watch(who: str, within: float = _RETURNS_WITHIN) -> None:
    """Replace ``destroy_process_group()`` by :func:`watched` in torch's modules, as soon as the
    script has imported them.

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
    """Return a function that calls ``destroy``. If it is called while an error is being handled and
    takes too long, it prints this error.

    Args:
        destroy: torch's ``destroy_process_group``.
        who, within: As for :func:`watch`.
    """

    @functools.wraps(destroy)
    def call(*args: Any, **options: Any) -> None:
        # Who destroys a group has worked with other ranks, even if they have met at a store that
        # srunddp does not know.
        telemetry.join_others()
        error = sys.exc_info()[1]
        if error is None:
            destroy(*args, **options)
            return
        timer = threading.Timer(within, _print, (error, who, within))
        timer.daemon = True  # Python does not wait for it at exit
        # Go on without the timer if its thread cannot be started, which may be the very error that
        # the script handles.
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
        # Begin on a new line, because the script may have left a line unfinished, as a progress bar
        # does.
        f"\nsrunddp: {who}: {_FUNCTION}() has not returned for {after:g} s; it was called"
        f" while this error was handled:\n{trace}",
        end="",
        file=sys.stderr,
        flush=True,
    )
