"""What is at a path, and whether two nodes see the same there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from srunddp.util import filesystem
from srunddp.util.filesystem import Mount, content, look, mount_of


def test_a_file_is_compared_by_bytes_and_a_big_one_by_size(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(filesystem.SMALL + 1))
    assert content(str(big)) == f"{filesystem.SMALL + 1} bytes"
    assert len(content(str(big), whole=True)) == 64
    small = tmp_path / "small"
    other = tmp_path / "other"
    small.write_text("a")
    other.write_text("b")
    assert content(str(small)) != content(str(other))
    assert content(str(tmp_path / "no")) == ""


def test_the_content_of_a_folder_is_its_names_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One level deep; what Python caches is left out, and so are folders with too many entries."""
    before = content(str(tmp_path))
    (tmp_path / "__pycache__").mkdir()
    assert content(str(tmp_path)) == before
    (tmp_path / "deep").mkdir()
    named = content(str(tmp_path))
    assert named != before
    (tmp_path / "deep" / "file").write_text("1")
    assert content(str(tmp_path)) == named
    (tmp_path / "file").write_text("1")
    short = content(str(tmp_path))
    (tmp_path / "file").write_text("2")
    assert content(str(tmp_path)) == short
    (tmp_path / "file").write_text("22")
    assert content(str(tmp_path)) != short
    monkeypatch.setattr(filesystem, "FEW", 2)
    assert content(str(tmp_path)) != ""
    monkeypatch.setattr(filesystem, "FEW", 1)
    assert content(str(tmp_path)) == ""


MOUNTS = r"""
21 1 0:20 / / rw - ext4 /dev/sda1 rw
22 21 0:21 / /home rw,relatime shared:1 master:2 - nfs4 server:/home rw
23 21 0:22 / /home/my\040data rw - lustre 10.0.0.1@o2ib:/fs rw
24 21 0:23 / /home rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/homes/me", "ext4"),
        ("/home", "tmpfs"),
        ("/home/me/x", "tmpfs"),
        ("/home/my data/set", "lustre"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_nearest_mount(
    tmp_path: Path, path: str, expected: str
) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS.lstrip())
    assert mount_of(path, tmp_path / "mountinfo").type == expected


def test_one_file_has_one_identity_by_whatever_name(tmp_path: Path) -> None:
    """And a copy has another."""
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "elsewhere").symlink_to("/proc/version")
    assert look("x", str(tmp_path / "elsewhere"))["system"] == "proc"
    a, b, link = (look("x", str(tmp_path / name))["identity"] for name in ("a", "b", "link"))
    assert a == link != b


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Mount("/p", "nfs4", "server1:/p"), Mount("/p", "nfs4", "10.0.0.2:/p"), True),
        (Mount("/p", "nfs4", "server:/p"), Mount("/p", "nfs4", "server:/q"), False),
        (
            Mount("/p", "lustre", "10.0.0.1@o2ib:10.0.0.2@o2ib:/p"),
            Mount("/p", "lustre", "10.0.0.2@o2ib:/p"),
            True,
        ),
        (Mount("/p", "ext4", "/dev/sda1"), Mount("/p", "xfs", "/dev/sda1"), False),
    ],
)
def test_nodes_that_share_a_file_system_give_it_one_identity(
    one: Mount, other: Mount, same: bool
) -> None:
    found = os.stat("/")
    assert (filesystem.identity(one, found) == filesystem.identity(other, found)) == same
    assert filesystem.identity(one, found) != filesystem.identity(one, os.stat("/proc"))
