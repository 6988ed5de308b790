"""Trainings of ``resumable.py`` that are killed or signalled and go on, in forked worlds.

interrupted.py FOLDER signals|workerless NUMBER   a campaign; prints its figures
interrupted.py FOLDER once                        a few of each, for the tests of test_resume.py
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from srunddp.errors import Stopped
from srunddp.train import checkpoint_policy
from srunddp.train.checkpoint.file import verify
from srunddp.train.checkpoint_policy import StopConsensus
from tests.programs import resumable
from tests.train.course import LONG, Course, until
from tests.train.forked import start, world_of
from tests.train.local_world import LocalWorld

ENDS_WITHIN = 20.0  # seconds from the last signal to the last rank's end, on a machine that is busy
SHOT_WITHIN = 5.0  # seconds, as a run near its end may have no such moment any more
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
WHERE = signal.SIGHUP  # asks a rank for its stacks
CODES = {0, 75, 143}
ONCE = ("--epochs=4", "--checkpoint.every_steps=5")
WORKERLESS = ("--loading.num_workers=0",)
_CATCHES = re.compile(r"SigCgt:\s*([0-9a-f]+)")
_SAID = re.compile(r"stopped after step (\d+) by (SIG\w+); checkpoint (\S+?)(; not requeued.*)?")


def go_on(world: LocalWorld, folder: Path, arguments: Sequence[str], harmless: bool) -> tuple[int, str]:
    """In a rank: train to the end, or until it is stopped; the exit code, and what was said.

    Args:
        harmless: signals that come before or after ``fit()`` end nothing.
    """
    faulthandler.register(WHERE)
    if harmless:
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
    try:
        resumable.train(world, folder, *arguments)
    except Stopped as stopped:
        return stopped.code, str(stopped)
    return 0, ""


class Forked(Course):
    """Whose runs are in forked worlds."""

    def begin(self, *, harmless: bool = False) -> list[int]:
        """Fork ranks that go on with it; their process ids."""
        self.clear()
        return start(self.ranks, self.folder / "world", go_on, self.folder, self.arguments, harmless)

    def end(self, pids: list[int], limit: float = LONG) -> list[tuple[int, str]]:
        """Each rank's exit code, and what it said; all must end by themselves."""
        codes = wait_for(pids, limit)
        assert codes == [0] * self.ranks, codes
        return [torch.load(self.folder / "world" / f"result{rank}.pt") for rank in range(self.ranks)]

    def finish(self) -> dict[str, Any]:
        """Leave it alone until it has ended."""
        codes = wait_for(self.begin(), 5 * LONG)
        assert codes == [0] * self.ranks, codes
        return self.outcome()

    def check_files(self) -> None:
        """Whatever has a checkpoint's name is one."""
        for path in (self.folder / "checkpoints").glob("step-*.pt"):
            verify(path)


def wait_for(pids: list[int], limit: float = LONG) -> list[int]:
    """The exit codes, -n upon signal n. Ranks that do not end within the limit are asked where they are, and killed."""
    codes: dict[int, int] = {}

    def all_ended() -> bool:
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        return len(codes) == len(pids)

    if not until(all_ended, limit):
        for pid in set(pids) - codes.keys():
            os.kill(pid, WHERE)
        until(all_ended, 1.0)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids]


# Moments: each waits for one, within a limit, and names it.


def at_random(course: Course, draw: random.Random, limit: float) -> str:
    until(course.started)
    time.sleep(draw.uniform(0.0, 0.4))
    return "at random"


def amid_a_save(course: Course, draw: random.Random, limit: float) -> str:
    return "at a save" if until(course.saving, limit) else "at random"


def amid_an_evaluation(course: Course, draw: random.Random, limit: float) -> str:
    before = course.tested()
    return "amid an evaluation" if until(lambda: course.tested() > before, limit) else "at random"


def at_an_epoch_s_end(course: Course, draw: random.Random, limit: float) -> str:
    steps = -(-resumable.SAMPLES // (course.ranks * 16))
    before = course.step() // steps
    return "at an epoch's end" if until(lambda: course.step() // steps > before, limit) else "at random"


Moment = Callable[[Course, random.Random, float], str]
MOMENTS = (at_random, amid_a_save, amid_an_evaluation, at_an_epoch_s_end)


# Kills.


def kill(course: Forked, moment: Moment, draw: random.Random) -> list[str]:
    """Kill a rank, and a little later the others, as their supervisors do; what it hit."""
    pids = course.begin()
    when = moment(course, draw, LONG)
    first = 0 if moment is amid_a_save else draw.randrange(course.ranks)
    assert os.waitpid(pids[first], os.WNOHANG) == (0, 0), "it had ended before"
    os.kill(pids[first], signal.SIGKILL)
    time.sleep(draw.uniform(0.0, 0.05))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(pids)
    course.check_files()
    return [when, *["amid a save"] * course.saving()]


def kills(course: Forked, *moments: Moment) -> tuple[list[list[str]], dict[str, Any]]:
    """What was hit, and what came of the training."""
    draw = random.Random(course.ranks)
    return [kill(course, moment, draw) for moment in moments], course.finish()


# Signals.


def signals(folder: Path, number: int, arguments: tuple[str, ...] = ("--epochs=12",)) -> str:
    """Worlds of three and of two ranks in turn, each signalled until it is at its end."""
    draw, counts, slowest = random.Random(number), Counter[str](), 0.0
    reference = {ranks: Forked(folder / f"undisturbed{ranks}", ranks, arguments).finish() for ranks in (3, 2)}
    steps = {ranks: max(outcome["ids"][0]) for ranks, outcome in reference.items()}
    for course in courses(folder, arguments):
        code = -1
        while code != 0:
            near = course.step() > steps[course.ranks] - 60
            pids = course.begin(harmless=near)
            assert near or until(lambda pids=pids: all(map(catches, pids)))
            limit = LONG
            if counts["signals"] < number:
                shoot(course, pids, draw, counts)
                limit = ENDS_WITHIN
            began = time.monotonic()
            code = agreed(course.end(pids, limit))
            slowest = max(slowest, time.monotonic() - began) if limit == ENDS_WITHIN else slowest
            counts[f"runs that ended with {code}"] += 1
            course.check_files()
            assert not course.saving(), "what was begun to be written is left"
        assert course.outcome() == reference[course.ranks], course.folder
        if counts["signals"] >= number:
            return f"{described(counts)}; the slowest end {slowest:.1f} s after the last signal"
    raise AssertionError


def shoot(course: Forked, pids: list[int], draw: random.Random, counts: Counter[str]) -> None:
    """A few signals, the later ones while the first is being obeyed; each to one rank or to all."""
    moments = draw.choices(MOMENTS, weights=(3, 2, 2, 1))
    for shot in range(draw.randint(2, 6)):
        if shot == 0:
            when = moments[0](course, draw, SHOT_WITHIN)
        else:
            time.sleep(draw.uniform(0.0, 0.3))
            when = "after another"
        number = draw.choice(SIGNALS)
        for pid in pids if draw.random() < 0.4 else [draw.choice(pids)]:
            if is_running(pid):
                os.kill(pid, number)
                counts.update(("signals", when, number.name))


def agreed(ends: list[tuple[int, str]]) -> int:
    """The exit code that all ranks ended with, after the same step."""
    (code,) = {code for code, _ in ends}
    assert code in CODES, ends
    if code:
        said = [_SAID.fullmatch(text) for _, text in ends]
        assert all(said), ends
        assert len({match and match.group(1, 2, 3) for match in said}) == 1, ends
        assert all((match and match[4] is not None) == (code == 75) for match in said), ends
    return code


def catches(pid: int) -> bool:
    """Whether this process handles the signals by now."""
    found = _CATCHES.search(Path(f"/proc/{pid}/status").read_text())
    mask = int(found[1], 16) if found else 0
    return all(mask >> (number - 1) & 1 for number in SIGNALS)


def is_running(pid: int) -> bool:
    """And has not ended without having been waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"


def courses(folder: Path, arguments: tuple[str, ...]) -> Any:
    """Endless; each is deleted once the next one is asked for."""
    number = 0
    while True:
        for ranks in (3, 2):
            number += 1
            yield Forked(folder / f"course{number}", ranks, arguments)
            shutil.rmtree(folder / f"course{number}")


def described(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def workerless(folder: Path, number: int) -> str:
    """Signals where the rank itself reads, and draws what is random in that."""
    return signals(folder, number, ("--epochs=6", *WORKERLESS))


# A signal at a moment that is certain.


def signalled_amid_evaluation(
    world: LocalWorld, folder: Path, arguments: Sequence[str], number: int
) -> tuple[int, str]:
    """In a rank: the second one gets a signal in the third batch of an evaluation; all agree after each batch."""

    class Signalled(resumable.Network):
        batches = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.batches += not self.training
            if world.rank == 1 and self.batches == 3:
                os.kill(os.getpid(), number)
            return super().forward(inputs)

    resumable.Network = Signalled
    checkpoint_policy.StopConsensus = partial(StopConsensus, every=0.0)
    return go_on(world, folder, arguments, harmless=False)


def left_amid_evaluation(course: Forked, number: int) -> tuple[list[tuple[int, str]], int, dict[str, Any]]:
    """How the ranks ended, how many test batches there were, and what came of the training."""
    course.clear()
    ends = world_of(3, course.folder / "world", signalled_amid_evaluation, course.folder, course.arguments, number)
    return ends, course.tested(), course.finish()


def one_signalled(course: Forked, draw: random.Random) -> tuple[list[tuple[int, str]], dict[str, Any]]:
    """USR2 at a random moment to the last rank alone, and other signals while all obey it."""
    pids = course.begin()
    assert until(course.started)
    time.sleep(draw.uniform(0.0, 0.2))
    os.kill(pids[-1], signal.SIGUSR2)
    for pid in pids:
        time.sleep(draw.uniform(0.0, 0.1))
        if is_running(pid):
            os.kill(pid, signal.SIGUSR1)
    return course.end(pids, ENDS_WITHIN), course.finish()


def once(folder: Path) -> None:
    three, two, workerless = ONCE, (*ONCE, "--epochs=2", "--ema_decay=0.9"), (*ONCE, *WORKERLESS)

    def course(name: str, ranks: int, arguments: tuple[str, ...]) -> Forked:
        return Forked(folder / name, ranks, arguments)

    results = {
        "three left alone": course("a", 3, three).finish(),
        "three killed": kills(course("b", 3, three), *MOMENTS),
        "two left alone": course("c", 2, two).finish(),
        "two killed": kills(course("d", 2, two), at_random, amid_a_save),
        "one signalled": one_signalled(course("e", 3, three), random.Random(0)),
        "amid evaluation": left_amid_evaluation(course("f", 3, three), signal.SIGTERM),
        "workerless left alone": course("g", 3, workerless).finish(),
        "workerless amid evaluation": left_amid_evaluation(course("h", 3, workerless), signal.SIGUSR1),
    }
    (folder / "results.json").write_text(json.dumps(results))


def main(folder: Path, campaign: str, number: int = 0) -> None:
    torch.set_num_threads(1)
    if campaign == "once":
        return once(folder)
    began = time.monotonic()
    figures = {"signals": signals, "workerless": workerless}[campaign](folder, number)
    return print(f"{figures}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
