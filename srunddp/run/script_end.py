"""The worker's last step, when the script and its exit handlers have ended."""

from __future__ import annotations

import gc
import sys
import threading
from types import BuiltinFunctionType, FunctionType, ModuleType

_DEFINITIONS = (ModuleType, FunctionType, BuiltinFunctionType, type)


def release_objects() -> None:
    """Drop the script's objects while everything that their ``__del__`` may use still exists.

    This runs as the last exit handler. Normally Python's garbage collector does it when the
    interpreter ends. With torch it cannot: torch.fx keeps references to frames, and with them to
    the script's names, and torch's modules are frozen (see
    :func:`srunddp.bootstrap.process_group.store.gc_frozen`), so the collector skips them.
    """
    if "torch" not in sys.modules:
        return
    if threading.active_count() > 1:
        # A thread may still use the script's objects; let Python's collector drop them later.
        gc.unfreeze()
        return
    names = getattr(sys.modules.get("__main__"), "__dict__", {})
    # In reverse order of definition: an object's __del__ may use objects defined before it.
    for name, value in reversed(list(names.items())):
        if not (isinstance(value, _DEFINITIONS) or str(name).startswith("__")):
            names[name] = None
