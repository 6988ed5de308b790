"""Draws the pictures of docs/pictures: ``python -m tests.support.pictures [report]``.

Graphviz draws a diagram from NAME.dot. This module draws terminals from NAME.term, which has
excerpts of the output in NAME.txt. Each SVG contains a SHA-256 of its source and of the style, so
that a test without Graphviz can find an SVG that is out of date. With ``report``, this also makes
report.png with Chromium and pngquant: the page of ``srunddp report`` for a made-up run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from hashlib import sha256
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.conftest import ROOT
from tests.support.made_up_run import GIB, MadeUp

PICTURES = ROOT / "docs" / "pictures"
OMITTED = "[…]"
_FONT = "DejaVu Sans"  # its letters are wide, so the text also fits in the font that a reader has
_SIZES = (
    "-Nfontsize=13",
    "-Efontsize=12",
    "-Nshape=box",
    "-Nstyle=rounded",
    "-Gbgcolor=transparent",
    "-Gpad=0.05",
)
_COLUMNS = 94
_LINE = 16
_MARGIN = 12
STYLE = Path(__file__).with_suffix(".css")


def sources() -> list[Path]:
    """Return the source files of all SVGs."""
    return sorted(path for path in PICTURES.iterdir() if path.suffix in (".dot", ".term"))


def checksum(source: Path) -> str:
    """Return the SHA-256 that the SVG of a source contains if it is up to date."""
    return sha256(source.read_bytes() + STYLE.read_bytes()).hexdigest()


def parts(source: Path) -> tuple[str, str, list[list[str]]]:
    """Read the source of a picture of terminals.

    Returns:
        The title, the text whose lines are highlighted, and the lines of each terminal, of which
        the first is a command.
    """
    title, marked, text = source.read_text().split("\n", 2)
    return title, marked, [part.splitlines() for part in re.split(r"\n+(?=\$ )", text.strip("\n"))]


def _diagram(source: Path) -> tuple[str, tuple[float, float], str]:
    """Return the title, the size and the SVG elements of a diagram.

    Raises:
        FileNotFoundError: Graphviz is missing.
    """
    command = [
        "dot",
        "-Tsvg",
        *(f"-{kind}fontname={_FONT}" for kind in "GNE"),
        *_SIZES,
        str(source),
    ]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size = re.findall(r'viewBox="0\.00 0\.00 ([\d.]+) ([\d.]+)"', drawn)[0]
    title = re.findall(r'^digraph "(.*)"', source.read_text())[0]
    body = re.sub(
        r"<!--.*?-->|<title>.*?</title>",
        "",
        drawn[drawn.index("<g ") : drawn.rindex("</svg>")],
        flags=re.S,
    )
    body = re.sub(r' (?:id|font-family|font-size|fill|stroke|xml:space)="[^"]*"', "", body)
    return title, (float(size[0]), float(size[1])), re.sub(r"\n\s*", "\n", body).strip()


def _terminals(source: Path) -> tuple[str, tuple[float, float], str]:
    title, marked, terminals = parts(source)
    width = _COLUMNS * 7.25 + 2 * _MARGIN
    top = 1.0
    elements = []
    for lines in terminals:
        height = len(lines) * _LINE + 2 * _MARGIN - 4
        elements.append(
            f'<rect class="terminal" x="1" y="{top}" width="{width - 2}" height="{height}" rx="6"/>'
        )
        for number, line in enumerate(lines, 1):
            if number == 1:
                kind = "command"
            elif line == OMITTED:
                kind = "omitted"
            elif marked in line:
                kind = "cause"
            else:
                kind = ""
            y = top + _MARGIN + number * _LINE - 6
            elements.append(
                f'<text class="line {kind}" x="{_MARGIN}"'
                f' y="{y}">{escape(line, quote=False)}</text>'
            )
        top += height + _MARGIN
    return title, (width, top - _MARGIN + 1), "\n".join(elements)


def draw(source: Path) -> str:
    """Return the text of the SVG that belongs to a source."""
    title, (width, height), elements = (_diagram if source.suffix == ".dot" else _terminals)(source)
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
        f' role="img">\n<title>{escape(title)}</title>'
    )
    return (
        f"{head}\n<!-- made from {checksum(source)}"
        f" -->\n<style>\n{STYLE.read_text()}</style>\n{elements}\n</svg>\n"
    )


_RUN = MadeUp(
    nodes=4,
    ranks_per_node=4,
    gpus_per_node=4,
    start=1_795_000_000.0,
    seconds=2400,
    epoch_s=400,
    step_s=0.25,
    slow_data={13: 0.08},
    utilization=78,
    hot=((2, 1),),
    rdma=2e9,
    cpus=64,
    busy=0.35,
    memory=180 * GIB,
    memory_limit=512 * GIB,
    time_limit=3600,
    script=("train.py", "--config", "large.yaml"),
)
_BROWSER = (
    "--headless",
    "--no-sandbox",
    "--hide-scrollbars",
    "--blink-settings=preferredColorScheme=1",
)


def photograph(picture: Path) -> None:
    """Write a picture of the top of a report's page, 1280 pixels wide.

    Raises:
        FileNotFoundError: Chromium or pngquant is missing.
    """
    with TemporaryDirectory() as folder:
        _RUN.write(Path(folder, "logs"))
        report = [sys.executable, "-m", "srunddp", "report", _RUN.name]
        subprocess.run(
            report, cwd=folder, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True
        )
        page = Path(folder, "logs", _RUN.name, "report.html").as_uri()
        shot = [
            f"--user-data-dir={folder}/profile",
            "--force-device-scale-factor=1.28",
            "--window-size=1000,1150",
        ]
        subprocess.run(
            ["chromium", *_BROWSER, *shot, f"--screenshot={picture}", page],
            capture_output=True,
            check=True,
        )
    subprocess.run(
        ["pngquant", "--force", "--output", str(picture), "64", str(picture)], check=True
    )


if __name__ == "__main__":
    for each in sources():
        each.with_suffix(".svg").write_text(draw(each))
    if "report" in sys.argv[1:]:
        photograph(PICTURES / "report.png")
