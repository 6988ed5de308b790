"""The checkpoints of one folder: which is the newest whole one, and which are kept."""

import errno
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any

from srunddp.train.checkpoint.file import (
    OWN,
    AnotherRunError,
    CheckpointError,
    generation_of,
    load_checkpoint,
    remove_temporaries,
    sync_folder,
    verify,
    write_checkpoint,
)
from srunddp.util.atomic_file import replace_file
from srunddp.util.shared_file import NotPlainError, read_plain_text

_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})\.pt")
_BEST = "best.pt"
_GENERATION = "generation"
_HINTS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EFBIG: "raise the limit on the size of files",
    errno.ENOENT: "make the folder again",
}


def disk_hint(error: OSError) -> str:
    """Return what the user can do where a file cannot be written.

    Args:
        error: The disk's.
    """
    return _HINTS.get(error.errno or 0, "check the file system, and that you may write there")


def _is_as_written(own: object) -> bool:
    """Whether what CheckpointManager adds to a state has the types that it writes.

    The file is whole, but anybody who may write into the folder may have made it.
    """
    if not isinstance(own, dict):
        return False
    numbers = [own.get(name, 0) for name in ("step", "world_size", "generation")]
    scores = own.get("scores", {})
    return (
        all(type(number) is int for number in numbers)
        and isinstance(own.get("random", []), list)
        and isinstance(scores, dict)
        and all(type(step) is int for step in scores)
        and all(isinstance(score, int | float) for score in scores.values())
    )


class CheckpointDirectory:
    """Files ``step-00000120.pt``, named after the optimizer's step, and a link ``best.pt`` to the
    best of them.

    One process alone writes; others may read meanwhile. Each run has a number, which is in its
    checkpoints. That of the run that has begun last is in the file ``generation``: what any other
    run writes is refused.

    Attributes:
        folder: Where they are.
        scores: By step, less is better; the caller fills it in and keeps it in the checkpoints.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: int) -> None:
        """Read nothing yet.

        Args:
            folder: Of one run; the caller makes it.
            keep_last: So many of the newest stay.
            keep_best: So many of the best stay, too.
        """
        self.folder = folder
        self.scores: dict[int, float] = {}
        self._keep_last = keep_last
        self._keep_best = keep_best
        # Steps whose files this process has found to be whole: to hash one again takes minutes.
        self._whole: set[int] = set()
        # The numbers of this run and of the one before it; 0 for none.
        self._generation = 0
        self._former = 0

    def path(self, step: int) -> Path:
        """Return where a checkpoint is, or would be.

        Args:
            step: Of it.
        """
        return self.folder / f"step-{step:08}.pt"

    def steps(self) -> list[int]:
        """Return the steps that have a file, whole or not, in ascending order."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def last_whole(self) -> Path | None:
        """Return the newest checkpoint that this process wrote, loaded or checked."""
        if not self._whole:
            return None
        return self.path(max(self._whole))

    def newest(
        self, log: Callable[[str], None], *, mmap: bool = False
    ) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest whole checkpoint with its content; None where there is none.

        A checkpoint of a run that had been replaced does not count. Such a run was requeued, or
        started a second time, while a process of it still wrote: its last file may have a later
        step than those of its successor, and be of another course of training. It is renamed.

        Args:
            log: Told of each file that is passed over.
            mmap: As for ``torch.load``.
        """
        tried: set[int] = set()
        # Listed anew: who writes may have deleted one meanwhile.
        while left := set(self.steps()) - tried:
            step = max(left)
            tried.add(step)
            try:
                state = load_checkpoint(self.path(step), mmap=mmap)
            except CheckpointError as error:
                # A file that is gone was pruned by the run that writes here: nothing to report.
                if os.path.lexists(self.path(step)):
                    log(f"ignored {str(error).partition(';')[0]}")
                continue
            if not _is_as_written(state.get(OWN, {})):
                log(f"ignored {self.path(step)}: CheckpointManager has not written it so")
                continue
            if self._is_of_a_replaced_run(state, left):
                self.archive_newer(step - 1)
                log(
                    f"{self.path(step)} is of an earlier run than a checkpoint before it, and was"
                    " set aside"
                )
                continue
            self._whole.add(step)
            return self.path(step), state
        return None

    def _is_of_a_replaced_run(self, state: Mapping[str, Any], steps: set[int]) -> bool:
        """Return whether a later run than that of ``state`` has written one of these steps."""
        own = state.get(OWN, {}).get("generation", 0)
        # Most often the checkpoint is of the run just before this one, and no file is opened.
        if own >= self._former:
            return False
        return any(generation_of(self.path(step)) > own for step in steps)

    def begin(self) -> None:
        """Begin a run that writes here; what an earlier run writes is refused from now on.

        A second call does nothing.

        Raises:
            OSError: The file ``generation`` cannot be written.
        """
        if self._generation:
            return
        self._former = self._latest()
        # The time and not a count: two runs that begin at once would count to the same number. At
        # least one more than the former, as the clock of another node may be ahead.
        generation = max(self._former + 1, time.time_ns())
        replace_file(self.folder / _GENERATION, b"%d\n" % generation)
        self._generation = generation
        # After the number was replaced: a run that has checked its own number there, and now
        # renames its temporary file, then finds it gone, and its checkpoint does not come to be.
        for name in ("step-*.pt", _BEST):
            remove_temporaries(self.folder, name)

    def add(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step, and then delete those that need not be kept.

        Args:
            step: After which the state was taken.
            state: Tensors and plain values.

        Raises:
            CheckpointError: The state cannot be loaded again, or another run has begun here;
                nothing was deleted then.
            OSError: The disk refuses it; nothing was deleted then.
        """
        self.begin()
        state = {**state, OWN: {**state.get(OWN, {}), "generation": self._generation}}
        write_checkpoint(self.path(step), state, self._check_generation)
        self._whole.add(step)
        self._prune(step)

    def archive_newer(self, after: int) -> list[Path]:
        """Rename the checkpoints of later steps to ``*.pt.aside``, as a run starts again from
        ``after``.

        Else they would be the newest, though they are from another course of training.

        Args:
            after: The step of the last one that keeps its name.

        Returns:
            The new paths.
        """
        renamed = []
        # The newest first: a kill in between leaves no gap in the checkpoints of that course.
        for step in reversed(self.steps()):
            if step > after:
                renamed.append(self.path(step).with_suffix(".pt.aside"))
                os.replace(self.path(step), renamed[-1])
                self._whole.discard(step)
        if renamed:
            # exists() follows the link: it is false where the link leads to a file that was
            # renamed.
            link = self.folder / _BEST
            if not link.exists():
                link.unlink(missing_ok=True)
            sync_folder(self.folder)
        return renamed

    def _prune(self, added: int) -> None:
        """Delete the checkpoints that are neither among the newest nor among the best.

        Args:
            added: The step that was just written; it is kept.
        """
        steps = self.steps()
        newest = self._first_whole(reversed(steps), self._keep_last)
        # A copy: this runs in the writer's thread, and training adds scores meanwhile.
        scores = dict(self.scores)
        scored = [step for step in steps if not math.isnan(scores.get(step, math.nan))]
        best = self._first_whole(sorted(scored, key=scores.__getitem__), self._keep_best)
        kept = {added, *newest, *best}
        # Only now: to see whether files are whole may have taken minutes, and another run may have
        # begun meanwhile, whose checkpoints are not ours to delete.
        self._check_generation()
        # Before the others are deleted: the link never leads to a file that is gone.
        if best:
            self._link(best[0])
        for step in steps:
            if step not in kept:
                self.path(step).unlink(missing_ok=True)
                self._whole.discard(step)

    def _first_whole(self, steps: Iterable[int], count: int) -> list[int]:
        """Return the first of these steps whose files are whole, so many of them.

        Files after those are not read: a broken one among them is deleted like any other.
        """
        return list(islice(filter(self._is_whole, steps), count))

    def _latest(self) -> int:
        # There is no such file where the user has deleted it, or made the folder again.
        with suppress(FileNotFoundError, NotPlainError, ValueError):
            return int(read_plain_text(self.folder / _GENERATION))
        return 0

    def _check_generation(self) -> None:
        # 0: the user has deleted the file, which is no other run. One that begins just after this
        # look removes our temporary file, see begin().
        if self._latest() not in (0, self._generation):
            raise AnotherRunError(
                "another run has begun to write checkpoints here since, and this run's are refused",
                expected="one run at a time",
                hint=(
                    "nothing, if that run goes on with this training; else give each run a folder"
                    " of its own"
                ),
                where=str(self.folder),
            )

    def _is_whole(self, step: int) -> bool:
        if step not in self._whole:
            with suppress(CheckpointError):
                verify(self.path(step))
                self._whole.add(step)
        return step in self._whole

    def _link(self, step: int) -> None:
        """Have ``best.pt`` lead to the checkpoint of this step."""
        link = self.folder / _BEST
        name = self.path(step).name
        # Some file systems have no links; no checkpoint is to fail for that.
        with suppress(OSError):
            # By a rename, as whoever reads best.pt meanwhile is to find the old one or the new one.
            if not (link.is_symlink() and os.readlink(link) == name):
                temporary = self.folder / f"{_BEST}.{token_hex(4)}.tmp"
                temporary.symlink_to(name)
                os.replace(temporary, link)
                sync_folder(self.folder)
