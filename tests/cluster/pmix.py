"""Lets Slurm find the PMIx library on machines that have its runtime package only."""

import shutil
from pathlib import Path

from . import network

_PLAIN_NAME = "libpmix.so"


def mounts(folder: Path) -> list[network.Mount]:
    """What to mount on every machine so that Slurm's plugin can load the library; nothing if it already can.

    The plugin loads it by an absolute path that ends in its plain name, which only Debian's development
    package has: so the machines see a copy of the library's folder that has the name as well.
    """
    original = _library_folder()
    if original is None or (original / _PLAIN_NAME).exists():
        return []
    copy = folder / "pmix"
    shutil.copytree(original, copy, symlinks=True)
    (copy / _PLAIN_NAME).symlink_to(f"{_PLAIN_NAME}.2")
    return [("--bind", str(copy), str(original))]


def _library_folder() -> Path | None:
    """Where the loader's library really is: a folder of its own, beside its components."""
    for line in network.tool("ldconfig", "-p").splitlines():
        words = line.split()
        if words and words[0] == f"{_PLAIN_NAME}.2":
            folder = Path(words[-1]).resolve().parent
            return folder if (folder / "pmix").is_dir() else None
    return None
