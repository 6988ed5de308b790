"""A script that is over and whose process does not end: it is said where it is, and it keeps nobody for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.starting import write
from tests.support.worlds import run

SOON = "import srunddp.supervisor.supervisor\nsrunddp.supervisor.supervisor.ENDS_WITHIN = 1.0\n"
PYTHON = "def flush(): time.sleep(600)\nif RANK == {rank}: atexit.register(flush)"
C = """
import ctypes
libc = ctypes.CDLL(None)
if RANK == {rank}: libc.__cxa_atexit(libc.pause, None, None)
"""


@pytest.mark.parametrize(("rank", "codes"), [(1, [124, 124, 0]), (0, [124, 0, 0])])
@pytest.mark.parametrize(("script", "place"), [(PYTHON, "flush (train.py:"), (C, "no stack")], ids=["atexit", "C"])
def test_it_is_named_and_then_ended(tmp_path: Path, rank: int, codes: list[int], script: str, place: str) -> None:
    hook = write(tmp_path / "hook" / "sitecustomize.py", SOON).parent
    variables = {"PYTHONPATH": f"{hook}:{ROOT}"}
    ended = run(tmp_path, script.format(rank=rank), "--grace", "1", variables=variables)
    assert ended.codes == codes, ended.text
    assert f"its script is over, and it has not ended for 1 s, in {place}" in ended.errors[rank]
    (verdict,) = ended.verdicts
    assert (verdict.ranks, verdict.code) == ((rank,), 124)
    assert f"its script is over, and it has not ended for 2 s, in {place}" in verdict.cause


def test_one_that_ends_in_time_is_left_alone(tmp_path: Path) -> None:
    hook = write(tmp_path / "hook" / "sitecustomize.py", SOON).parent
    script = "atexit.register(say, 'uploaded')\natexit.register(time.sleep, 2)"
    ended = run(tmp_path, script, "--grace", "20", variables={"PYTHONPATH": f"{hook}:{ROOT}"})
    assert ended.codes == [0, 0, 0], ended.text
    assert all((tmp_path / f"uploaded.{rank}").exists() for rank in range(3))
    assert ended.verdicts == []
