"""srunddp's descriptors in the process of a script get high numbers."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from srunddp.util.descriptors import close_all, opened, opening_high


@pytest.fixture
def files() -> Iterator[list[int]]:
    """Descriptors that the test opens; they are closed at its end."""
    found: list[int] = []
    yield found
    close_all(found)


def limit_open_files(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))


@pytest.mark.parametrize("limit", [1024, resource.RLIM_INFINITY], ids=str)
def test_what_a_library_opens_gets_numbers_from_600_on(
    limit: int, files: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_open_files(monkeypatch, limit)
    with opening_high():
        files += [os.open(tmp_path, os.O_RDONLY) for _ in range(3)]
    # Other files of this process may have some of these numbers.
    assert files[0] >= 600
    assert files == sorted(files)


@pytest.mark.parametrize("limit", [32, 600, 855])
def test_a_small_limit_leaves_the_numbers_as_they_are(
    limit: int, files: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_open_files(monkeypatch, limit)
    with opening_high():
        files.append(os.open(tmp_path, os.O_RDONLY))
    assert files[0] < 600


def test_only_what_the_library_has_opened_stays(files: list[int], tmp_path: Path) -> None:
    before = opened()
    with opening_high():
        files.append(os.open(tmp_path, os.O_RDONLY))
    assert sorted(opened()) == sorted([*before, *files])


def test_nothing_stays_after_an_error() -> None:
    before = opened()
    with pytest.raises(ValueError, match="of the library"), opening_high():
        raise ValueError("of the library")
    assert sorted(opened()) == sorted(before)
