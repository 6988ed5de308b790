"""Run code around the import of a module, whenever the script imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType


def surround_import(
    name: str, around: Callable[[ModuleType], AbstractContextManager[None]]
) -> None:
    """Enter a context when the script begins to import a module, and leave it after the import.

    Args:
        name: The module's name. If the module is already imported, the context is entered and left
            now.
        around: A function that takes the module and returns the context.
    """
    if name in sys.modules:
        with around(sys.modules[name]):
            return
    # Insert the hook before Python's own finders, which would otherwise find the module first.
    sys.meta_path.insert(0, _OnImport(name, around))


class _OnImport:
    """An import hook that enters ``around`` before the module of this name is executed, and leaves
    it afterwards.
    """

    def __init__(
        self, name: str, around: Callable[[ModuleType], AbstractContextManager[None]]
    ) -> None:
        self.name = name
        self.around = around
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self._looking:
            return None
        # find_spec() asks all finders again, including this hook, which must then find nothing.
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec and spec.loader:
            # Replace the method of this loader object only. Each module that is read from a file
            # has a separate loader object, so no other module is affected.
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with self.around(module):
                    execute(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
