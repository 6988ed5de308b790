"""torch imported ahead of the script, while a rank waits or for the next start; and how a process with torch ends."""

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType

from srunddp.bootstrap.process_group import store
from srunddp.run.script import Script, prepare_path
from srunddp.supervisor.worker_process import WorkerPipe

_HARMLESS = ("numpy", "srunddp")  # besides the standard library
_COMPILED = {"numpy", "yaml", "psutil", "mpi4py"}  # nobody misses what their libraries do when the process ends
ahead = False  # whether torch was imported before the script did so


def modules_before(script: Script) -> list[str] | None:
    """The packages that a file imports before torch; None where anything but such imports comes before it."""
    import ast  # most runs need none of it

    if script.module or not script.name.endswith(".py"):
        return None
    found: list[str] = []
    with suppress(OSError, SyntaxError, ValueError):
        for statement in ast.parse(Path(script.name).read_bytes()).body:
            names = [each.name for each in statement.names] if isinstance(statement, ast.Import) else []
            names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            if not names and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                return None
            for name in (each.partition(".")[0] for each in names):
                if name == "torch":
                    return found
                if name not in (*sys.stdlib_module_names, *_HARMLESS) or _is_beside(script, name):
                    return None
                found += [name] if name not in sys.modules else []
    return None


def _is_beside(script: Script, name: str) -> bool:
    """Whether it is a module of the user's, beside the script: what it does is not in the script's text."""
    place = os.path.join(os.path.dirname(os.path.realpath(script.name)), name)
    return name not in sys.modules and (os.path.exists(place) or os.path.exists(place + ".py"))


def run(script: Script, before: Sequence[str], variables: Mapping[str, str | None]) -> None:
    """Import torch, behind other modules and with variables that do not stay; the script's own import has any error."""
    global ahead
    ahead, restored = True, {name: os.environ.get(name) for name in variables}
    prepare_path(script)
    _set(variables)
    try:
        for name in before:
            importlib.import_module(name)
        with store.gc_frozen(), without_destructors():
            importlib.import_module("torch.distributed")
    except Exception as error:
        store.surround_import("torch", partial(_raising, error))
    _set(restored)


@contextmanager
def without_destructors(_: object = None) -> Iterator[None]:
    """Around torch's import: let C's ``exit`` end the process before the static destructors of what is loaded by then.

    torch's destructors take 80 ms to undo the registration of each operator. Python's own end comes before them, and so
    do the exit handlers of libraries that are loaded later. Those of a library that was loaded before torch would be
    lost: with one of the script's, or with ``LD_PRELOAD``, all destructors run.
    """
    before = _compiled_packages()
    yield
    libc = ctypes.CDLL(None)
    if before <= _COMPILED and "LD_PRELOAD" not in os.environ and hasattr(libc, "on_exit"):  # glibc's
        libc.on_exit(libc._exit, None)  # handlers are called in reverse order
        libc.__cxa_atexit(libc.fflush, None, None)


def _compiled_packages() -> set[str]:
    """The packages with a shared library of their own that have been imported, but for Python's."""
    files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
    return {name.partition(".")[0] for name, file in files.items() if file.endswith(".so")} - sys.stdlib_module_names


def clear_main() -> None:
    """At the end, let the script's objects go while what their ``__del__`` uses is there, as Python does."""
    # Its collector would do it, but torch.fx keeps frames, and with them the script's names, and these are frozen.
    names = vars(sys.modules["__main__"])
    for name in reversed([name for name in names if not name.startswith("__")]):
        names[name] = None


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
    """Around the script's import: what it has changed of the worker's ``environ``, and imported before."""
    names = os.environ.keys() | environ.keys()
    variables = {name: os.environ.get(name) for name in names if os.environ.get(name) != environ.get(name)}
    before = [name for name in _HARMLESS if name in sys.modules]
    yield
    standby.send({"before": before, "variables": variables})
