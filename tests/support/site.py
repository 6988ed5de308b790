"""Builds the site of the documentation: ``python -m tests.support.site [DIR]``, as DIR/html; DIR is
build/site.

Zensical gets a copy of the pages with the repository's folders, so that a link is the same one
there and in a checkout: README.md is the first page, and docs/README.md the contents.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SHOWN = (".svg", ".png")
LINK = re.compile(r"\]\(([^)\s#]+)")


def build(folder: Path) -> None:
    """Build strictly; what Zensical finds wrong is printed.

    Raises:
        subprocess.CalledProcessError: a link or an anchor leads nowhere, or a name of the Python
            API does not exist.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for file in _files():
        target = folder / "pages" / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    config = (ROOT / "mkdocs.yml").read_text()
    (folder / "mkdocs.yml").write_text(f"{config}docs_dir: pages\nsite_dir: html\n")
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        print(re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr))
    done.check_returncode()


def _files() -> set[Path]:
    """The pages, their pictures, and what they link to."""
    linked = {
        page.parent / target
        for page in PAGES
        for target in LINK.findall(page.read_text())
        if "://" not in target
    }
    files = {file.resolve() for file in linked if file.is_file()}
    return {*PAGES, *files, *(file for file in (ROOT / "docs").rglob("*") if file.suffix in SHOWN)}


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT / "build" / "site")
