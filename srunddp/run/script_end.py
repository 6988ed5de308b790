"""What a worker does last, after the script and the script's exit handlers have ended."""

from __future__ import annotations

import gc
import sys
import threading
from types import BuiltinFunctionType, FunctionType, ModuleType

_DEFINITIONS = (ModuleType, FunctionType, BuiltinFunctionType, type)


def release_objects() -> None:
    """Drop the script's objects while everything that their ``__del__`` may use still exists.

    This runs as the last exit handler. Without torch it is not needed, because Python's garbage
    collector drops the objects when the interpreter ends. With torch the collector does not find
    them: torch.fx keeps references to frames, and through these to the script's names, and the
    collector skips torch's modules, which are frozen (see
    :func:`srunddp.bootstrap.process_group.store.gc_frozen`).
    """
    if "torch" not in sys.modules:
        return
    if threading.active_count() > 1:
        # A thread may still use the script's objects; let Python's collector drop them later.
        gc.unfreeze()
        return
    names = getattr(sys.modules.get("__main__"), "__dict__", {})
    # Drop the objects in reverse order of their definition, because the __del__ of an object may
    # use objects that were defined before it.
    for name, value in reversed(list(names.items())):
        if not (isinstance(value, _DEFINITIONS) or str(name).startswith("__")):
            names[name] = None
