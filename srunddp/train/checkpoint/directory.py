"""The checkpoints of one folder: finds the newest complete one, and deletes those not kept."""

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
    """Return a hint for the user after a file could not be written.

    Args:
        error: The error of the write.
    """
    return _HINTS.get(error.errno or 0, "check the file system, and that you may write there")


def _is_as_written(own: object) -> bool:
    """Return whether the part that CheckpointManager adds to a state has the expected types.

    Check even complete files: anybody who may write to the folder may have made the file.
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

    Only one process writes; others may read meanwhile. Each run has a number, its generation, which
    is in its checkpoints. The file ``generation`` has the number of the run that began last: writes
    of any other run are refused.

    Attributes:
        folder: The folder of the checkpoints.
        scores: The score of each step, lower is better; the caller fills it in and saves it in the
            checkpoints.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: int) -> None:
        """Create the object; nothing is read yet.

        Args:
            folder: The folder of one run; the caller creates it.
            keep_last: How many of the newest checkpoints to keep.
            keep_best: How many of the best checkpoints to keep in addition.
        """
        self.folder = folder
        self.scores: dict[int, float] = {}
        self._keep_last = keep_last
        self._keep_best = keep_best
        # Steps whose files this process knows to be complete: hashing one again may take minutes.
        self._whole: set[int] = set()
        # The generations of this run and of the previous one; 0 for none.
        self._generation = 0
        self._former = 0

    def path(self, step: int) -> Path:
        """Return the path of a checkpoint, whether it exists or not.

        Args:
            step: The step of the checkpoint.
        """
        return self.folder / f"step-{step:08}.pt"

    def steps(self) -> list[int]:
        """Return the steps that have a file, complete or not, in ascending order."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def last_whole(self) -> Path | None:
        """Return the newest checkpoint that this process wrote, loaded or checked; None if there is
        no such checkpoint.
        """
        if not self._whole:
            return None
        return self.path(max(self._whole))

    def newest(
        self, log: Callable[[str], None], *, mmap: bool = False
    ) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest complete checkpoint with its content; None if there is none.

        A checkpoint of a replaced run does not count, and is renamed. Such a run was requeued or
        started a second time while one of its processes still wrote. Its last file may have a later
        step than those of its successor, although it belongs to another course of training.

        Args:
            log: Called with a line for each file that is ignored.
            mmap: As for ``torch.load``.
        """
        tried: set[int] = set()
        # List the files again each time: the writing process may have deleted one meanwhile.
        while left := set(self.steps()) - tried:
            step = max(left)
            tried.add(step)
            try:
                state = load_checkpoint(self.path(step), mmap=mmap)
            except CheckpointError as error:
                # A missing file was pruned by the run that writes here; there is nothing to report.
                if os.path.lexists(self.path(step)):
                    log(f"ignored {str(error).partition(';')[0]}")
                continue
            if not _is_as_written(state.get(OWN, {})):
                log(f"ignored {self.path(step)}: CheckpointManager did not write it like this")
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
        """Return whether one of these steps was written by a later run than ``state``."""
        own = state.get(OWN, {}).get("generation", 0)
        # Usually the checkpoint is from the run just before this one, and no file is opened.
        if own >= self._former:
            return False
        return any(generation_of(self.path(step)) > own for step in steps)

    def begin(self) -> None:
        """Begin a run that writes here; from now on, writes of earlier runs are refused.

        A second call does nothing.

        Raises:
            OSError: The file ``generation`` cannot be written.
        """
        if self._generation:
            return
        self._former = self._latest()
        # Use the time, because two runs that begin at once would count to the same number. Use at
        # least one more than the previous number, because another node's clock may be ahead.
        generation = max(self._former + 1, time.time_ns())
        replace_file(self.folder / _GENERATION, b"%d\n" % generation)
        self._generation = generation
        # Remove temporary files only after the number was replaced: if an earlier run has checked
        # the number just before, it does not find its temporary file when it renames it, and fails.
        for name in ("step-*.pt", _BEST):
            remove_temporaries(self.folder, name)

    def add(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step, then delete checkpoints that need not be kept.

        Args:
            step: The step after which the state was taken.
            state: Tensors and plain values.

        Raises:
            CheckpointError: The state could not be loaded again, or another run has begun here; in
                both cases nothing was deleted.
            OSError: The file cannot be written; nothing was deleted.
        """
        self.begin()
        state = {**state, OWN: {**state.get(OWN, {}), "generation": self._generation}}
        write_checkpoint(self.path(step), state, self._check_generation)
        self._whole.add(step)
        self._prune(step)

    def archive_newer(self, after: int) -> list[Path]:
        """Rename the checkpoints of steps later than ``after`` to ``*.pt.aside``, because the run
        continues from ``after``.

        Otherwise a later start would take them for the newest checkpoints of this run, although
        they belong to another course of training.

        Args:
            after: The step of the last checkpoint that keeps its name.

        Returns:
            The new paths of the renamed files.
        """
        renamed = []
        # Rename the newest first: a kill in between then leaves no gap among the old checkpoints.
        for step in reversed(self.steps()):
            if step > after:
                renamed.append(self.path(step).with_suffix(".pt.aside"))
                os.replace(self.path(step), renamed[-1])
                self._whole.discard(step)
        if renamed:
            # exists() follows the link: it is false if the link leads to a renamed file.
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
        # Copy: this runs in the writer's thread, and training adds scores meanwhile.
        scores = dict(self.scores)
        scored = [step for step in steps if not math.isnan(scores.get(step, math.nan))]
        best = self._first_whole(sorted(scored, key=scores.__getitem__), self._keep_best)
        kept = {added, *newest, *best}
        # Check only now: verifying the files may have taken minutes, and another run may have begun
        # meanwhile, whose checkpoints this run must not delete.
        self._check_generation()
        # Link before deleting the others, so that the link never leads to a missing file.
        if best:
            self._link(best[0])
        for step in steps:
            if step not in kept:
                self.path(step).unlink(missing_ok=True)
                self._whole.discard(step)

    def _first_whole(self, steps: Iterable[int], count: int) -> list[int]:
        """Return the first ``count`` of these steps whose files are complete.

        Files after these are not read: a damaged file among them is deleted like any other.
        """
        return list(islice(filter(self._is_whole, steps), count))

    def _latest(self) -> int:
        # The file is missing if the user has deleted it, or has created the folder again.
        with suppress(FileNotFoundError, NotPlainError, ValueError):
            return int(read_plain_text(self.folder / _GENERATION))
        return 0

    def _check_generation(self) -> None:
        # 0 means that the user has deleted the file, and not that another run has begun. A run that
        # begins just after this check removes our temporary file, so the rename fails: see begin().
        if self._latest() not in (0, self._generation):
            raise AnotherRunError(
                "another run has since begun to write checkpoints here, so this run may not",
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
        """Make ``best.pt`` a link to the checkpoint of this step."""
        link = self.folder / _BEST
        name = self.path(step).name
        # Some file systems have no symbolic links; a checkpoint must not fail because of that.
        with suppress(OSError):
            # Replace by a rename, so that a reader of best.pt finds either the old or the new file.
            if not (link.is_symlink() and os.readlink(link) == name):
                temporary = self.folder / f"{_BEST}.{token_hex(4)}.tmp"
                temporary.symlink_to(name)
                os.replace(temporary, link)
                sync_folder(self.folder)
