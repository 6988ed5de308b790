"""Training loops of srunddp and of others, for ``loop.py``: one way in a process of its own, which
serves all cases.

It reads a case as a line of JSON, trains for an epoch, and prints what a step took in milliseconds.

    python -m tests.benchmarks.training_loops WAY RANK RANKS FOLDER
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    default_collate,
)

import srunddp
from srunddp.train import CheckpointConfig, Config, DataLoaderConfig
from tests.train.local_world import LocalWorld

BATCH = 64


@dataclass(frozen=True)
class Task:
    """What all ways do in a case: so many steps of a network of this width.

    Attributes:
        data: ``samples``, read one by one; ``tensors`` in memory; or a ``stream``.
        metrics: ten, ``functions`` or those of ``torchmetrics``, or none.
        save_every: so many steps the model and the optimizer are saved; 0 for never.
    """

    width: int
    steps: int
    data: str = "samples"
    metrics: str = ""
    save_every: int = 0


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Read one by one, as from files."""

    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(count, 64)
        self.targets = torch.randint(10, (count,))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same in turn."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.samples.inputs, self.samples.targets, strict=True)


def data_of(task: Task, ranks: int = 1) -> Any:
    samples = Samples(task.steps * BATCH * ranks)
    if task.data == "stream":
        return Stream(samples)
    return TensorDataset(samples.inputs, samples.targets) if task.data == "tensors" else samples


def loader_of(data: Any, rank: int = 0, ranks: int = 1) -> DataLoader[Any]:
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=BATCH)
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, ranks, rank))


def network(width: int, watch: Watch) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    model.register_forward_pre_hook(watch.step)
    return model


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def is_among(count: int, outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the target is among so many classes with the highest scores, for each sample."""
    return (outputs.topk(count).indices == targets[:, None]).any(dim=1)


FUNCTIONS = {f"top {count}": partial(is_among, count) for count in range(1, 11)}


class Means:
    """Of these functions, as a loop by hand has them."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(FUNCTIONS, 0)
        self.count = 0

    @torch.no_grad()
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        for name, function in FUNCTIONS.items():
            self.sums[name] += function(outputs, targets).sum()  # type: ignore[assignment]
        self.count += len(targets)

    def compute(self) -> dict[str, float]:
        return {name: int(total) / self.count for name, total in self.sums.items()}

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


def collection() -> Any:
    from torchmetrics import MetricCollection, classification

    kinds = ("Accuracy", "Precision", "Recall", "F1Score", "Specificity")
    each = {name: getattr(classification, f"Multiclass{name}") for name in kinds}
    averages = ("micro", "macro")
    return MetricCollection(
        {f"{name} {a}": kind(10, average=a) for name, kind in each.items() for a in averages}
    )


def metrics_of(task: Task) -> Any:
    """None, or what has ``update``, ``compute`` and ``reset``."""
    return {"": lambda: None, "functions": Means, "torchmetrics": collection}[task.metrics]()


class Watch:
    """What a step takes, from one forward pass to the next: of spans of so many steps the one that
    took least.
    """

    def __init__(self, span: int) -> None:
        self.span = span
        self.steps = 0
        self.times = list[tuple[float, float]]()

    def step(self, *_: Any) -> None:
        if self.steps % self.span == 0:
            self.times.append((time.process_time(), time.perf_counter()))
        self.steps += 1

    def figures(self) -> dict[str, float]:
        """All threads' CPU time, and wall-clock time, in milliseconds."""
        clocks = zip(*self.times, strict=True)
        cpu, wall = (
            min(end - start for start, end in itertools.pairwise(clock)) for clock in clocks
        )
        return {"CPU": 1000 * cpu / self.span, "wall": 1000 * wall / self.span}


@dataclass
class Place:
    """Where a way trains: its rank of so many, and a folder of its own."""

    rank: int
    ranks: int
    folder: Path
    watch: Watch


Epoch = Callable[[], object]


def looping(
    task: Task,
    place: Place,
    model: Any,
    optimizer: Any,
    loader: Any,
    backward: Callable[[Tensor], object] = Tensor.backward,
    save: Callable[[Any, Path], object] = torch.save,
) -> Epoch:
    """An epoch of a loop by hand."""
    loss_function = nn.CrossEntropyLoss()
    metrics = metrics_of(task)
    epochs = itertools.count()

    def checkpoint(step: int) -> None:
        if place.rank == 0:
            new = place.folder / "checkpoint.new"
            save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                new,
            )
            new.replace(place.folder / f"{step}.pt")

    def epoch() -> None:
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch:
            set_epoch(next(epochs))
        model.train()
        total = 0.0
        for step, (inputs, targets) in enumerate(loader, 1):
            optimizer.zero_grad(set_to_none=True)
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
            backward(loss)
            optimizer.step()
            total += loss.item() * len(targets)
            if metrics:
                metrics.update(outputs.detach(), targets)
            if task.save_every and step % task.save_every == 0:
                checkpoint(step)
        if metrics:
            metrics.compute()
            metrics.reset()

    return epoch


def by_hand(task: Task, place: Place, **ddp: Any) -> Epoch:
    """With ``ddp``: in DistributedDataParallel with these settings."""
    model: nn.Module = network(task.width, place.watch)
    if ddp:
        model = DistributedDataParallel(model, **ddp)
    return looping(
        task,
        place,
        model,
        adam(model),
        loader_of(data_of(task, place.ranks), place.rank, place.ranks),
    )


def train(trainer: Any, data: Any, epochs: int = 1) -> None:
    """So many epochs more, without a word."""
    trainer.config = replace(trainer.config, epochs=trainer.state.epoch + epochs)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(data)


def ours(task: Task, place: Place) -> Epoch:
    model = network(task.width, place.watch)
    checkpoint = CheckpointConfig(every_epochs=0, every_steps=task.save_every)
    folder = str(place.folder) if task.save_every else None
    config = Config(
        batch_size=BATCH, dataloader=DataLoaderConfig(num_workers=0), checkpoint=checkpoint
    )
    config = replace(config, output_dir=folder, log_every=0, tensorboard=False)
    if task.metrics == "functions":
        metrics = FUNCTIONS
    elif task.metrics:
        metrics = {"all": metrics_of(task)}
    else:
        metrics = {}
    trainer = srunddp.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        nn.CrossEntropyLoss(),
        config,
        world=LocalWorld(place.rank, place.rank, place.ranks),
        metrics=metrics,
    )
    return partial(train, trainer, data_of(task, place.ranks))


def fabric(task: Task, place: Place) -> Epoch:
    from lightning.fabric import Fabric

    run = Fabric(accelerator="cpu", devices=1)
    run.launch()
    model = network(task.width, place.watch)
    model, optimizer = run.setup(model, adam(model))
    loader = run.setup_dataloaders(loader_of(data_of(task)))
    return looping(
        task,
        place,
        model,
        optimizer,
        loader,
        run.backward,
        lambda state, path: run.save(path, state),
    )


def accelerate(task: Task, place: Place) -> Epoch:
    from accelerate import Accelerator

    run = Accelerator(cpu=True)
    model = network(task.width, place.watch)
    model, optimizer, loader = run.prepare(model, adam(model), loader_of(data_of(task)))
    return looping(task, place, model, optimizer, loader, run.backward, run.save)


def lightning(task: Task, place: Place) -> Epoch:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(task.width, place.watch)
            self.metrics = metrics_of(task)
            self.loss = nn.CrossEntropyLoss()

        def training_step(self, batch: Any, index: int) -> Tensor:
            outputs = self.model(batch[0])
            if self.metrics:
                self.metrics.update(outputs.detach(), batch[1])
            return self.loss(outputs, batch[1])  # type: ignore[no-any-return]

        def on_train_epoch_end(self) -> None:
            if self.metrics:
                self.metrics.compute()
                self.metrics.reset()

        def configure_optimizers(self) -> Any:
            return adam(self.model)

    saving = partial(ModelCheckpoint, place.folder, save_on_train_epoch_end=False)
    callbacks: Any
    if task.save_every:
        callbacks = [saving(every_n_train_steps=task.save_every)]
    else:
        callbacks = []
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    off["enable_checkpointing"] = bool(task.save_every)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=0, callbacks=callbacks, **off
    )
    module = Module()
    loader = loader_of(data_of(task))

    def epoch() -> None:
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)

    return epoch


def hugging_face(task: Task, place: Place) -> Epoch:
    import transformers

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(task.width, place.watch)
            self.loss = nn.CrossEntropyLoss()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = self.model(inputs)
            return {"loss": self.loss(outputs, labels), "logits": outputs}

    arguments = transformers.TrainingArguments(
        output_dir=str(place.folder),
        per_device_train_batch_size=BATCH,
        max_steps=task.steps,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="steps" if task.save_every else "no",
        save_steps=task.save_every or 500,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
    )
    model = WithLoss()
    trainer = transformers.Trainer(
        model,
        arguments,
        data_collator=lambda rows: dict(
            zip(("inputs", "labels"), default_collate(rows), strict=True)
        ),
        train_dataset=data_of(task),
        optimizers=(adam(model), None),
    )
    return trainer.train


OURS = "srunddp"
DDP = "DDP by hand"
STOCK = "DDP with torch's settings"
BARE = "bare by hand"
PEERS = {
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Hugging Face": hugging_face,
}
WAYS: dict[str, Callable[[Task, Place], Epoch]] = {
    OURS: ours,
    DDP: partial(by_hand, gradient_as_bucket_view=True),
    STOCK: partial(by_hand, gradient_as_bucket_view=False),
    BARE: by_hand,
    **PEERS,
}


def main(way: str, rank: str, ranks: str, folder: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if way not in PEERS:  # they would take part in it
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=int(rank),
            world_size=int(ranks),
        )
    kept = []
    for line in sys.stdin:
        # A step's time depends on where its tensors lie in memory, by some per cent: elsewhere in
        # each repeat.
        kept.append(torch.empty(random.randrange(100_000)))
        task = Task(**json.loads(line))
        watch = Watch(task.save_every or max(1, task.steps // 8))
        with TemporaryDirectory(dir=folder) as own:
            epoch = WAYS[way](task, Place(int(rank), int(ranks), Path(own), watch))
            gc.collect()
            epoch()
        answers.write(json.dumps(watch.figures()) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
