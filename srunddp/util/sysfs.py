"""What the kernel says in its files below /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str:
    """What is in a file of the kernel; empty where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
