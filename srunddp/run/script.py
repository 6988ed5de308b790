"""Run the user's script or module as Python itself would, and tell how it ended."""

import contextlib
import importlib.util
import io
import os
import re
import sys
import types

from srunddp.errors import ConfigError, Scope, SrunddpError, Stopped
from srunddp.run import main_module
from srunddp.util.quick_dataclass import dataclass

LAUNCHERS = {
    **dict.fromkeys(
        ("torchrun", "accelerate", "deepspeed"), "leave it out, as srun or mpirun starts the ranks"
    ),
    **dict.fromkeys(("srun", "mpirun", "mpiexec"), "it comes before srunddp"),
}


@dataclass(frozen=True)
class Script:
    """The user's script or module.

    Attributes:
        name: The path of a file, folder or archive or, with ``module``, the name of a module.
        arguments: The arguments that the script gets.
        module: Whether to run a module, as ``python -m`` does.
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
            expected="a folder that exists",
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
    """Return what is wrong with a file as a script, and a hint; None if it can be run."""
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
    """Return the beginning of a hint with a similar file name from the same folder; empty if there
    is none.
    """
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
    with contextlib.suppress(ValueError):  # a module without a spec, such as __main__
        # Look only for the top package: to find a.b, importlib would import a, which runs code of
        # the user too early.
        found = importlib.util.find_spec(package)
    sys.path.pop(0)
    if found:
        return None
    return (f"no module {package!r}", "correct the name after -m, or install it")


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended.

    Attributes:
        code: The exit code with which Python would end.
        error: The exception that ended the script; None if the script ran to its end.
        trace: The error's traceback without the frames above the script; None if there is no error,
            or if the traceback is not to be printed.
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
    # A script that uses sys.orig_argv to start itself again must not start srunddp in a rank.
    sys.orig_argv = [*_python_and_options(), *script.words]
    sys.argv = [script.name, *script.arguments]
    prepare_path(script)
    try:
        if script.module:
            main_module.run_module(script.name)
        else:
            main_module.run_file(script.name)
    except SrunddpError as error:
        return result_of(error)
    except SystemExit as end:
        # If the traceback has no frame of the module, runpy has raised the SystemExit, because it
        # did not find the module.
        if script.module and _script_frames(end) is None:
            wrong = ConfigError(
                str(end.code).removeprefix(f"{sys.executable}: "),
                expected="a module to run",
                hint="correct the name after -m",
            )
            return ScriptResult(wrong.exit_code, wrong)
        return result_of(end)
    except BaseException as error:
        result = result_of(error)
        error.__traceback__ = result.trace
        return result
    return ScriptResult(0)


def result_of(error: BaseException) -> ScriptResult:
    """Return the result of a script that ends with this exception."""
    if isinstance(error, SrunddpError):
        return ScriptResult(error.exit_code, error)
    if isinstance(error, SystemExit):
        return ScriptResult(_exit_code(error), error)
    # 130 is what a shell reports for SIGINT, by which Python ends after a KeyboardInterrupt.
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    return ScriptResult(code, error, _without_own_frames(error))


def _python_and_options() -> list[str]:
    """Return the words of this process's command line before ``bin/srunddp``, ``-m srunddp`` or
    ``-c CODE``.
    """
    words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    if len(words) > 2 and words[-2] in ("-m", "-c"):
        return words[:-2]
    return words[:-1]


def _exit_code(end: SystemExit) -> int:
    """Return the exit code that Python gives for the argument of ``sys.exit``."""
    if end.code is None:
        return 0
    if not isinstance(end.code, int):  # Python prints any other value, and ends with 1
        return 1
    # The kernel keeps the low 8 bits of an exit code. For a number that does not fit into C's long,
    # Python uses -1.
    if -(2**63) <= end.code < 2**63:
        return end.code & 0xFF
    return 0xFF


def prepare_path(script: Script) -> None:
    """Put the folder from which the script imports modules first in ``sys.path``, as Python does.
    There it replaces the folder of the command ``srunddp``.
    """
    if script.module:
        folder = os.getcwd()
    elif main_module.is_folder_or_archive(script.name):
        folder = os.path.join(os.getcwd(), script.name)
        if sys.flags.safe_path:  # even then, Python must find the folder's __main__.py
            sys.path.insert(0, folder)
    else:
        folder = os.path.dirname(os.path.realpath(script.name))
    # With -P (safe_path) Python has put no folder into sys.path, so the first entry must stay.
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _without_own_frames(error: BaseException) -> types.TracebackType | None:
    """Return the traceback without the frames above the script, which tell its author nothing.

    If no frame is of the script, all frames are kept; for a SyntaxError none are, because the error
    itself names the file and the line.
    """
    theirs = _script_frames(error)
    if theirs or isinstance(error, SyntaxError):
        return theirs
    return error.__traceback__


def _script_frames(error: BaseException) -> types.TracebackType | None:
    trace = error.__traceback__
    ours = (__file__, *main_module.FRAMES_OF)
    while trace and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def print_result(ending: ScriptResult) -> None:
    """Print to standard error what Python would print about the end of a script: a traceback, or
    the text that was given to ``sys.exit``.

    For an error of srunddp, print a single line instead of a traceback.
    """
    error = ending.error
    if isinstance(error, SrunddpError):
        _print_error(f"srunddp: error: {error}")
    elif isinstance(error, Stopped):
        _print_error(f"srunddp: {error} (exit code {error.code})")
    elif isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            _print_error(error.code)
    elif error is not None:
        sys.excepthook(type(error), error, ending.trace)


def _print_error(text: object) -> None:
    # If sys.stderr is None, print() would write to standard output.
    if sys.stderr is not None:
        print(text, file=sys.stderr)
