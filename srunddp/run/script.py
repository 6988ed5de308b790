"""Run the user's script or module as Python itself would, and tell how it ended."""

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
import types
from dataclasses import dataclass

from srunddp.errors import ConfigError, Scope, SrunddpError, Stopped

LAUNCHERS = {
    **dict.fromkeys(
        ("torchrun", "accelerate", "deepspeed"), "leave it out, as srun or mpirun starts the ranks"
    ),
    **dict.fromkeys(("srun", "mpirun", "mpiexec"), "it comes before srunddp"),
}


@dataclass(frozen=True)
class Script:
    """What to run.

    ``name`` is a file or, with ``module``, the name of a module; ``arguments`` are passed to the
    script.
    """

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The words that follow ``python`` on an equivalent command line."""
        return (*(("-m",) if self.module else ()), self.name, *self.arguments)


def check(script: Script) -> None:
    """Check, before anything starts, that the script can be run.

    Raises:
        ConfigError: The file, the module or the working directory does not exist, or the file
            cannot be read.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working folder has been deleted",
            expected="a folder that is there",
            hint="start in one that all nodes see",
            scope=Scope.NODE,
        ) from None
    if (
        problem := _module_problem(script.name, folder)
        if script.module
        else _file_problem(script.name, folder)
    ):
        raise ConfigError(problem[0], expected="a script to run", hint=problem[1], scope=Scope.NODE)


def _file_problem(name: str, folder: str) -> tuple[str, str] | None:
    """Return what is wrong and a hint; None if the file can be run."""
    if os.path.isdir(name):
        if os.path.exists(os.path.join(name, "__main__.py")):
            return None
        return f"{name} is a folder without __main__.py", "name the script in it"
    if not os.path.exists(name):  # not isfile: a shell's <(...) is a pipe
        if re.fullmatch(r"python[\d.]*", name):
            hint = f"leave {name} out: srunddp runs the script in its own Python"
            return f"no file {name} in {folder}", hint
        if name in LAUNCHERS:
            return (
                f"no file {name} in {folder}",
                f"{LAUNCHERS[name]}: srun --ntasks-per-node=8 srunddp train.py",
            )
        if os.path.isabs(name):
            place = ""
        else:
            place = f" in {folder}"
        return (
            f"no file {name}{place}",
            f"{_nearest(name)}correct the path; all nodes must see the file",
        )
    if os.access(name, os.R_OK):
        return None
    return (f"{name} may not be read", "correct its permissions")


def _nearest(name: str) -> str:
    """Return a hint with a similar file name from the same folder; empty if there is none."""
    import difflib

    folder, base = os.path.split(name)
    with contextlib.suppress(OSError):
        near = difflib.get_close_matches(
            base, [each.name for each in os.scandir(folder or ".") if each.is_file()], 1
        )
        return "".join(f"did you mean {os.path.join(folder, each)}? Else " for each in near)
    return ""


def _module_problem(name: str, folder: str) -> tuple[str, str] | None:
    package = name.split(".")[0]
    found = None
    sys.path.insert(0, folder)
    with contextlib.suppress(ValueError):  # it has no spec, as __main__
        # Look for the top package only: to find a.b, importlib would import a and so run user code.
        found = importlib.util.find_spec(package)
    sys.path.pop(0)
    if found:
        return None
    return (f"no module {package!r}", "correct the name after -m, or install it")


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended.

    Attributes:
        code: The exit code that Python would give.
        error: The exception that ended the script; None if the script ran to its end.
        trace: The error's traceback without the frames above the script.
    """

    code: int
    error: BaseException | None = None
    trace: types.TracebackType | None = None


def run(script: Script) -> ScriptResult:
    """Run the script as ``__main__`` in this process.

    Returns:
        How the script ended. An exception of the script is part of the result and is not raised.
    """
    for stream in (sys.stdout, sys.stderr):
        # Python writes to a file or a pipe in blocks. When a rank is killed, its last block would
        # be lost.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    sys.argv = [script.name, *script.arguments]
    prepare_path(script)
    try:
        if script.module:
            # alter_sys sets sys.argv[0] to the module's file, as python -m does.
            runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        else:
            _run_file(script.name)
    except SrunddpError as error:
        return ScriptResult(error.exit_code, error)
    except SystemExit as end:
        if isinstance(end.code, int):
            # The kernel keeps only the low 8 bits of an exit code.
            return ScriptResult(end.code & 0xFF, end)
        # Python's rule: None means success, and any other object is printed and gives exit code 1.
        return ScriptResult(0 if end.code is None else 1, end)
    except BaseException as error:
        # The traceback has no frame of the module, so runpy did not find it.
        if script.module and isinstance(error, ImportError) and _theirs(error) is None:
            wrong = ConfigError(
                str(error), expected="a module to run", hint="correct the name after -m"
            )
            return ScriptResult(wrong.exit_code, wrong)
        error.__traceback__ = _without_us(error)
        # 130 is what a shell reports for SIGINT, by which Python ends after a KeyboardInterrupt.
        return ScriptResult(
            130 if isinstance(error, KeyboardInterrupt) else 1, error, error.__traceback__
        )
    return ScriptResult(0)


def prepare_path(script: Script) -> None:
    """Put the script's folder first in ``sys.path``, instead of the folder of ``srunddp``."""
    # With -P (safe_path) Python adds no folder, so the first entry must stay.
    if not sys.flags.safe_path:
        if script.module:
            sys.path[0] = os.getcwd()
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(script.name))


def _run_file(name: str) -> None:
    path = os.path.abspath(name)
    if os.path.isdir(path) or _is_archive(path):
        runpy.run_path(name, run_name="__main__")
        return
    # runpy would leave __file__ relative. A script that changes its working directory could not
    # find its own folder any more.
    main = types.ModuleType("__main__")
    main.__file__ = path
    # pickle and multiprocessing look up the script's functions and classes in this module.
    sys.modules["__main__"] = main
    with io.open_code(path) as source:
        # dont_inherit keeps this module's own __future__ imports from affecting the script.
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _is_archive(path: str) -> bool:
    # A shell's <(...) is a pipe: is_zipfile() would consume the bytes that the script is to be read
    # from.
    if path.endswith(".py") or not os.path.isfile(path):
        return False
    import zipfile

    return zipfile.is_zipfile(path)


def _without_us(error: BaseException) -> types.TracebackType | None:
    """Return the traceback without the frames above the script, which tell its author nothing.

    If all frames are above the script, all are kept.
    """
    theirs = _theirs(error)
    if theirs or isinstance(error, SyntaxError):
        return theirs
    return error.__traceback__


def _theirs(error: BaseException) -> types.TracebackType | None:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith(
        (__file__, runpy.__file__, "<frozen ")
    ):
        trace = trace.tb_next
    return trace


def print_result(ending: ScriptResult) -> None:
    """Print to standard error what Python would: a traceback, or what was given to ``sys.exit``.

    For srunddp's own errors, print a single line instead of a traceback.
    """
    error = ending.error
    if isinstance(error, SrunddpError):
        print(f"srunddp: error: {error}", file=sys.stderr)
    elif isinstance(error, Stopped):
        print(f"srunddp: {error} (exit code {error.code})", file=sys.stderr)
    elif isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, ending.trace)
