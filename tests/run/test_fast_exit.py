"""With --fast-exit Python's teardown is skipped, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.worlds import run


@pytest.mark.parametrize(("size", "options"), [(1, ("--fast-exit",)), (2, ("--fast-exit",)), (1, ())])
def test_output_and_exit_handlers_are_as_without_it(tmp_path: Path, size: int, options: tuple[str, ...]) -> None:
    script = """
import threading
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread's end"))).start()
atexit.register(lambda: print("at exit", end=""))
sys.stdout.reconfigure(line_buffering=False)
print("written last")
"""
    ended = run(tmp_path, script, *options, size=size)
    assert (ended.codes, ended.text) == ([0] * size, "")
    for rank in range(size):
        assert (tmp_path / f"stdout.{rank}").read_text() == "written last\na thread's end\nat exit"


@pytest.mark.parametrize("fast", [True, False])
def test_only_the_teardown_is_skipped(tmp_path: Path, fast: bool) -> None:
    script = """
class Torn:
    def __del__(self): os.write(1, b"torn down")
torn = Torn()
"""
    ended = run(tmp_path, script, *(["--fast-exit"] if fast else []), size=1)
    assert ended.codes == [0]
    assert (tmp_path / "stdout.0").read_text() == ("" if fast else "torn down")


def test_the_code_of_a_script_that_fails_is_its_own(tmp_path: Path) -> None:
    assert run(tmp_path, "sys.exit(5)", "--fast-exit", size=1).codes == [5]
