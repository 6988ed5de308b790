"""The pictures of the documentation are drawn from their sources, fit on a page, and stand on
one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pictures import OMITTED, PICTURES, checksum, draw, parts, sources
from tests.support.site import PAGES

REFRESH = "python -m tests.support.pictures draws them anew"
SHOWN = sorted(path for path in PICTURES.iterdir() if path.suffix in (".svg", ".png"))
WIDEST = 720.0
NAME = re.compile(r"[\w./-]+\.(?:svg|png)\b")


@pytest.mark.parametrize("source", sources(), ids=lambda path: path.name)
def test_a_picture_is_of_its_source(source: Path) -> None:
    assert f"<!-- made from {checksum(source)} -->" in source.with_suffix(".svg").read_text(), (
        REFRESH
    )


def test_every_svg_has_a_source() -> None:
    drawn = {source.with_suffix(".svg") for source in sources()}
    assert drawn == {path for path in SHOWN if path.suffix == ".svg"}


@pytest.mark.parametrize("picture", SHOWN, ids=lambda path: path.name)
def test_a_page_shows_a_picture(picture: Path) -> None:
    assert picture in {
        (page.parent / name).resolve() for page in PAGES for name in NAME.findall(page.read_text())
    }


@pytest.mark.parametrize("source", sources(), ids=lambda path: path.name)
def test_a_picture_fits_on_a_page(source: Path) -> None:
    (width,) = re.findall(r'<svg [^>]*? width="([\d.]+)"', source.with_suffix(".svg").read_text())
    assert float(width) <= WIDEST


def test_a_picture_is_below_250_kilobytes() -> None:
    assert {path.name for path in SHOWN if path.stat().st_size > 250_000} == set()


@pytest.mark.parametrize("source", sorted(PICTURES.glob("*.term")), ids=lambda path: path.name)
def test_a_terminal_shows_real_output(source: Path) -> None:
    """What is left out is marked, and all else is in the output, in its order."""
    output = re.sub(" +$", "", source.with_suffix(".txt").read_text(), flags=re.MULTILINE)
    at = 0
    for lines in parts(source)[2]:
        for piece in "\n".join(lines).split(OMITTED):
            found = output.find(piece, at)
            assert found >= 0, piece
            at = found + len(piece)


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "some.term"
    source.write_text("title\nmarked\n\n$ command\noutput\n")
    before = draw(source)
    source.write_text(source.read_text() + "more\n")
    assert checksum(source) not in before
