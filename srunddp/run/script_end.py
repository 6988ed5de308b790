"""What is left to do when the script and its exit handlers have ended, in a process with torch."""

from __future__ import annotations

import gc
import sys
import threading
from types import BuiltinFunctionType, FunctionType, ModuleType

_DEFINITIONS = (ModuleType, FunctionType, BuiltinFunctionType, type)


def release_objects() -> None:
    """Let the script's objects go while what their ``__del__`` uses is there, as Python does.

    It is the last exit handler. Python's collector would do it at the interpreter's end. But
    torch.fx keeps frames, and with them the script's names, and torch's modules are frozen (see
    :func:`srunddp.bootstrap.process_group.store.gc_frozen`): the collector does not look at them.
    """
    if "torch" not in sys.modules:
        return
    if threading.active_count() > 1:
        # A thread may use the script's objects; Python's collector lets them go later.
        gc.unfreeze()
        return
    names = getattr(sys.modules.get("__main__"), "__dict__", {})
    # The latest first: its __del__ may use what was named before it.
    for name, value in reversed(list(names.items())):
        if not (isinstance(value, _DEFINITIONS) or str(name).startswith("__")):
            names[name] = None
