"""Paths of a configuration, which no shell has expanded."""

from __future__ import annotations

from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.util.user_path import expanded


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~/runs", "/home/me/runs"),
        ("~", "/home/me"),
        ("$SCRATCH/a", "/scratch/a"),
        ("${SCRATCH}/$NAME", "/scratch/one"),
        ("a~b/~", "a~b/~"),
        ("./~", "./~"),
        ("cost$", "cost$"),
        ("", ""),
    ],
)
def test_tilde_and_variables_are_replaced(
    path: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("NAME", "one")
    assert expanded(path, "output_dir") == expected
    assert expanded(Path("/a"), "output_dir") == "/a"


@pytest.mark.parametrize("path", ["$SCRATHC/a", "${SCRATHC}/a", "~nobody-of-this-name/a"])
def test_what_leads_nowhere_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than a folder of this very name."""
    monkeypatch.delenv("SCRATHC", raising=False)
    with pytest.raises(ConfigError, match="output_dir is "):
        expanded(path, "output_dir")
