"""The command line ``srunddp [COMMAND] …``: each command is in the package of its name, and imported when asked for."""

from __future__ import annotations

import importlib
from typing import cast

import click

from srunddp._version import __version__

_PACKAGES = {
    "check": "check",
    "explain": "explain",
    "ifaces": "ifaces",
    "report": "report",
    "run": "run",
    "sbatch": "sbatch",
    "stage": "stage",
    "triage": "triage",
}


class _RunByDefault(click.Group):
    """``srunddp train.py`` means ``srunddp run train.py``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_PACKAGES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _PACKAGES:
            return None
        return cast(click.Command, getattr(importlib.import_module(f"srunddp.{_PACKAGES[cmd_name]}.cli"), cmd_name))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in _PACKAGES and args[0] != "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RunByDefault)
@click.version_option(__version__, prog_name="srunddp")
def main() -> None:
    """Take a PyTorch training script through a Slurm or MPI cluster, one process per GPU."""
