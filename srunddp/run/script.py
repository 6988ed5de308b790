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
    """What to run: a file, or with ``module`` a module's name; and its arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """As on the command line."""
        return (*(("-m",) if self.module else ()), self.name, *self.arguments)


def check(script: Script) -> None:
    """Refuse, before anything starts, a script that cannot be run.

    Raises:
        ConfigError: there is no such file, no such module, or no working folder.
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
    """What was found, and the hint; None for a file that can be run."""
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
    """A file of the same folder with nearly this name, as a hint."""
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
        # Not the whole name: to find a.b, importlib would import a, and with it run code of the
        # user's.
        found = importlib.util.find_spec(package)
    sys.path.pop(0)
    if found:
        return None
    return (f"no module {package!r}", "correct the name after -m, or install it")


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended.

    Attributes:
        code: its exit code, as Python would have it.
        error: what ended it, where it did not simply run to its end; trace: without the frames
            above the script.
    """

    code: int
    error: BaseException | None = None
    trace: types.TracebackType | None = None


def run(script: Script) -> ScriptResult:
    """Run it as ``__main__``, in this process.

    Returns:
        How it ended. Whatever it raised is told there, and not raised here.
    """
    for stream in (sys.stdout, sys.stderr):
        # To a file or a pipe Python writes in blocks, and the last of them would be lost with a
        # killed rank.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    sys.argv = [script.name, *script.arguments]
    prepare_path(script)
    try:
        if script.module:
            # With alter_sys sys.argv[0] becomes the module's file, as under python -m.
            runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        else:
            _run_file(script.name)
    except SrunddpError as error:
        return ScriptResult(error.exit_code, error)
    except SystemExit as end:
        if isinstance(end.code, int):
            # As the kernel does, which keeps the low 8 bits of an exit code.
            return ScriptResult(end.code & 0xFF, end)
        # As Python does: None is success, and anything else is printed.
        return ScriptResult(0 if end.code is None else 1, end)
    except BaseException as error:
        # No frame of the module's own: runpy has not found it, and it has not begun.
        if script.module and isinstance(error, ImportError) and _theirs(error) is None:
            wrong = ConfigError(
                str(error), expected="a module to run", hint="correct the name after -m"
            )
            return ScriptResult(wrong.exit_code, wrong)
        error.__traceback__ = _without_us(error)
        # 130 is a shell's code for SIGINT, by which Python itself ends after a KeyboardInterrupt.
        return ScriptResult(
            130 if isinstance(error, KeyboardInterrupt) else 1, error, error.__traceback__
        )
    return ScriptResult(0)


def prepare_path(script: Script) -> None:
    """Let the script find its own neighbours where Python found the launcher, in bin/."""
    # With -P Python puts no folder there, and the first entry is another one.
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
    # runpy would leave __file__ relative, and a script that changes its folder would not find its
    # own.
    main = types.ModuleType("__main__")
    main.__file__ = path
    # pickle and multiprocessing look there for the functions and classes of the script.
    sys.modules["__main__"] = main
    with io.open_code(path) as source:
        # Without the __future__ imports of this module.
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _is_archive(path: str) -> bool:
    # A shell's <(...) is a pipe: to look for an archive in it would take away what the script is
    # read from.
    if path.endswith(".py") or not os.path.isfile(path):
        return False
    import zipfile

    return zipfile.is_zipfile(path)


def _without_us(error: BaseException) -> types.TracebackType | None:
    """Leave out the frames above the script, which tell its author nothing; not where they are all
    there is.
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
    """Print on standard error what Python would: a traceback, or what was given to ``sys.exit``.

    An error of srunddp's is its line instead.
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
