"""The command line ``srunddp [COMMAND] …``: each command is in the package of its name, and imported when asked for."""

from __future__ import annotations

import importlib
from typing import cast

import click

from srunddp._version import __version__

_COMMANDS = ("check", "explain", "ifaces", "report", "run", "sbatch", "stage", "triage")


class _RunByDefault(click.Group):
    """``srunddp train.py`` means ``srunddp run train.py``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return cast(click.Command, getattr(importlib.import_module(f"srunddp.{cmd_name}.cli"), cmd_name))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in _COMMANDS and args[0] != "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RunByDefault)
@click.version_option(__version__, prog_name="srunddp")
def main() -> None:
    """Take a PyTorch training script through a Slurm or MPI cluster, one process per GPU."""
