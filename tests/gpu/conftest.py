"""Risks that only a GPU shows, of signals, tools, groups, ends, networks and devices: all of this
folder needs one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that the nodes of a site share: one in the home folder."""
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix="srunddp-gpu-") as folder:
        yield Path(folder)
