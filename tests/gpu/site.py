"""A real Slurm site: jobs of its own for a check, on as few nodes as it needs.

``SITE_SRUN`` may hold what the site asks for, such as ``--account=X --partition=Y``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import ROOT
from tests.gpu.ranks import PREAMBLE
from tests.support.starting import write
from tests.support.worlds import TOGETHER

STARTS_WITHIN = 300.0  # seconds, the queue included
SRUNDDP = (sys.executable, str(ROOT / "bin" / "srunddp"), "--quiet")


def options() -> list[str]:
    return ["--time=5", *shlex.split(os.environ.get("SITE_SRUN", ""))]


def command(*words: str, script: str = "train.py") -> list[str]:
    """srun with these options, and srunddp with a script."""
    return ["srun", *options(), *words, *SRUNDDP, script]


@contextmanager
def job(folder: Path, script: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """srunddp below srun, from a job of its own; cancelled at the end if it is still there."""
    write(folder / "train.py", TOGETHER + PREAMBLE + script)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(*words), cwd=folder, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # srun passes it on, and ends
