"""The reference has a page for each command, and says what ``--help`` says."""

from __future__ import annotations

import pytest

from tests.support import command_pages


@pytest.mark.parametrize("name", command_pages.parts())
def test_a_page_has_the_options_of_its_command(name: str) -> None:
    """Else run: python -m tests.support.command_pages."""
    page = (command_pages.PAGES / name).read_text()
    assert command_pages.rendered(page, command_pages.parts()[name]) == page
