"""What several commands share: options, types of option values that click lacks, and the handling
of errors of standard output.
"""

import contextlib
import errno
import json
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

from srunddp.errors import UsageError
from srunddp.util.console import write_stderr
from srunddp.util.option_groups import GroupedCommand

# The variable that a shell sets when it asks click for completions.
COMPLETE = "_SRUNDDP_COMPLETE"
MONITOR_SECONDS = 5
LOST_LEAST = 2.0  # seconds, the least --lost-after: the kernel takes parts of it in whole seconds
_LONGEST = 1e6  # seconds, about 11.6 days
_UNITS = (3600, 60, 1)  # seconds per h, m and s, as in 1h30m5s
_CANNOT_PRINT = 74  # sysexits' EX_IOERR
# Errors of a write to a full disk, a closed descriptor or a broken device.
_WRITE_ERRORS = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)


class _Path(click.Path):
    """A path that click does not check or change, because the command does so itself. Shells can
    complete it.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path as it is written."""
        return value


FILE = _Path()
DIR = _Path(file_okay=False)
FILE.name = "FILE"
DIR.name = "DIR"


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """Type of an option whose value is a duration such as ``90``, ``90s`` or ``1h30m``.

    The duration must be at least ``least`` seconds and, if ``positive``, above 0.
    """

    name = "duration"

    def __init__(self, *, positive: bool = True, least: float = 0.0) -> None:
        self.positive = positive
        self.least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert a text to seconds, or raise click's BadParameter if it is no duration or outside
        the allowed range.
        """
        number = value if isinstance(value, float) else _duration(str(value))
        if number is None:
            self.fail(f"{value!r}; expected a duration such as 90, 90s, 5m or 1h30m", param, ctx)
        if not self.least <= number <= _LONGEST or (self.positive and not number):
            if self.least or not self.positive:
                least = f"from {shown(self.least)}"
            else:
                least = "above 0"
            self.fail(f"{value!r}; expected a duration {least} to {_LONGEST:.0f}s", param, ctx)
        return number


def _duration(text: str) -> float | None:
    # Hours, minutes and seconds are each optional, so a lookahead rejects a text that has none of
    # them, such as the empty text.
    match = re.fullmatch(
        r"(?=[\d.])(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d*)?|\.\d+)s?)?", text.strip(), re.ASCII
    )
    if match:
        return sum(
            float(part or 0) * unit for part, unit in zip(match.groups(), _UNITS, strict=True)
        )
    return None


def shown(seconds: float) -> str:
    """Write seconds as :class:`Seconds` reads them: 90.0 becomes ``1m30s``, 0.0 becomes ``0s``."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return (
        "".join(
            f"{count:g}{unit}"
            for count, unit in ((hours, "h"), (minutes, "m"), (rest, "s"))
            if count
        )
        or "0s"
    )


def limit(
    name: str, default: float | None, text: str, envvar: str | None = None, **within: Any
) -> Callable[[Any], Any]:
    """Make an option whose value is a time limit.

    Args:
        name: The option, with its dashes.
        default: Seconds; None for no default.
        text: The text for ``--help``.
        envvar: The environment variable that is read if the option is not given.
        within: The allowed range, as keyword arguments of :class:`Seconds`.
    """
    settings: dict[str, Any] = {
        "metavar": "DURATION",
        "show_default": default is not None,
        "show_envvar": True,
    }
    default_text = None if default is None else shown(default)
    return click.option(
        name, type=Seconds(**within), default=default_text, help=text, envvar=envvar, **settings
    )


# Options of the commands that take SCRIPT. click does not read SRUNDDP_IFACES: the module
# ifaces_conf does, together with the files that are used if the variable is not set.
module_option = click.option(
    "-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m."
)
ifaces_option = click.option(
    "--ifaces",
    type=FILE,
    help="The interface of each node, see man ifaces.conf. [env var: SRUNDDP_IFACES]",
)
monitor_option = click.option(
    "--monitor",
    type=Seconds(least=0.1),  # one reading takes less than a hundredth of this
    metavar="[=DURATION]",
    envvar="SRUNDDP_MONITOR",
    show_envvar=True,
    shell_complete=FILE.shell_complete,  # the word after a bare --monitor is SCRIPT
    help=(
        "Sample GPUs, CPUs, memory and network of each node for srunddp report, every 5s by"
        " default."
    ),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
logs_option = partial(
    click.option, type=DIR, default="logs", envvar="SRUNDDP_LOG_DIR", show_default=True
)


def json_text(*values: Any, indent: int | None = 2) -> str:
    """Write each value as ASCII JSON, one after another; ``indent=None`` gives one line per
    value.
    """
    return "\n".join(json.dumps(value, indent=indent) for value in values)


class MonitoredCommand(GroupedCommand):
    """Command that reads a bare ``--monitor`` as ``--monitor=5``. click alone would take the next
    word, SCRIPT, as the value of ``--monitor``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace a bare ``--monitor`` by ``--monitor=5``, then let click parse the arguments.

        Raises:
            UsageError: A duration follows a bare ``--monitor`` as the next word.
        """
        takes = {
            name
            for option in self.params
            for name in option.opts
            if not getattr(option, "is_flag", False)
        }
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] not in ("-", "--"):
            if args[place] == "--monitor":
                # After a bare --monitor, a word such as 5 would be taken as SCRIPT, but the user
                # means the duration. So this is an error, except if a file of that name exists,
                # which is then the script, or while a shell asks for completions.
                word = "".join(args[place + 1 : place + 2])
                if (
                    _duration(word) is not None
                    and not os.path.exists(word)
                    and not ctx.resilient_parsing
                ):
                    raise UsageError(
                        f"--monitor {word}",
                        expected="a script after --monitor",
                        hint=f"write --monitor={word}",
                    )
                args[place] = f"--monitor={MONITOR_SECONDS}"
            # Skip the option, and the next word too if that is the option's value.
            if args[place].replace("_", "-") in takes:
                place += 2
            else:
                place += 1
        return super().parse_args(ctx, args)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Handle errors of standard output while a command runs, also while it prints its ``--help``.

    If the output cannot be written, the command ends with one line and exit code 74. If the reader
    has closed the pipe, as ``head`` does, the command ends silently by SIGPIPE, like any other
    command; a shell shows this as 141.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # Set SIGPIPE's default effect, because Python ignores the signal. Ending by an exception
        # would not do: Python would try to write the output once more at its end.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
        os._exit(128 + signal.SIGPIPE)  # reached if SIGPIPE does not end it: pid 1 of a container
    except OSError as error:
        # Handle only errors of standard output, which have no file name.
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        why = os.strerror(error.errno)
        write_stderr(f"srunddp: error: standard output: {why}; expected one that can be written\n")
        os._exit(_CANNOT_PRINT)  # Python's own exit would try to write the output once more


def _reader_is_gone() -> bool:
    """Return whether standard output is a pipe that nobody reads any more."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)  # poll() reports POLLERR without being asked for it
    return bool(poller.poll(0))
