"""Trains with loader workers of a fork server, and meanwhile starts processes by each method and
terminates them: one at once, and one that has begun.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from srunddp.train import Callback, CheckpointConfig, DataLoaderConfig, Trainer
from srunddp.train.progress import EpochRecord
from tests.support.starting import LONG
from tests.train.problems import classes, trainer_of

NEVER = CheckpointConfig(every_epochs=0, keep_best=0)


def wait_for_ever(begun: Connection) -> None:
    begun.send(None)
    time.sleep(10 * LONG)


class Terminates(Callback):
    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        for method in ("fork", "spawn", "forkserver"):
            for at_once in (True, False):
                print(method, "ended with", terminated(method, at_once=at_once), flush=True)


def terminated(method: str, *, at_once: bool) -> int | None:
    # Each context has a Process, which the type of what they derive from does not say.
    context: Any = multiprocessing.get_context(method)
    reader, writer = context.Pipe(duplex=False)
    process: BaseProcess = context.Process(target=wait_for_ever, args=(writer,))
    process.start()
    if not at_once:
        assert reader.poll(LONG)
    process.terminate()
    process.join(LONG / 4)
    code = process.exitcode
    process.kill()
    return code


if __name__ == "__main__":
    workers = DataLoaderConfig(num_workers=1, multiprocessing_context="forkserver")
    trainer = trainer_of(Terminates(), dataloader=workers, checkpoint=NEVER)
    trainer.fit(classes(16))
