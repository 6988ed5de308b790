"""The commands of docs/recipes.md, and the scripts that they write: as on any machine, without its defaults."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from srunddp.sbatch import cli, render_mpirun, render_slurm, validate
from srunddp.sbatch.cli import JobRequest
from srunddp.sbatch.spec import LaunchSpec, MpirunJob, SlurmJob
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "recipes.md"
GOLDEN = ROOT / "tests" / "sbatch" / "golden"


def commands() -> dict[str, list[str]]:
    """By heading, in words."""
    found = re.findall(r"^## (\w+)\n.*?^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return {heading: shlex.split(command.replace("\\\n", "")) for heading, command in found}


def wished(words: Sequence[str]) -> JobRequest[Any]:
    """What ``srunddp sbatch …`` or ``srunddp mpirun …`` asks for."""
    command, kind = {"sbatch": (cli.sbatch, SlurmJob), "mpirun": (cli.mpirun, MpirunJob)}[words[1]]
    context = command.make_context(words[1], list(words[2:]))
    return cli.wish(kind, context.params, words)


def rendered(start: LaunchSpec, wish: JobRequest[Any]) -> str:
    interactive = bool(wish.given.get("salloc"))
    validate.check(start, interactive=interactive)
    if isinstance(start, MpirunJob):
        return render_mpirun.render(start, wish.written)
    assert isinstance(start, SlurmJob)
    return render_slurm.render(start, wish.written, interactive=interactive)


def written(words: Sequence[str]) -> str:
    wish = wished(words)
    return rendered(wish.job, wish)
