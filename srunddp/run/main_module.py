"""Run code as ``__main__`` as Python's own command line does.

Python keeps the module ``__main__`` until the process ends, so that threads, exit handlers and
pickle still find the script's functions there after the script's last line. The public functions of
runpy cannot be used, because they put the previous module back after the last line.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import types
import zipimport
from importlib.machinery import SourceFileLoader, SourcelessFileLoader

FRAMES_OF = (__file__, runpy.__file__, "<frozen ")  # files whose frames lie above the script's


def run_file(name: str) -> None:
    """Run what ``python NAME`` runs: a script, compiled code, or a folder or archive with a
    ``__main__.py``.
    """
    main = _start_main_module()
    if is_folder_or_archive(name):
        _run_module("__main__", alter_argv=False)
        return
    # Make the path absolute, as Python does, so that a script that changes its working directory
    # still finds its folder by __file__.
    path = os.path.join(os.getcwd(), name)
    main.__file__ = path
    if path.endswith(".pyc"):
        compiled = SourcelessFileLoader("__main__", path)
        main.__loader__ = compiled
        code = compiled.get_code("__main__")
        assert code is not None
    else:
        main.__loader__ = SourceFileLoader("__main__", path)
        with io.open_code(path) as source:
            # dont_inherit keeps this module's own __future__ imports from affecting the script.
            code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def run_module(name: str) -> None:
    """Run what ``python -m NAME`` runs, and set ``sys.argv[0]`` to the module's file.

    Raises:
        SystemExit: There is no such module. runpy raises it, with a text. All frames of its
            traceback are in the files of :data:`FRAMES_OF`, which is not so for a SystemExit that
            the module itself raises.
    """
    _start_main_module()
    _run_module(name, alter_argv=True)


def is_folder_or_archive(name: str) -> bool:
    """Return whether a path is a folder or a zip archive. Python puts such a path into ``sys.path``
    and runs the ``__main__`` in it.
    """
    if os.path.isdir(name):
        return True
    # Do not look into anything but a regular file: a shell's <(...) is a pipe, and reading it here
    # would consume the script.
    if not os.path.isfile(name):
        return False
    try:
        zipimport.zipimporter(name)
    except zipimport.ZipImportError:
        return False
    return True


def _start_main_module() -> types.ModuleType:
    replaced = sys.modules["__main__"]
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __cached__=None)
    # Python 3.14 and newer create this dictionary only on access.
    if "__annotations__" in vars(replaced):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _run_module(name: str, *, alter_argv: bool) -> None:
    # This function is private, but it is the one that Python's own command line calls.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]
