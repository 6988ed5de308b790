"""Trainings of ``resumable.py`` that are killed or signalled and go on."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch import Tensor

from srunddp.errors import Stopped
from srunddp.train.checkpoint.file import verify
from srunddp.train.preemption import preemption
from tests.programs import resumable
from tests.train.local_world import LocalWorld, results, run_ranks, start_ranks

LONG = 180.0  # a limit that only what is broken reaches
ENDS_WITHIN = 20.0  # seconds from the last signal to the last rank's end, on a machine that is busy
SIGNAL_WITHIN = 5.0  # seconds, as a run near its end may have no such moment any more
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
DUMP_STACKS = signal.SIGHUP  # asks a rank for its stacks
Rank = ForkServerProcess
_CATCHES = re.compile(r"SigCgt:\s*([0-9a-f]+)")
_SAID = re.compile(r"stopped after step (\d+) by (SIG\w+); checkpoint (\S+?)(; not requeued.*)?")


def until(condition: Callable[[], object], limit: float = LONG) -> bool:
    """Whether it became true within the limit."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.003)
    return True


@dataclass
class Training:
    """One training of so many ranks, in a folder of its own, over all its runs.

    Attributes:
        left: the temporary files that killed saves of earlier runs have left.
    """

    folder: Path
    ranks: int
    arguments: tuple[str, ...] = ()
    left: set[Path] = field(default_factory=set)

    def clear(self) -> None:
        """Before a run: no rank has started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("pid*"):
            path.unlink()
        self.left = self._temporaries()

    def started(self) -> bool:
        """All ranks have come to their training since the last :meth:`clear`."""
        return len(list(self.folder.glob("pid*"))) == self.ranks

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())

    def saving(self) -> bool:
        """A save is going on, or was cut off."""
        return bool(self._temporaries() - self.left)

    def _temporaries(self) -> set[Path]:
        return set((self.folder / "checkpoints").glob("step-*.tmp"))

    def tested(self) -> int:
        """Test batches so far, on rank 0."""
        path = self.folder / "tested0"
        return path.stat().st_size if path.exists() else 0

    def step(self) -> int:
        """The last one of rank 0."""
        path = self.folder / "ids0"
        if path.exists():
            lines = path.read_text().splitlines()
        else:
            lines = []
        return int(lines[-1].split(maxsplit=1)[0]) if lines else 0

    def outcome(self) -> dict[str, Any]:
        """What it came to in the end, which must not depend on interruptions."""
        results = [
            json.loads((self.folder / f"result{rank}.json").read_text())
            for rank in range(self.ranks)
        ]
        return {
            "ids": [ids(self.folder / f"ids{rank}") for rank in range(self.ranks)],
            "results": results,
        }


def ids(path: Path) -> dict[int, Any]:
    """The samples by step."""
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines())
    return {int(step): json.loads(samples) for step, samples in lines}


def go_on(
    world: LocalWorld, folder: Path, arguments: Sequence[str], harmless: bool
) -> tuple[int, str]:
    """In a rank: train to the end, or until it is stopped; the exit code, and what was said.

    Args:
        harmless: signals that come before or after ``fit()`` end nothing.
    """
    faulthandler.register(DUMP_STACKS)
    if harmless:
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
    try:
        resumable.train(world, folder, *arguments)
    except Stopped as stopped:
        return stopped.code, str(stopped)
    return 0, ""


class LocalTraining(Training):
    """Whose runs are in local worlds."""

    def begin(self, *, harmless: bool = False) -> list[Rank]:
        """Start ranks that go on with it."""
        self.clear()
        return start_ranks(
            self.ranks, self.folder / "world", go_on, self.folder, self.arguments, harmless
        )

    def end(self, ranks: list[Rank], limit: float = LONG) -> list[tuple[int, str]]:
        """Each rank's exit code, and what it said; all must end by themselves."""
        wait_for(ranks, limit)
        assert [rank.exitcode for rank in ranks] == [0] * self.ranks
        return results(self.ranks, self.folder / "world")

    def finish(self) -> dict[str, Any]:
        """Leave it alone until it has ended."""
        self.end(self.begin(), 5 * LONG)
        return self.outcome()

    def check_files(self) -> None:
        """Whatever has a checkpoint's name is one."""
        for path in (self.folder / "checkpoints").glob("step-*.pt"):
            verify(path)


def wait_for(ranks: list[Rank], limit: float = LONG) -> None:
    """Until all have ended. Those that do not within the limit are asked where they are, and
    killed.
    """

    def all_ended() -> bool:
        return not any(rank.is_alive() for rank in ranks)

    if not until(all_ended, limit):
        for rank in ranks:
            send(rank, DUMP_STACKS)
        until(all_ended, 1.0)
    for rank in ranks:
        rank.kill()
        rank.join()


def send(rank: Rank, number: int) -> bool:
    """Whether it was there to get the signal."""
    with suppress(ProcessLookupError):
        if rank.is_alive():
            os.kill(rank.pid or 0, number)
            return True
    return False


# Moments: each waits for one, within a limit, and names it.


Moment = Callable[[Training, random.Random, float], str]


def at_random(training: Training, draw: random.Random, limit: float) -> str:
    until(training.started)
    time.sleep(draw.uniform(0.0, 0.4))
    return "at random"


def moment(name: str, passed: Callable[[Training], int]) -> Moment:
    """That in which a count of what has passed grows."""

    def wait(training: Training, draw: random.Random, limit: float) -> str:
        before = passed(training)
        return name if until(lambda: passed(training) > before, limit) else "at random"

    return wait


def epochs(training: Training) -> int:
    return training.step() // -(-resumable.SAMPLES // (training.ranks * 16))


def amid_a_save(training: Training, draw: random.Random, limit: float) -> str:
    return "at a save" if until(training.saving, limit) else "at random"


MOMENTS = (
    at_random,
    amid_a_save,
    moment("amid an evaluation", Training.tested),
    moment("at an epoch's end", epochs),
)


# Kills.


def kill(training: LocalTraining, moment: Moment, draw: random.Random) -> list[str]:
    """Kill a rank, and a little later the others, as their supervisors do; what it hit."""
    ranks = training.begin()
    when = moment(training, draw, LONG)
    first = 0 if moment is amid_a_save else draw.randrange(training.ranks)
    assert send(ranks[first], signal.SIGKILL), "it had ended before"
    time.sleep(draw.uniform(0.0, 0.05))
    for rank in ranks:
        rank.kill()
    wait_for(ranks)
    training.check_files()
    return [when, *["amid a save"] * training.saving()]


def kills(training: LocalTraining, *moments: Moment) -> tuple[list[list[str]], dict[str, Any]]:
    """What was hit, and what came of the training."""
    draw = random.Random(training.ranks)
    return [kill(training, moment, draw) for moment in moments], training.finish()


# Signals.


def signals(folder: Path, number: int, arguments: tuple[str, ...]) -> str:
    """Worlds of three and of two ranks in turn, each signalled until it is at its end."""
    draw = random.Random(number)
    counts = Counter[str]()
    slowest = 0.0
    reference = {
        ranks: LocalTraining(folder / f"uninterrupted{ranks}", ranks, arguments).finish()
        for ranks in (3, 2)
    }
    steps = {ranks: max(outcome["ids"][0]) for ranks, outcome in reference.items()}
    for training in trainings(folder, arguments):
        code = -1
        while code != 0:
            near = training.step() > steps[training.ranks] - 60
            started = training.begin(harmless=near)
            assert near or until(partial(all_catch, started))
            limit = LONG
            if counts["signals"] < number:
                send_some(training, started, draw, counts)
                limit = ENDS_WITHIN
            began = time.monotonic()
            code = agreed(training.end(started, limit))
            slowest = max(slowest, time.monotonic() - began) if limit == ENDS_WITHIN else slowest
            counts[f"runs that ended with {code}"] += 1
            training.check_files()
            assert not training.saving(), "what was begun to be written is left"
        assert training.outcome() == reference[training.ranks], training.folder
        if counts["signals"] >= number:
            described = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
            return f"{described}; the slowest end {slowest:.1f} s after the last signal"
    raise AssertionError


def send_some(
    training: LocalTraining, ranks: list[Rank], draw: random.Random, counts: Counter[str]
) -> None:
    """A few signals, the later ones while the first is being obeyed; each to one rank or to all."""
    moments = draw.choices(MOMENTS, weights=(3, 2, 2, 1))
    for number_sent in range(draw.randint(2, 6)):
        if number_sent == 0:
            when = moments[0](training, draw, SIGNAL_WITHIN)
        else:
            time.sleep(draw.uniform(0.0, 0.3))
            when = "after another"
        number = draw.choice(SIGNALS)
        for rank in ranks if draw.random() < 0.4 else [draw.choice(ranks)]:
            if send(rank, number):
                counts.update(("signals", when, number.name))


def agreed(ends: list[tuple[int, str]]) -> int:
    """The exit code that all ranks ended with, after the same step."""
    (code,) = {code for code, _ in ends}
    assert code in (0, 75, 143), ends
    if code:
        said = [_SAID.fullmatch(text) for _, text in ends]
        assert all(said), ends
        assert len({match and match.group(1, 2, 3) for match in said}) == 1, ends
        assert all((match and match[4] is not None) == (code == 75) for match in said), ends
    return code


def catches(rank: Rank) -> bool:
    """Whether this process handles the signals by now."""
    found = _CATCHES.search(Path(f"/proc/{rank.pid}/status").read_text())
    mask = int(found[1], 16) if found else 0
    return all(mask >> (number - 1) & 1 for number in SIGNALS)


def all_catch(ranks: Sequence[Rank]) -> bool:
    return all(map(catches, ranks))


def trainings(folder: Path, arguments: tuple[str, ...]) -> Any:
    """Endless; each is deleted once the next one is asked for."""
    number = 0
    while True:
        for ranks in (3, 2):
            number += 1
            yield LocalTraining(folder / f"training{number}", ranks, arguments)
            shutil.rmtree(folder / f"training{number}")


# A signal at a moment that is certain.


def signalled_amid_evaluation(
    world: LocalWorld, folder: Path, arguments: Sequence[str], number: int
) -> tuple[int, str]:
    """In a rank: the second one gets a signal in the third batch of an evaluation; all agree after
    each batch.
    """

    class Signalled(resumable.Network):
        batches = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.batches += not self.training
            if world.rank == 1 and self.batches == 3:
                os.kill(os.getpid(), number)
            return super().forward(inputs)

    resumable.Network = Signalled  # type: ignore[misc]
    preemption.MOST_STEPS = 1
    return go_on(world, folder, arguments, harmless=False)


def left_amid_evaluation(
    training: LocalTraining, number: int
) -> tuple[list[tuple[int, str]], int, dict[str, Any]]:
    """How the ranks ended, how many test batches there were, and what came of the training."""
    training.clear()
    ends = run_ranks(
        3,
        training.folder / "world",
        signalled_amid_evaluation,
        training.folder,
        training.arguments,
        number,
    )
    return ends, training.tested(), training.finish()
