"""Environments as other processes print them."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.explain.environ_dump import parse, read

ODD = {"A": "1", "LINES": "one\n two\nthree =3\n", "EMPTY": "", "BASH_FUNC_ml%%": "() {  x\n}", "Z": "a=b"}


@pytest.mark.parametrize("option", [(), ("-0",)])
def test_values_of_several_lines_are_read_back(option: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "env").write_bytes(subprocess.run(["/usr/bin/env", *option], env=ODD, capture_output=True).stdout)
    assert read(str(tmp_path / "env")) == [ODD]
    (tmp_path / "env").write_bytes(b"A=\xff\nB=2\n")  # bytes that are no text do not matter
    assert read(str(tmp_path / "env"))[0]["B"] == "2"


@pytest.mark.parametrize("separator", ["\n", "\0"])
def test_a_name_that_comes_again_begins_the_next_rank(separator: str) -> None:
    items = [f"{name}={rank}" for rank in range(3) for name in ("RANK", "X")]
    assert parse(separator.join(items) + separator) == [{"RANK": str(rank), "X": str(rank)} for rank in range(3)]


def test_labelled_lines_may_be_mixed() -> None:
    lines = [f"{rank:02d}: {name}={rank}" for rank in range(12) for name in ("RANK", "X")]
    random.Random(0).shuffle(lines)
    assert parse("\n".join(lines) + "\n") == [{"RANK": f"{rank}", "X": f"{rank}"} for rank in range(12)]


@pytest.mark.parametrize("content", [None, "", "no variable\n"])
def test_what_holds_no_environment_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "env").write_text(content)
    with pytest.raises(ConfigError, match=r"--env: .* -> srun --label env > FILE"):
        read(str(tmp_path / "env"))
