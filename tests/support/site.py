"""Builds the site of the documentation in DIR/html: ``python -m tests.support.site [DIR]``. Without
an argument, DIR is build/site.

Zensical gets a copy of the pages in the folders that they have in the repository, so that a link
works both in a checkout and on the site: README.md is the first page, and docs/README.md the
contents. Only the copies begin with a title and a description, because GitHub would show these as a
table.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SHOWN = (".svg", ".png", ".css")
LINK = re.compile(r"\]\(([^)\s#]+)")
# The number of characters of a description that search engines show.
DESCRIPTION_LENGTH = 160


def build(folder: Path) -> None:
    """Build the site in a folder, which is emptied first. Print what Zensical finds wrong.

    Raises:
        subprocess.CalledProcessError: A link or an anchor leads nowhere, or a name of the Python
            API does not exist.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for file in _files():
        target = folder / "pages" / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file in PAGES:
            text = file.read_text()
            target.write_text(front_matter(text) + text)
        else:
            shutil.copy(file, target)
    (folder / "mkdocs.yml").write_text(configuration(address()))
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


def address() -> str:
    """Return the address of the repository, from setup.py; empty while it has none."""
    found = re.search(r'^ADDRESS = "(.*)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert found
    return found[1]


def configuration(repository: str) -> str:
    """Return mkdocs.yml for the folder of the build, with a link to the repository if it has an
    address.
    """
    text = (ROOT / "mkdocs.yml").read_text() + "docs_dir: pages\nsite_dir: html\n"
    if repository:
        text += f"repo_url: {repository}\n"
    return text


def front_matter(page: str) -> str:
    """Return the lines that give a page's title and description, to be put before the page. The
    title is the page's first heading or the name of the manual page.
    """
    heading = re.search(r"^(?:# (?:srunddp: )?|% )([^|\n]+)", page, re.MULTILINE)
    assert heading
    # A string in JSON is a string in YAML, too.
    title = json.dumps(plain(heading[1]), ensure_ascii=False)
    about = json.dumps(description(page), ensure_ascii=False)
    return f"---\ntitle: {title}\ndescription: {about}\n---\n\n"


def description(page: str) -> str:
    """Return as many of a page's first sentences as fit into :data:`DESCRIPTION_LENGTH`, but at
    least the complete first sentence; empty if the page has no text.
    """
    without_code = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n", without_code)
    text = next((block for block in blocks if re.match(r"[\w`\[]", block)), "")
    found, *others = re.split(r"(?<=\.) ", plain(text))
    for sentence in others:
        together = f"{found} {sentence}"
        if len(together) > DESCRIPTION_LENGTH or not sentence.endswith("."):
            break
        found = together
    return found


def plain(text: str) -> str:
    """Return a text in Markdown as plain words on one line."""
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[*`\\]|<[^>]+>", "", text)
    return " ".join(text.split())


def _files() -> set[Path]:
    """Return the pages, the files to which they link, and all pictures and style sheets."""
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
