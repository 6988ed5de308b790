"""Watch ``destroy_process_group()`` while the script handles an error.

Many scripts end by ``try: … finally: dist.destroy_process_group()``. After an error in the middle
of a collective that call may never return, and then nobody learns of the error: Python prints it
only when the stack has unwound. All other ranks wait meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from srunddp.util.import_hook import surround_import

# Called with the error that is being handled, and with the seconds since the call began.
Report = Callable[[BaseException, float], None]

# Seconds. A script may also handle the error by destroying the groups and making them anew, which
# takes less.
_RETURNS_WITHIN = 10.0
_FUNCTION = "destroy_process_group"
_DEFINING_MODULE = "torch.distributed.distributed_c10d"
# Modules that have the function under its name: the one that defines it, and the one from which
# scripts take it.
_MODULES = (_DEFINING_MODULE, "torch.distributed")


def watch(report: Report, within: float = _RETURNS_WITHIN) -> None:
    """Call ``report`` when ``destroy_process_group()`` does not return while an error is handled.

    Args:
        report: Is called in a thread of its own, while the call goes on.
        within: Seconds that the call may take.
    """

    @contextlib.contextmanager
    def around(defining: ModuleType) -> Iterator[None]:
        yield
        stock = getattr(defining, _FUNCTION)
        replacement = watched(stock, report, within)
        for name in _MODULES:
            module = sys.modules.get(name)
            if getattr(module, _FUNCTION, None) is stock:
                setattr(module, _FUNCTION, replacement)

    surround_import(_DEFINING_MODULE, around)


def watched(destroy: Callable[..., object], report: Report, within: float) -> Callable[..., None]:
    """Return a function that calls ``destroy``, and ``report`` if that takes too long while an
    error is handled.

    Args:
        destroy: torch's ``destroy_process_group``.
        report, within: As for :func:`watch`.
    """

    @functools.wraps(destroy)
    def call(*args: Any, **options: Any) -> None:
        error = sys.exc_info()[1]
        if error is None:
            destroy(*args, **options)
            return
        timer = threading.Timer(within, report, (error, within))
        timer.daemon = True  # Python's end does not wait for it
        timer.start()
        try:
            destroy(*args, **options)
        finally:
            timer.cancel()

    return call
