"""System calls on an environment's folder while torch is imported: with the environment in place, and with a copy.

Those count that name a path below the folder, or a descriptor of one; a call within memory that was mapped from a file
there is none. Needs strace.

    python -m tests.benchmarks.staging ENV COPY
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

IMPORT = ("-c", "import torch")


def calls_below(folder: str, command: Sequence[str]) -> int:
    """Run a command to its end, and count its calls on what is below a folder, and on the folder itself.

    Args:
        folder: absolute, as the command would write it; links to it are not followed.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    named = re.compile(re.escape(os.path.normpath(folder)) + r"(?=[/\">])")
    variables = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with TemporaryDirectory() as traces:
        # A file for each thread, so that no line is split; descriptors with their paths; nothing of what is read.
        options = ("-ff", "-y", "-s", "0", "-e", "trace=%file,%desc", "-e", "signal=none", "-o", f"{traces}/of")
        subprocess.run(["strace", *options, *command], env=variables, cwd="/", check=True)
        lines = (line for file in Path(traces).iterdir() for line in file.read_text(errors="replace").splitlines())
        return sum(bool(named.search(line)) for line in lines)


def main(env: str, copy: str) -> None:
    for folder in (env, copy):
        subprocess.run([f"{folder}/bin/python", *IMPORT], check=True)  # what has yet to be compiled is now
    in_place, staged = (calls_below(env, [f"{folder}/bin/python", *IMPORT]) for folder in (env, copy))
    print(
        f"calls on {env} during import torch: {in_place} in place, {staged} with {copy}, ratio {staged / in_place:.4f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
