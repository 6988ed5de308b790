"""A training in which a rank fails in each of the first starts: ``restarted.py KIND TIMES
--output-dir=DIR``.

With the kind ``slow`` nothing fails by itself: each step takes a tenth of a second, and is noted in
DIR/steps.txt.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import srunddp

KIND = sys.argv[1]
TIMES = int(sys.argv[2])
START = srunddp.restart_count()


def memory() -> None:
    kept = []
    while True:
        kept.append(bytearray(1 << 24))


KINDS: dict[str, Callable[[], object]] = {
    "exception": lambda: [][0],
    "exit3": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(9),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stall": lambda: time.sleep(600),
    "memory": memory,
}


class Fails(srunddp.Callback):
    """In each start another rank, some steps behind the checkpoint with which that start began."""

    def on_fit_start(self, trainer: srunddp.Trainer) -> None:
        self.begin: int | None = None

    def on_step(self, trainer: srunddp.Trainer, step: int, loss: Tensor | None) -> None:
        if KIND == "slow":
            time.sleep(0.1)
            note = (
                f"{START} {step} {trainer.world.rank} {os.environ.get('SLURMD_NODENAME')}"
                f" {time.monotonic()}\n"
            )
            os.write(notes, note.encode())
        self.begin = step if self.begin is None else self.begin
        if (
            START < TIMES
            and trainer.world.rank == (START + 1) % trainer.world.world_size
            and step == self.begin + 12
        ):
            KINDS[KIND]()


torch.manual_seed(0)
config = srunddp.read_config(srunddp.Config, sys.argv[3:])
if KIND == "slow":
    assert config.output_dir
    os.makedirs(config.output_dir, exist_ok=True)
    notes = os.open(f"{config.output_dir}/steps.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
with srunddp.init() as world:
    data = TensorDataset(torch.randn(800, 8), torch.randint(3, (800,)))
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = srunddp.Trainer(
        model, optimizer, torch.nn.CrossEntropyLoss(), config, world=world, callbacks=[Fails()]
    )
    trainer.fit(data)
weights = hashlib.sha256(
    b"".join(each.detach().numpy().tobytes() for each in model.parameters())
).hexdigest()
print(json.dumps({"rank": world.rank, "restarts": START, "weights": weights}), flush=True)
if KIND == "memory" and world.rank == 3:
    time.sleep(3)  # the others have ended
