"""The command line ``srunddp [COMMAND] …``. Each command is in the package of the same name, which
is imported only if the command is used.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from srunddp._version import __version__
from srunddp.errors import SrunddpError, UsageError, did_you_mean, one_of
from srunddp.util.click_types import COMPLETE, answering
from srunddp.util.console import write_stderr

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_GROUPS = ("ifaces", "stage")
_COMMANDS = (
    "check",
    "completion",
    "explain",
    "ifaces",
    "report",
    "run",
    "sbatch",
    "stage",
    "triage",
)
_HELP = ("-h", "--help")
_PAGE = """\
Usage: srunddp [run] [OPTIONS] SCRIPT [ARGUMENTS]...
       srunddp COMMAND [OPTIONS] ...

Launch a PyTorch training script on a Slurm or MPI cluster, one process per GPU:

  srun --ntasks-per-node=8 srunddp train.py
  mpirun -n 8 srunddp train.py

Before a job:
  ifaces scan   Draft ifaces.conf from what the nodes reach.
  ifaces check  Validate ifaces.conf.
  ifaces show   What ifaces.conf gives a node, and why.
  check         Look at all nodes without starting SCRIPT.
  explain       What was chosen on each rank, and why.

Job scripts:
  sbatch        Write or submit a Slurm job.
  stage         Bring an environment to nodes that lack it.

The job:
  run           Run SCRIPT as one rank (the default).

After a job:
  report        Where the time went.
  triage        What failed first.

Other:
  help COMMAND  The options of a command, as srunddp COMMAND --help.
  completion    The script for tab completion in bash, zsh or fish.
  --version     Print the version.
"""


class _RunByDefault(click.Group):
    """Runs ``srunddp train.py`` as ``srunddp run train.py``. An error is printed as one line, and
    sets a fixed exit code.

    Attributes:
        command_words: The words of the command line that name the command, for error messages.
    """

    command_words: Sequence[str] = ("run",)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, without importing any."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command and return it; return None if no command has this name."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"srunddp.{cmd_name}.cli")
        # bin/srunddp disables the garbage collector for the imports. Without freeze() the collector
        # would traverse all imported objects as soon as it is enabled again.
        gc.freeze()
        gc.enable()
        return cast(click.Command, getattr(module, cmd_name))

    def get_help(self, ctx: click.Context) -> str:
        """Return the text of ``srunddp --help``."""
        return _PAGE.rstrip()

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the commands that match, and the files that match, because a script may follow
        ``srunddp`` directly.
        """
        # Imported here: only completion needs these modules, and they would delay every start.
        import glob

        from click.shell_completion import CompletionItem

        rows = dict(re.findall(r"^  (\w+)(?: \w+)? {2,}(.+)$", _PAGE, re.MULTILINE))
        found = [
            CompletionItem(name, help=text)
            for name, text in rows.items()
            if name.startswith(incomplete)
        ]
        # Add files here, because bash adds them by itself only if there are no proposals.
        if found and self.command_words != ["help"]:
            for name in sorted(glob.glob(f"{glob.escape(incomplete)}*")):
                found.append(CompletionItem(f"{name}/" if os.path.isdir(name) else name))
        return found or [CompletionItem(incomplete, type="file")]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``run`` before a command line that does not begin with a command.

        Args:
            ctx: click's context.
            args: The words of the command line.

        Raises:
            UsageError: The first word resembles a command's name and is no file.
        """
        # While a shell asks for completions, report no error: the last word may be incomplete.
        if ctx.resilient_parsing:
            self.command_words = args[:1]
            known = ("help", *_COMMANDS, *_HELP, "--version")
            if args and args[0] not in known:
                args = ["run", *args]
            return super().parse_args(ctx, args)
        if not args:
            write_stderr(_PAGE)
            ctx.exit(UsageError.exit_code)
        if args[0] == "help":
            words = [word for word in args[1:] if word not in (*_HELP, "help")]
            if words and words[0] not in _COMMANDS:
                raise UsageError(
                    f"no command {words[0]!r}",
                    expected=one_of(_COMMANDS),
                    hint=_nearest(words[0]) or "see srunddp --help",
                )
            args = [*_command(words), "--help"]
        elif args[0] not in (*_COMMANDS, *_HELP, "--version"):
            if _may_be_a_command(args[0]):
                raise UsageError(
                    f"no command and no file {args[0]!r}",
                    expected=one_of(_COMMANDS),
                    hint=_nearest(args[0]),
                )
            args = ["run", *args]
        self.command_words = _command(args)
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the words up to the command's name, and print ``--help`` if it is given."""
        with answering():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, as click does."""
        with answering():
            return super().invoke(ctx)

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run the command line, and exit.

        Args:
            args: Arguments of click's ``main``.
            extra: Keyword arguments of click's ``main``.
        """
        # The import registers srunddp's completion classes before click looks for one.
        if COMPLETE in os.environ:
            importlib.import_module("srunddp.completion.cli")
        try:
            # In standalone mode click would print errors in its own words and choose the exit code.
            sys.exit(super().main(*args, **{**extra, "standalone_mode": False}))
        except click.UsageError as refused:
            from srunddp.util.usage_errors import usage_error

            error: SrunddpError = usage_error(refused, " ".join(self.command_words))
        except click.Abort:
            # 128 + SIGINT, as shells report it after Ctrl-C.
            sys.exit(130)
        except SrunddpError as raised:
            error = raised
        write_stderr(f"srunddp: error: {error}\n")
        sys.exit(error.exit_code)


def _command(words: Sequence[str]) -> Sequence[str]:
    """Return the leading words of a command line that name the command: two for ``ifaces`` and
    ``stage``, else one; empty for an empty command line.
    """
    if words and words[0] in _GROUPS:
        return words[:2]
    return words[:1]


def _nearest(word: str) -> str:
    return did_you_mean(word, [*_COMMANDS, "help", "--version"])


def _may_be_a_command(word: str) -> bool:
    """Return whether a word resembles a command's name and no file has that name.

    The name of a launcher, such as torchrun, is excluded, because ``run`` has a message for it.
    """
    # Imported here, because run's modules take longer to import than all that this module needs.
    from srunddp.run.script import LAUNCHERS

    return (
        word.isidentifier()
        and not os.path.lexists(word)
        and bool(_nearest(word))
        and word not in LAUNCHERS
    )


@click.group(
    cls=_RunByDefault,
    context_settings={
        "help_option_names": [*_HELP],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
@click.version_option(__version__, prog_name="srunddp")
def main() -> None:
    """Launch a PyTorch training script on a Slurm or MPI cluster, one process per GPU."""
