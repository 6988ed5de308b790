"""The commands of docs/recipes.md, and the scripts that they write: as on any machine, without its
defaults.
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
    """Of each recipe, by its heading with ``_`` for blanks, in words."""
    found = re.findall(
        r"^### (.+?)\n.*?^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return {
        heading.lower().replace(" ", "_"): shlex.split(text.replace("\\\n", ""))
        for heading, text in found
    }


def requested(words: Sequence[str]) -> SlurmJob:
    """What ``srunddp sbatch …`` asks for."""
    return cli.job_of(
        cli.parse_settings(cli.sbatch.make_context(words[1], list(words[2:])).params, words)
    )


def written(words: Sequence[str]) -> str:
    """The script of ``srunddp sbatch …``."""
    job = requested(words)
    interactive = "--salloc" in words
    validate.check(job, {}, interactive=interactive)
    return render(job, words, interactive=interactive)
