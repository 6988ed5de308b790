"""Reads the commands of docs/recipes.md, and returns the job scripts that they write on a machine
without a site's defaults.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from srunddp.sbatch import cli, validate
from srunddp.sbatch.render import render
from srunddp.sbatch.spec import SlurmJob
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "recipes.md"
GOLDEN = ROOT / "tests" / "sbatch" / "golden"


def commands() -> dict[str, list[str]]:
    """Return the words of each recipe's command, by the recipe's heading in lower case, with ``_``
    for each blank.
    """
    found = re.findall(
        r"^### (.+?)\n.*?^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return {
        heading.lower().replace(" ", "_"): shlex.split(text.replace("\\\n", ""))
        for heading, text in found
    }


def requested(words: Sequence[str]) -> SlurmJob:
    """Return the job that a command ``srunddp sbatch …`` asks for."""
    return cli.job_of(
        cli.parse_settings(cli.sbatch.make_context(words[1], list(words[2:])).params, words)
    )


def written(words: Sequence[str]) -> str:
    """Return the job script that a command ``srunddp sbatch …`` writes."""
    job = requested(words)
    interactive = "--salloc" in words
    validate.check(job, {}, interactive=interactive)
    return render(job, words, interactive=interactive)
