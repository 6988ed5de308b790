"""PyTorch Ignite: an Engine, `idist.Parallel` and its `auto_` functions; `--spawn 2` starts two
ranks by itself.
"""

from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import DiskSaver
from ignite.metrics import Accuracy
from record import leave, network, options, samples


def train(local_rank: int, out: Path) -> None:
    torch.manual_seed(0)
    loader = idist.auto_dataloader(samples(), batch_size=32, shuffle=True)
    layers = network()
    model = idist.auto_model(layers)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    accuracies = []

    def step(engine: Engine, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        outputs = model(batch[0])
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()).hex())
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
    place = idist.get_rank(), idist.get_local_rank(), idist.get_world_size()
    leave(out, *place, losses, node_rank=idist.get_node_rank(), accuracies=accuracies)


def main() -> None:
    given = options(spawn={"type": int})
    with idist.Parallel(backend="gloo", nproc_per_node=given.spawn) as parallel:
        parallel.run(train, given.out)


if __name__ == "__main__":
    main()
