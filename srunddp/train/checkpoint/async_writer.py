"""Writes checkpoints beside training, one at a time."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from srunddp.telemetry import event
from srunddp.train.checkpoint.directory import Shelf
from srunddp.train.checkpoint.file import CheckpointError
from srunddp.train.checkpoint.snapshot import Snapshot

_NICENESS = 10  # where no core is free, training has nine tenths of its own, and the writer is not starved
_CURES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EFBIG: "raise the limit on the size of files",
    errno.ENOENT: "make the folder again",
}
_OTHER_CURE = "check the file system, and that you may write there"
_THREAD = "checkpoint"
T = TypeVar("T")


class Writer:
    """Writes the checkpoints of a shelf in a thread of its own, so that training waits for the copy alone.

    What the disk refuses does not end training: see :meth:`news`. Python's end waits for the thread.
    """

    def __init__(self, shelf: Shelf, add: Callable[[int, dict[str, Any]], None] | None = None) -> None:
        """Args:
        add: writes a step's state; ``shelf.add`` by default.
        """
        self._shelf = shelf
        self._add_to_shelf = add or shelf.add
        self._snapshot = Snapshot()
        # Of a run in this process that has failed: two at once would remove each other's temporary files.
        for thread in threading.enumerate():
            if thread.name == _THREAD:
                thread.join()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failed: CheckpointError | None = None
        self._problems: list[str] = []
        self._written: list[int] = []

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy the state and begin to write it; first wait for the checkpoint before to be done.

        Raises:
            CheckpointError: the checkpoint before held something that cannot be loaded again.
        """
        self._join()
        copied = self._snapshot.take(dict(state))
        # No daemon: Python would end it amid torch's C++, which aborts the process.
        self._thread = threading.Thread(target=self._add, args=(step, copied), name=_THREAD, daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        self._join()
        if self._failed is not None:
            raise self._failed

    def news(self) -> tuple[list[str], list[int]]:
        """Since the last call: why checkpoints could not be written, and the steps of those that were."""
        return _taken(self._problems), _taken(self._written)

    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _add(self, step: int, state: dict[str, Any]) -> None:
        with suppress(OSError):  # the rank may be that nice already
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        began = time.monotonic()
        try:
            self._add_to_shelf(step, state)
        except OSError as error:
            self._failed = self._failure(step, error)
            self._problems.append(str(self._failed))
        except BaseException as error:  # the caller's mistake, and ours: raised where the caller is
            self._error = error
        else:
            self._failed = None
            self._written.append(step)
            event("checkpoint_written", time.monotonic() - began)

    def _failure(self, step: int, error: OSError) -> CheckpointError:
        last = self._shelf.last_whole()
        return CheckpointError(
            f"the checkpoint of step {step} could not be written: {error}",
            expected=f"a file in {self._shelf.folder}; the last whole one is {last.name if last else 'none'}",
            cure=_CURES.get(error.errno or 0, _OTHER_CURE),
        )


def _taken(list_: list[T]) -> list[T]:
    """All that is in a list to which another thread may add, and no longer then."""
    return [list_.pop(0) for _ in range(len(list_))]
