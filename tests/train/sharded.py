"""The same training with the model in shards and whole, on one rank and on several; run as ``sharded.py FOLDER``.

``sharded.py FOLDER KILLS`` only kills it so often amid its saves.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from srunddp.train import Callback, CheckpointConfig, Config, DDPConfig, FSDPConfig, Trainer
from srunddp.train.checkpoint import resharding, sharded
from srunddp.train.checkpoint.directory import CheckpointDirectory
from tests.train.course import until
from tests.train.forked import start, world_of
from tests.train.local_world import LocalWorld
from tests.train.problems import Scale, classes, message

BF16 = FSDPConfig(modules=("Block",), param_dtype="bf16")


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), norm(16)

    def forward(self, inputs: Any) -> Any:
        return inputs + torch.relu(self.norm(self.linear(inputs)))


def network(seed: int = 0, norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    """With a number of outputs that no number of ranks divides."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), Block(norm), Block(norm), nn.Dropout(0.1), nn.Linear(16, 5))


class Stops(Callback):
    def __init__(self, step: int | None) -> None:
        self.losses: list[float | None] = []
        self._step = step

    def on_step(self, trainer: Trainer, step: int, loss: float | None) -> None:
        self.losses.append(loss)
        if step == self._step:
            assert until(Path(trainer.config.output_dir or "", "checkpoints", f"step-{step - 1:08}.pt").exists)
            raise KeyboardInterrupt


def config(parallel: str = "fsdp", folder: Path | None = None, **changes: Any) -> Config:
    fsdp = FSDPConfig(modules=("Block",)) if parallel == "fsdp" else FSDPConfig()
    kept = (
        {"output_dir": str(folder), "resume": "auto", "checkpoint": CheckpointConfig(every_steps=2)} if folder else {}
    )
    return Config(
        **({"epochs": 2, "batch_size": 4, "accumulation": 2, "tensorboard": False, "parallel": parallel, "fsdp": fsdp})
        | kept
        | changes
    )


def train(
    world: LocalWorld,
    settings: Config,
    stop: int | None = None,
    norm: type[nn.Module] = nn.BatchNorm1d,
    optimizing: Any = torch.optim.AdamW,
    built_on: str = "cpu",
) -> dict[str, Any]:
    with torch.device(built_on):
        model, journal = network(world.rank, norm), Stops(stop)  # all are to begin with rank 0's
    if built_on == "meta":
        torch.manual_seed(world.rank)
    optimizer = optimizing(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), settings, world=world, callbacks=[journal])
    torch.manual_seed(world.rank)  # of the dropout
    try:
        records = trainer.fit(classes(120), classes(30))
    except KeyboardInterrupt:
        return {}
    return {
        "losses": journal.losses[1:],
        "records": [(record.train, record.test) for record in records],
        "weights": {name: whole(tensor) for name, tensor in trainer.model.state_dict().items()},
        "state": [{name: whole(each) for name, each in values.items()} for values in optimizer.state.values()],
        "own": sum(local(parameter).numel() for parameter in trainer.model.parameters()),
        "all": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(ranks: int, folder: Path, *args: Any) -> Any:
    return world_of(ranks, folder / "world", train, *args) if ranks > 1 else [train(LocalWorld(), *args)]


def failing_disk(world: LocalWorld, folder: Path) -> Any:
    """Rank 1's disk is full when the first checkpoint is written, and broken when the second is read back.

    At first rank 0's does not list its files either.
    """
    if world.rank == 0:
        CheckpointDirectory.remove_leftovers = failing_once(CheckpointDirectory.remove_leftovers, errno.EIO)
    if world.rank == 1:
        FileSystemWriter.write_data = failing_once(FileSystemWriter.write_data, errno.ENOSPC)
        sharded._digest = failing_once(sharded._digest, errno.EIO)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        result = train(world, config("fsdp", folder))
    return result, printed.getvalue()


def failing_once(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    errors = [OSError(number, os.strerror(number))]

    def failing(*args: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return function(*args, **named)

    return failing


def unshared(world: LocalWorld, folder: Path) -> str:
    """Each rank sees another folder there, as on nodes of their own; through a link, as the path is the same."""
    folder.mkdir(exist_ok=True)
    exists, resharding._VISIBLE_WITHIN = Path.exists, 0.1
    if world.rank == 1:
        Path.exists = lambda path: path.suffix != ".tmp" and exists(path)
    return message(lambda: train(world, config("fsdp", folder)))


def killed(folder: Path, kills: int) -> Any:
    """All ranks killed amid a save, again and again; what is left then, and the run that ends."""
    place, amid = folder / "killed", 0
    settings = config("fsdp", place, checkpoint=CheckpointConfig(every_steps=1))
    for _ in range(kills):
        known = set(place.glob("checkpoints/*.shards"))
        ranks = start(2, folder / "world", train, settings)
        until(lambda known=known: set(place.glob("checkpoints/*.shards")) - known)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        files = {path.stem for path in place.glob("checkpoints/step-*.pt")}
        amid += any(path.name.partition(".")[0] not in files for path in place.glob("checkpoints/*.shards"))
    result = run(2, folder, settings)
    return amid, result, sorted(path.name.partition(".")[0] for path in place.glob("checkpoints/step-*"))


def refused(world: LocalWorld) -> list[str]:
    cases: list[dict[str, Any]] = [
        {"precision": "fp16"},
        {"ema_decay": 0.9},
        {"ddp": DDPConfig(hook="fp16")},
        {"fsdp": FSDPConfig(modules=("Blok",))},
        {"fsdp": BF16},
        {"parallel": "ddp", "fsdp": BF16},
    ]
    usual: dict[str, Any] = {"parallel": "fsdp", "fsdp": FSDPConfig(modules=("Block",))}
    messages = [message(lambda case=case: train(world, config(**(usual | case)))) for case in cases]
    sgd, fused = torch.optim.SGD, partial(torch.optim.SGD, fused=True)
    parts = [
        (network(), fused),
        (network(), torch.optim.Rprop),
        (nn.Sequential(network(), Scale()), sgd),
        (Tied(), sgd),
        (nn.Sequential(network(), nn.Embedding(2, 2, sparse=True)), sgd),
        (nn.Sequential(network(), nn.Linear(5, 5).double()), sgd),
        (in_shards(world, network(), sgd), sgd),
    ]
    return messages + [message(lambda part=part: in_shards(world, *part)) for part in parts]


class Tied(nn.Module):
    """A parameter that two modules share, of which one is gathered by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(nn.LayerNorm), nn.Linear(16, 16)
        self.last.weight = self.block.linear.weight


def in_shards(world: LocalWorld, model: nn.Module, optimizing: Any = torch.optim.SGD) -> Any:
    return Trainer(model, optimizing(model.parameters()), nn.CrossEntropyLoss(), config("fsdp"), world=world).model


def adopted(world: LocalWorld) -> Any:
    """The state of an optimizer that has made a step, before and after its parameters become shards."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    before = [values["momentum_buffer"] for values in optimizer.state.values()]
    Trainer(model, optimizer, nn.CrossEntropyLoss(), config("fsdp"), world=world)
    after = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
    return before, list(map(whole, after)), [local(each).numel() for each in after]


def peak(world: LocalWorld) -> float:
    """MiB of memory that a rank needed at most to have its shards of 384 MiB."""
    with torch.device("meta"):
        model = nn.Sequential(*(Wide() for _ in range(6)))
    Path("/proc/self/clear_refs").write_text("5")  # the highest is what there is now
    before = memory("VmRSS")
    optimizer = torch.optim.SGD(model.parameters())
    settings = config("fsdp", fsdp=FSDPConfig(modules=("Wide",)))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), settings, world=world)
    assert local(next(trainer.model.parameters())).shape == (2048, 4096)
    return memory("VmHWM") - before


class Wide(nn.Module):
    """64 MiB, of which glibc gives what is freed back to the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4096, 4096, bias=False)

    def forward(self, inputs: Any) -> Any:
        return self.linear(inputs)


def memory(name: str) -> float:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) / 1024


class Resets(nn.Sequential):
    """Sets what is in it."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def reset_in_shards(world: LocalWorld) -> str:
    with torch.device("meta"):
        model = Resets(Block(nn.LayerNorm), nn.Linear(16, 5))
    return message(lambda: in_shards(world, model))


def with_gaps(world: LocalWorld) -> Any:
    """Rank 0's buffer that is a part of a wider one."""
    model = network(0, nn.LayerNorm)
    model.register_buffer("part", torch.full((3, 4), float(world.rank))[:, :2])
    return in_shards(world, model).part


def elsewhere(world: LocalWorld, folder: Path) -> Any:
    """A run in a relative folder, and one that goes on from a checkpoint amid it; the folder then."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    settings = config("fsdp", Path("run"), checkpoint=CheckpointConfig(every_steps=4, keep_last=9))
    first = train(world, settings, None, nn.BatchNorm1d, torch.optim.Adagrad)
    keeping = CheckpointConfig(every_steps=4, keep_last=1, keep_best=0)
    asked = replace(settings, resume="run/checkpoints/step-00000004.pt", checkpoint=keeping)
    with contextlib.redirect_stderr(io.StringIO()):
        second = train(world, asked, None, nn.BatchNorm1d, torch.optim.Adagrad)
    return first, second, sorted(path.name for path in Path("run/checkpoints").glob("step-*"))


def resumed(folder: Path) -> dict[str, Any]:
    """Of checkpoints in shards and in one file, on as many ranks and on others."""
    stopped, ddp, more = folder / "stopped", folder / "ddp", folder / "more"
    for place in (stopped, more):
        run(2, folder, config("fsdp", place), 5)
    results = {
        "went on": run(2, folder, config("fsdp", stopped)),
        "on more ranks": run(3, folder, config("fsdp", more)),
    }
    run(2, folder, config("ddp", ddp))
    # All epochs are done: these load what is there, and nothing else.
    results["3 ranks"] = run(3, folder, config("fsdp", stopped))
    results["whole, 2 ranks"] = run(2, folder, config("ddp", stopped))
    results["whole, alone"] = run(1, folder, config("fsdp", stopped))
    results["in shards, of one file"] = run(3, folder, config("fsdp", ddp))
    return results


def main(folder: Path, *kills: str) -> None:
    torch.set_num_threads(1)
    if kills:
        results = {"alike": {"fsdp": run(2, folder, config("fsdp"))}, "killed": killed(folder, int(kills[0]))}
    else:
        results = all_results(folder)
    torch.save(results, folder / "results.pt")


def all_results(folder: Path) -> dict[str, Any]:
    return {
        "alike": {parallel: run(2, folder, config(parallel)) for parallel in ("ddp", "fsdp")},
        "clipped": {parallel: run(2, folder, config(parallel, clip_norm=0.5)) for parallel in ("ddp", "fsdp")},
        "bf16": run(2, folder, config("fsdp", fsdp=BF16), None, nn.LayerNorm),
        "checkpointed": run(2, folder, config("fsdp", ddp=DDPConfig(activation_checkpointing=("Block",)))),
        "sgd": {name: run(2, folder, config(name), None, nn.BatchNorm1d, torch.optim.SGD) for name in ("ddp", "fsdp")},
        "deferred": run(2, folder, config("fsdp"), None, nn.BatchNorm1d, torch.optim.AdamW, "meta"),
        "peaks": world_of(2, folder / "world", peak),
        "reset in shards": world_of(2, folder / "world", reset_in_shards),
        "with gaps": world_of(2, folder / "world", with_gaps),
        "adopted": world_of(2, folder / "world", adopted),
        "elsewhere": world_of(2, folder / "world", elsewhere, folder / "elsewhere"),
        "refused": world_of(2, folder / "world", refused),
        "resumed": resumed(folder),
        "failing disk": world_of(2, folder / "world", failing_disk, folder / "failing"),
        "unshared": world_of(2, folder / "world", unshared, folder / "unshared"),
        "killed": killed(folder, 3),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
