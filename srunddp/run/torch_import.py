"""torch imported ahead of the script, while a rank waits or for the next start; and how a process
with torch ends.
"""

import ctypes
import gc
import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

from srunddp.bootstrap.process_group import store
from srunddp.run.script import Script, prepare_path
from srunddp.supervisor.worker_process import WorkerPipe

_HARMLESS = ("numpy", "srunddp")  # besides the standard library
# The libraries of Python, of what srunddp imports, and of CUDA.
_NEEDS_NO_DESTRUCTOR = re.compile(
    r"/lib-dynload/|-packages/(numpy|nvidia|psutil|torchvision|yaml)(\.libs)?/|/ld-linux[^/]*$|/lib(bz2|c|crypt|crypto|cuda"
    r"|dl|expat|ffi|gcc_s|lzma|m|munge|nss_\w+|nvidia-\w+|pthread|python\w*|resolv|rt|ssl|stdc\+\+|util|uuid|z)[-.][^/]*$"
)
_DEFINITIONS = (ModuleType, FunctionType, BuiltinFunctionType, type)
_FSETLOCKING_BYCALLER = 2  # stdio_ext.h
_of_torch: set[str] = set()
ahead = False  # whether torch was imported before the script did so


def modules_before(script: Script) -> list[str] | None:
    """The packages that a file imports before torch; None where anything but such imports comes
    before it.
    """
    import ast  # most runs need none of it

    if script.module or not script.name.endswith(".py"):
        return None
    found: list[str] = []
    with suppress(OSError, SyntaxError, ValueError):
        for statement in ast.parse(Path(script.name).read_bytes()).body:
            if isinstance(statement, ast.Import):
                names = [each.name for each in statement.names]
            else:
                names = []
            if isinstance(statement, ast.ImportFrom):
                names.append(statement.module or "")
            if not names and not (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            ):
                return None
            for name in (each.partition(".")[0] for each in names):
                if name == "torch":
                    return found
                if name not in (*sys.stdlib_module_names, *_HARMLESS) or _is_beside(script, name):
                    return None
                if name not in sys.modules:
                    found.append(name)
    return None


def _is_beside(script: Script, name: str) -> bool:
    """Whether it is a module of the user's, beside the script: what it does is not in the script's
    text.
    """
    place = os.path.join(os.path.dirname(os.path.realpath(script.name)), name)
    return name not in sys.modules and (os.path.exists(place) or os.path.exists(place + ".py"))


def run(script: Script, before: Sequence[str], variables: Mapping[str, str | None]) -> None:
    """Import torch, behind other modules and with variables that do not stay; the script's own
    import has any error.
    """
    global ahead
    ahead = True
    restored = {name: os.environ.get(name) for name in variables}
    prepare_path(script)
    _set(variables)
    try:
        for name in before:
            importlib.import_module(name)
        with store.gc_frozen(), noting_libraries():
            importlib.import_module("torch.distributed")
    except Exception as error:
        store.surround_import("torch", partial(_raising, error))
    _set(restored)


@contextmanager
def noting_libraries(_: object = None) -> Iterator[None]:
    """Around torch's import: which shared libraries it loads."""
    before = _libraries()
    yield
    _of_torch.update(_libraries() - before)


def _libraries() -> set[str]:
    """The files of the shared libraries in this process."""
    try:
        with open("/proc/self/maps") as maps:
            return {line.split(maxsplit=5)[-1].rstrip() for line in maps if ".so" in line}
    except OSError:
        return {"unknown"}


def finish() -> None:
    """The last exit handler, in a process with torch."""
    if "torch" in sys.modules:
        if threading.active_count() == 1:
            _clear_main()
        else:
            # A thread may use the script's objects; Python's collector lets them go later.
            gc.unfreeze()
        _skip_destructors()


def _clear_main() -> None:
    """Let the script's objects go while what their ``__del__`` uses is there, as Python does."""
    # Its collector would do it, but torch.fx keeps frames, and with them the script's names, and
    # these are frozen.
    names = getattr(sys.modules.get("__main__"), "__dict__", {})
    for name, value in reversed(list(names.items())):
        if not (isinstance(value, _DEFINITIONS) or str(name).startswith("__")):
            names[name] = None


def _skip_destructors() -> None:
    """Let C's ``exit`` end this process at once, unless a library needs its destructors or C's exit
    handlers.

    torch's take 80 ms to undo the registration of each operator. Python's own end comes before
    that.
    """
    libc = ctypes.CDLL(None)
    others = _libraries() - _of_torch
    if all(map(_NEEDS_NO_DESTRUCTOR.search, others)) and hasattr(libc, "on_exit"):  # glibc's
        # A thread may read it.
        libc.__fsetlocking(ctypes.c_void_p.in_dll(libc, "stdin"), _FSETLOCKING_BYCALLER)
        libc.on_exit(libc._exit, None)  # handlers are called in reverse order
        libc.__cxa_atexit(libc.fflush, None, None)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _raising(error: Exception, _: ModuleType) -> Iterator[None]:
    raise error
    yield


@contextmanager
def reported(standby: WorkerPipe, environ: Mapping[str, str], _: ModuleType) -> Iterator[None]:
    """Around the script's import: what it has changed of the worker's ``environ``, and imported
    before.
    """
    names = os.environ.keys() | environ.keys()
    variables = {
        name: os.environ.get(name) for name in names if os.environ.get(name) != environ.get(name)
    }
    before = [name for name in _HARMLESS if name in sys.modules]
    yield
    standby.send({"before": before, "variables": variables})
