"""torch imported before the script does it: while a rank waits for others, and for the worker of the next start."""

import ast
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType

from srunddp.bootstrap.process_group import store
from srunddp.run.script import Script, prepare_path
from srunddp.supervisor.worker_process import WorkerPipe

_MATTERS = ("environ", "putenv", "affinity", "sys.path")  # in a text before the import: torch may depend on it
_HARMLESS = ("numpy", "srunddp")  # besides the standard library


def modules_before(script: Script) -> list[str] | None:
    """The packages that a file imports before torch; None where it may not import it, or may set a variable first."""
    if script.module or not script.name.endswith(".py"):
        return None
    found: list[str] = []
    with suppress(OSError, SyntaxError, ValueError):
        with open(script.name, encoding="utf-8") as file:
            source = file.read()
        for statement in ast.parse(source).body:
            text = ast.get_source_segment(source, statement) or ""
            if any(word in text for word in _MATTERS):
                return None
            for name in _imported(statement):
                if name == "torch":
                    return found
                if name not in (*sys.stdlib_module_names, *_HARMLESS) or _is_beside(script, name):
                    return None
                found += [name] if name not in sys.modules else []
    return None


def _imported(statement: ast.stmt) -> list[str]:
    names = [each.name for each in statement.names] if isinstance(statement, ast.Import) else []
    names += [statement.module] if isinstance(statement, ast.ImportFrom) and statement.module else []
    return [name.partition(".")[0] for name in names]


def _is_beside(script: Script, name: str) -> bool:
    """Whether it is a module of the user's, beside the script: what it does is not in the script's text."""
    place = os.path.join(os.path.dirname(os.path.realpath(script.name)), name)
    return name not in sys.modules and (os.path.exists(place) or os.path.exists(place + ".py"))


def run(script: Script, before: Sequence[str], variables: Mapping[str, str | None]) -> None:
    """Import torch, behind other modules and with variables that do not stay; the script's own import has any error."""
    restored = {name: os.environ.get(name) for name in variables}
    prepare_path(script)
    _set(variables)
    try:
        for name in before:
            importlib.import_module(name)
        with store.gc_frozen():
            importlib.import_module("torch.distributed")
    except Exception as error:
        store.surround_import("torch", partial(_raising, error))
    _set(restored)


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
    standby.send({"before": [name for name in _HARMLESS if name in sys.modules], "variables": variables})
    yield
