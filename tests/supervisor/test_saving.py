"""How long a script may save when the launcher, or the failure of another rank, ends it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.facts import tells
from tests.support.launcher import launched
from tests.support.starting import LONG, until
from tests.support.worlds import named, run

pytestmark = pytest.mark.slow

# Rank 0 alone handles SIGTERM, as nothing of the others is to be saved.
SAVER = """
asked = []
if RANK == 0:
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
say("is_there")
while not asked:
    time.sleep(0.02)
end = time.time() + {seconds}
while time.time() < end:
    time.sleep(0.02)
say("saved")
"""


@pytest.mark.parametrize(("signal_grace", "seconds", "saved"), [(1, 60, False), (60, 3, True)])
def test_after_the_launchers_signal_a_rank_saves_for_as_long_as_the_user_says(
    tmp_path: Path, signal_grace: int, seconds: int, saved: bool
) -> None:
    options = (f"--signal-grace={signal_grace}", "--grace=60")
    with launched(tmp_path, SAVER.format(seconds=seconds), *options) as launcher:
        until(lambda: all((tmp_path / f"is_there.{rank}").exists() for rank in range(3)))
        launcher.send(signal.SIGTERM)
        ended = launcher.wait()
    assert (tmp_path / "saved.0").exists() == saved
    assert ended.codes[1:] == [143, 143]
    assert tells(ended.text, "launcher", "SIGTERM")


# The failure of another rank: SAVE and REST are Python, BLOCK is one call of C that no signal ends.

VICTIM = """
def save(*_):
    end = time.time() + {seconds}
    while time.time() < end:
        time.sleep(0.02)
    say("saved")

def block(*_):
    libc = ctypes.CDLL(None)
    lock = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    say("blocks")
    libc.pthread_mutex_lock(lock)

asked = []
if RANK == {victim}:
    signal.signal(signal.SIGTERM, {handler})
say("is_there")
wait_for(*(f"is_there.{{rank}}" for rank in range(SIZE)))
if RANK == 1:
    {first}
    raise ValueError("boom")
{work}
"""
NOTE = "lambda *_: asked.append(1)"
THEN = """
while not asked:
    time.sleep(0.02)
if RANK == {victim}:
    {call}()
"""


def victim(rank: int, work: str = "rest()", **how: object) -> str:
    known: dict[str, object] = {"handler": NOTE, "seconds": 3, "first": "pass"} | how
    return VICTIM.format(victim=rank, work=work.format(victim=rank, **known), **known)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("handler", "work"),
    [(NOTE, THEN), ("save", "rest()"), ("lambda *_: sys.exit(save())", "rest()")],
    ids=["a flag", "a save and no end", "a save"],
)
def test_a_rank_that_may_save_saves_when_another_fails(
    tmp_path: Path, rank: int, handler: str, work: str
) -> None:
    """As its supervisor knows which: the others have no handler, and end at once."""
    grace = 6 if handler == "save" else 10 * LONG
    script = victim(rank, work, handler=handler, call="save")
    ended = run(tmp_path, script, f"--grace={grace}")
    named(ended, 1, 1, "ValueError: boom")
    assert (tmp_path / f"saved.{rank}").exists()


@pytest.mark.parametrize("work", ["block()", THEN], ids=["before", "after its handler"])
@pytest.mark.parametrize("rank", [0, 2])
def test_one_that_waits_in_c_does_not_keep_the_others(tmp_path: Path, rank: int, work: str) -> None:
    """As in a collective: neither its Python runs nor does it write."""
    first = f"wait_for('blocks.{rank}')" if work == "block()" else "pass"
    work = f"if RANK == {rank}: block()\nrest()" if work == "block()" else work
    script = victim(rank, work, first=first, call="block")
    ended = run(tmp_path, script, f"--grace={10 * LONG}")
    named(ended, 1, 1, "ValueError: boom")


@pytest.mark.parametrize("grace", [0, 2])
def test_one_that_does_not_end_is_killed(tmp_path: Path, grace: int) -> None:
    ended = run(tmp_path, victim(2, handler="save", seconds=60), f"--grace={grace}")
    named(ended, 1, 1, "ValueError: boom")
    assert not (tmp_path / "saved.2").exists()


def test_before_a_restart_all_have_the_same_time(tmp_path: Path) -> None:
    options = (f"--grace={10 * LONG}", "--restarts=1", "--restart-grace=0.1")
    script = "if int(os.environ['TORCHELASTIC_RESTART_COUNT']): os._exit(7)\n"
    ended = run(tmp_path, script + victim(2, handler="save", seconds=60), *options)
    assert ended.codes == [7, 7, 7], ended.text
    assert not (tmp_path / "saved.2").exists()
