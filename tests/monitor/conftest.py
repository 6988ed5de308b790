"""What several tests of ``--monitor`` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_disk import small_disk


@pytest.fixture(name="small_disk")
def small_disk_of_64k(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "64k") as disk:
        yield disk
