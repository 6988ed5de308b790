"""A small GPT in a loop of one's own, without Trainer.

It stops upon a signal, and goes on to the bit when it is started again:
    srun --ntasks-per-node=2 srunddp docs/examples/own_loop.py --output-dir=runs/own_loop
    mpirun -n 2 srunddp docs/examples/own_loop.py
    python docs/examples/own_loop.py
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import srunddp
from srunddp.train import CheckpointManager, DistributedDataLoader, Preemption

NUMBERS = 11
LENGTH = 12
WIDTH = 48
SAVE_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Settings:
    epochs: int = 4
    output_dir: str = "runs/own_loop"


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS, WIDTH)
        self.places = nn.Embedding(LENGTH - 1, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUMBERS)

    # The mean loss of all numbers but the first.
    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1, device=text.device)
        hidden = self.layers(self.numbers(text[:, :-1]) + self.places.weight, mask)
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), text[:, 1:])


def train(world: srunddp.World, preemption: Preemption, settings: Settings) -> nn.Module:
    torch.manual_seed(0)
    first, difference = torch.randint(NUMBERS, (2, 4000, 1))
    # The first two numbers of a text tell all others.
    texts = (first + difference * torch.arange(LENGTH)) % NUMBERS
    model = GPT().to(world.device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader = DistributedDataLoader(TensorDataset(texts), world, batch_size=16)
    checkpoints = CheckpointManager(f"{settings.output_dir}/checkpoints", world)
    step = 0
    parts = {"model": model, "optimizer": optimizer, "loader": loader}

    def save(wait: bool):
        states = {name: part.state_dict() for name, part in parts.items()}
        return checkpoints.save(step, {"step": step, **states}, wait=wait)

    if state := checkpoints.load("auto"):
        # The wrap's first backward sums in another order than later ones.
        ddp(texts[:1].to(world.device)).backward()
        for name, part in parts.items():
            part.load_state_dict(state[name])
        step = state["step"]
        checkpoints.restore_rng(state, seed=0)
    for _ in range(loader.state_dict()["epoch"], settings.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = ddp(*batch.data)
            (loss * batch.scale).backward()  # scale: for the mean over the samples of all ranks
            optimizer.step()
            step += 1
            srunddp.heartbeat()
            if preemption.should_stop():
                preemption.stop(step, save(wait=True))  # ends all ranks; Slurm starts the job again
            if step % SAVE_EVERY == 0:
                save(wait=False)
                print(
                    f"step {step}: loss {loss.item():.4f}\n" if world.rank == 0 else "",
                    end="",
                    flush=True,
                )
    save(wait=True)
    return model


if __name__ == "__main__":
    with srunddp.init() as world, Preemption(world) as preemption:
        train(world, preemption, srunddp.read_config(Settings))
