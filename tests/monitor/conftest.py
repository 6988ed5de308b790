"""What several tests of ``--monitor`` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import small_disk as mounted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted.small_disk(tmp_path / "disk", "64k") as folder:
        yield folder
