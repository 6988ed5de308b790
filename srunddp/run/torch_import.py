"""Import torch while this rank waits for the other ranks, so that the script later need not."""

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
from srunddp.util.import_hook import surround_import

_HARMLESS = ("numpy", "srunddp")  # may be imported early, as may the standard library
ahead = False  # whether torch was imported before the script did so


def modules_before(script: Script) -> list[str] | None:
    """Find the packages that a script imports before torch.

    Returns:
        The names of these packages, in their order, without those that are already imported. None
        if torch must not be imported early, because the script does not import it at its top, or
        first does anything other than import packages that are safe to import early.
    """
    if script.module or not script.name.endswith(".py"):
        return None
    before: list[str] = []
    # Ignore errors in the script here, because they are reported when the script runs.
    with suppress(OSError, SyntaxError, ValueError):
        for name in _first_imports(Path(script.name).read_bytes()):
            if name == "torch":
                return before
            if name not in (*sys.stdlib_module_names, *_HARMLESS) or _is_beside(script, name):
                return None
            if name not in sys.modules:
                before.append(name)
    return None


def _first_imports(text: bytes) -> Iterator[str]:
    """Yield the packages imported at the top of a file, up to the first other statement."""
    import ast  # few runs need it

    # Stop at the first statement that is no import and no docstring, because an "if" or a call may
    # do anything.
    for statement in ast.parse(text).body:
        match statement:
            case ast.Import(names=names):
                yield from (each.name.partition(".")[0] for each in names)
            case ast.ImportFrom(module=module):
                yield (module or "").partition(".")[0]
            case ast.Expr(value=ast.Constant()):  # a docstring
                pass
            case _:
                return


def _is_beside(script: Script, name: str) -> bool:
    """Return whether a module that is not imported yet is in the script's folder. Such a module
    must not be imported early, because it is the user's and may do anything.
    """
    place = os.path.join(os.path.dirname(os.path.realpath(script.name)), name)
    return name not in sys.modules and (os.path.exists(place) or os.path.exists(place + ".py"))


def run(script: Script, before: Sequence[str], variables: Mapping[str, str]) -> None:
    """Import torch. If that fails, raise the error when the script imports torch.

    Args:
        script: The script, whose folder goes first in ``sys.path``.
        before: Packages to import before torch, as the script does.
        variables: Environment variables that are set only during the import.
    """
    global ahead
    ahead = True
    before_import = {name: os.environ.get(name) for name in variables}
    prepare_path(script)
    os.environ.update(variables)
    try:
        for name in before:
            importlib.import_module(name)
        with store.gc_frozen():
            importlib.import_module("torch.distributed")
    except Exception as error:
        surround_import("torch", partial(_raising, error))
    # Restore the variables, for the script and the processes that it starts.
    for name, value in before_import.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@contextmanager
def _raising(error: Exception, _: ModuleType) -> Iterator[None]:
    raise error
    # This yield is never reached. It makes the function a generator, which contextmanager() needs.
    yield
