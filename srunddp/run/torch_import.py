"""torch imported ahead of the script, while a rank waits for the others."""

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

_HARMLESS = ("numpy", "srunddp")  # besides the standard library
ahead = False  # whether torch was imported before the script did so


def modules_before(script: Script) -> list[str] | None:
    """Find the packages that a script imports before torch.

    Returns:
        Those that are not imported yet; None where the file does not import torch, or does anything
        before that besides importing packages that change nothing.
    """
    if script.module or not script.name.endswith(".py"):
        return None
    before: list[str] = []
    # An error in the script's text is left for the run, which reports it.
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
    """The packages of the imports at the top of a file, until it does something else."""
    import ast  # most runs need none of it

    # Only what stands at the top of the file runs before torch is imported there; an "if" or a call
    # may do anything.
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
    """Whether it is a module of the user's, beside the script: what it does is not in the script's
    text.
    """
    place = os.path.join(os.path.dirname(os.path.realpath(script.name)), name)
    return name not in sys.modules and (os.path.exists(place) or os.path.exists(place + ".py"))


def run(script: Script, before: Sequence[str], variables: Mapping[str, str]) -> None:
    """Import torch. An error of the import is raised where the script imports torch.

    Args:
        script: The script, from whose folder modules are imported.
        before: Packages to import before torch, as the script does.
        variables: Environment variables that are set during the import alone.
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
        store.surround_import("torch", partial(_raising, error))
    # The script, and what it starts, are to see the variables as they were.
    for name, value in before_import.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@contextmanager
def _raising(error: Exception, _: ModuleType) -> Iterator[None]:
    raise error
    # Never reached: it makes this a generator, which contextmanager() needs.
    yield
