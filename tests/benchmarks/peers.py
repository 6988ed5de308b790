"""What a step costs with the loops of others, in one run with ours and a hand-written one.

Those that are installed are measured: Lightning and its Fabric (``lightning``), Accelerate (``accelerate``). One rank,
one thread, samples read one by one; the figure is the smallest CPU time per step over the hand-written loop's.

    python -m tests.benchmarks.peers [ROUNDS]
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from srunddp.train import import_torchvision
from tests.benchmarks import numbers
from tests.benchmarks.loop import BATCH, WIDTH, Samples, hand_written, looping, network, ours

ROUNDS = 15
STEPS = 150


def fabric(data: Any, width: int) -> Callable[[], None]:
    from lightning.fabric import Fabric

    run = Fabric(accelerator="cpu", devices=1)
    run.launch()
    model = network(width)
    model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    loader = run.setup_dataloaders(DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data)))
    return looping(model, optimizer, loader, run.backward)


def accelerate(data: Any, width: int) -> Callable[[], None]:
    from accelerate import Accelerator

    run = Accelerator(cpu=True)
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data))
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    return looping(model, optimizer, loader, run.backward)


def lightning(data: Any, width: int) -> Callable[[], None]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = network(width), nn.CrossEntropyLoss()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.loss(self.model(batch[0]), batch[1])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=0, **off)
    module, loader = Module(), DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data))

    def epoch() -> None:
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)

    return epoch


def main() -> None:
    (rounds,) = numbers(ROUNDS)
    torch.set_num_threads(1)
    import_torchvision()  # Lightning does, and fails where its build does not match torch's
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    data = Samples(STEPS * BATCH)
    kinds: dict[str, Callable[[Any, int], Callable[[], None]]] = {"by hand": hand_written, "srunddp": ours}
    if importlib.util.find_spec("lightning"):
        kinds |= {"Fabric": fabric, "Lightning": lightning}
    if importlib.util.find_spec("accelerate"):
        kinds |= {"Accelerate": accelerate}
    with contextlib.redirect_stderr(io.StringIO()):
        epochs = {name: kind(data, WIDTH) for name, kind in kinds.items()}
        best = dict.fromkeys(epochs, float("inf"))
        for _ in range(rounds):
            for name, epoch in epochs.items():
                start = time.process_time()
                epoch()
                best[name] = min(best[name], 1000 * (time.process_time() - start) / STEPS)
    for name, step in best.items():
        print(f"{name}: {step:.3f} ms a step, {step / best['by hand']:.3f} of the hand-written loop's", flush=True)


if __name__ == "__main__":
    main()
