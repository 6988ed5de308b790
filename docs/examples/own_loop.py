"""A small GPT in a loop of one's own, without Trainer.

It stops upon a signal, and goes on to the bit when it is started again:
    srun --ntasks-per-node=2 srunddp docs/examples/own_loop.py --output-dir=runs/own_loop
    mpirun -n 2 srunddp docs/examples/own_loop.py
    python docs/examples/own_loop.py
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import srunddp
from srunddp.train import CheckpointManager, DistributedDataLoader, Preemption

NUMBERS, LENGTH, WIDTH = 11, 12, 48


@dataclass(frozen=True, kw_only=True)
class Settings:
    epochs: int = 4
    save_every_steps: int = 50
    output_dir: Path = Path("runs/own_loop")


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.places = nn.Embedding(NUMBERS, WIDTH), nn.Embedding(LENGTH - 1, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, NUMBERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # the mean loss of all numbers but the first
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1, device=text.device)
        hidden = self.layers(self.numbers(text[:, :-1]) + self.places.weight, mask)
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), text[:, 1:])


def train(world: srunddp.World, preemption: Preemption, settings: Settings) -> nn.Module:
    torch.manual_seed(0)
    start, by = torch.randint(NUMBERS, (2, 4000, 1))
    texts = (start + by * torch.arange(LENGTH)) % NUMBERS  # the first two numbers of a text tell all others
    model = GPT().to(world.device)
    ddp, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader = DistributedDataLoader(TensorDataset(texts), world, batch_size=16)
    checkpoints, step = CheckpointManager(settings.output_dir / "checkpoints", world), 0
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if state := checkpoints.load("auto"):
        ddp(texts[:1].to(world.device)).backward()  # the first backward adds up in an order of its own
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
            if (stop := preemption.should_stop()) or step % settings.save_every_steps == 0:
                if world.rank == 0:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)
                state = {"step": step} | {name: part.state_dict() for name, part in parts.items()}
                path = checkpoints.save(step, state, wait=stop)
            if stop:
                preemption.stop(step, path)  # Slurm starts the job again
    checkpoints.wait()
    return model


if __name__ == "__main__":
    settings = srunddp.read_config(Settings)
    with srunddp.init() as world, Preemption(world) as preemption:
        train(world, preemption, settings)
