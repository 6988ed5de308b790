"""A loop of one's own, without Trainer: a small GPT, which stops upon a signal and resumes to the bit.

    srun --ntasks-per-node=2 srunddp docs/examples/own_loop.py --output-dir=runs/own_loop
    mpirun -n 2 srunddp docs/examples/own_loop.py

Each text counts in steps of its own, modulo 23, so that two numbers tell all that follow.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import srunddp
from srunddp.train import CheckpointManager, DistributedDataLoader, Preemption

NUMBERS, LENGTH, WIDTH = 23, 12, 48


@dataclass(frozen=True, kw_only=True)
class Settings:
    epochs: int = 4
    save_every_steps: int = 50
    output_dir: Path = Path("runs/own_loop")


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.places = nn.Embedding(NUMBERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUMBERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length, device = text.shape[1], text.device
        hidden = self.numbers(text) + self.places(torch.arange(length, device=device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=device)
        return self.head(self.layers(hidden, mask, is_causal=True))


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    settings = srunddp.read_config(Settings)
    with srunddp.init() as world, Preemption(world) as preemption:
        torch.manual_seed(0)
        first, by = torch.randint(NUMBERS, (4000, 1)), torch.randint(1, NUMBERS, (4000, 1))
        data = TensorDataset((first + by * torch.arange(LENGTH)) % NUMBERS)
        model = GPT().to(world.device)
        ddp = DistributedDataParallel(model) if world.world_size > 1 else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loader = DistributedDataLoader(data, world, batch_size=16)
        checkpoints, step = CheckpointManager(settings.output_dir / "checkpoints", world), 0
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        if state := checkpoints.load("auto"):
            loss_of(
                ddp, data[:1][0].to(world.device)
            ).backward()  # the first backward adds in another order than later ones
            optimizer.zero_grad()
            for name, part in parts.items():
                part.load_state_dict(state[name])
            step = state["step"]
            checkpoints.restore_rng(state, seed=0)
        for epoch in range(loader.state_dict()["epoch"], settings.epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                loss = loss_of(ddp, batch.data[0])
                (loss * batch.scale).backward()  # scale: of all ranks' samples, also where these are uneven
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                srunddp.heartbeat()
                stop = preemption.should_stop()
                if stop or step % settings.save_every_steps == 0:
                    path = checkpoints.save(
                        step, {"step": step} | {k: p.state_dict() for k, p in parts.items()}, wait=stop
                    )
                if stop:
                    preemption.stop(step, path)
            if world.rank == 0:
                print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
        checkpoints.wait()


if __name__ == "__main__":
    main()
