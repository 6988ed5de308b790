"""PyTorch Ignite: an Engine, `idist.Parallel` and its `auto_` functions; `--spawn 2` starts two ranks by itself."""

import argparse
import json
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import DiskSaver
from ignite.metrics import Accuracy
from torch.utils.data import TensorDataset


def train(local_rank: int, out: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(320, 10)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    loader = idist.auto_dataloader(data, batch_size=32, shuffle=True)
    layers = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
    model = idist.auto_model(layers)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses, accuracies = [], []

    def step(engine: Engine, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        outputs = model(batch[0])
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        return outputs.detach(), batch[1]

    trainer = Engine(step)
    Accuracy().attach(trainer, "accuracy")

    @trainer.on(Events.EPOCH_STARTED)
    def shuffled(engine: Engine) -> None:
        loader.sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.EPOCH_COMPLETED)
    def completed(engine: Engine) -> None:
        accuracies.append(engine.state.metrics["accuracy"])

    trainer.run(loader, max_epochs=2)
    DiskSaver(out, require_empty=False)(layers.state_dict(), "model.pt")
    record = {
        "rank": idist.get_rank(),
        "local_rank": idist.get_local_rank(),
        "node_rank": idist.get_node_rank(),
        "world_size": idist.get_world_size(),
        "losses": losses,
        "accuracies": accuracies,
    }
    (out / f"rank{idist.get_rank()}.json").write_text(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--spawn", type=int)
    options = parser.parse_args()
    with idist.Parallel(backend="gloo", nproc_per_node=options.spawn) as parallel:
        parallel.run(train, options.out)


if __name__ == "__main__":
    main()
