"""How long a script may save when the launcher, or the failure of another rank, ends it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.facts import tells
from tests.support.launcher import launched
from tests.support.starting import until

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
    options = (f"--signal-grace={signal_grace}", "--grace=0")
    with launched(tmp_path, SAVER.format(seconds=seconds), *options) as launcher:
        until(lambda: all((tmp_path / f"is_there.{rank}").exists() for rank in range(3)))
        launcher.send(signal.SIGTERM)
        ended = launcher.wait()
    assert (tmp_path / "saved.0").exists() == saved
    assert ended.codes[1:] == [143, 143]
    assert tells(ended.text, "launcher", "SIGTERM")
