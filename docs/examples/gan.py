"""A GAN in a loop of one's own: two models and two optimizers in turn, without Trainer, one process per GPU or CPU.

The generator learns to make points of a ring in the plane from noise, the discriminator to tell them from made data.
Signals, checkpoints and the resume are those of own_loop.py. Start it on a cluster, under MPI, or alone:

    srun --ntasks-per-node=2 srunddp docs/examples/gan.py --output-dir=runs/gan
    mpirun -n 2 srunddp docs/examples/gan.py
    python docs/examples/gan.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import srunddp
from srunddp.train import CheckpointManager, DistributedDataLoader, Preemption

NOISE, SPREAD = 8, 0.05
SECTORS = 12


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may be set by ``--key=value``.

    Attributes:
        batch_size: points per rank and step.
        lr: Adam's learning rate, of both models.
        save_every_steps: steps from one checkpoint to the next.
        output_dir: where checkpoints are, and where it goes on from.
    """

    epochs: int = 15
    batch_size: int = 64
    lr: float = 1e-3
    seed: int = 0
    save_every_steps: int = 200
    output_dir: Path = Path("runs/gan")


def main() -> None:
    settings = srunddp.read_config(Settings)
    with srunddp.init() as world, Preemption(world) as preemption:
        generator = train(world, preemption, settings)
    if world.rank == 0:
        near, sectors = judge(generator, world.device)
        print(f"{sectors} of {SECTORS} sectors, {100 * near:.2f} % of the points on the ring", flush=True)


def train(world: srunddp.World, preemption: Preemption, settings: Settings) -> nn.Module:
    torch.manual_seed(settings.seed)
    generator, discriminator = network(NOISE, 2).to(world.device), network(2, 1).to(world.device)
    wrapped_generator, wrapped_discriminator = wrap(generator, world), wrap(discriminator, world)
    optimizers = [
        torch.optim.Adam(model.parameters(), settings.lr, betas=(0.5, 0.9)) for model in (generator, discriminator)
    ]
    loader = DistributedDataLoader(ring(8000), world, batch_size=settings.batch_size, seed=settings.seed)
    checkpoints = CheckpointManager(settings.output_dir / "checkpoints", world)
    parts = {"generator": generator, "discriminator": discriminator, "loader": loader}
    parts |= {"generator_optimizer": optimizers[0], "discriminator_optimizer": optimizers[1]}
    step = 0

    def save() -> Path:
        return checkpoints.save(step, {"step": step, **{name: part.state_dict() for name, part in parts.items()}})

    def step_discriminator(real: Tensor, scale: float) -> None:
        with torch.no_grad():
            fake = generator(noise(len(real), world.device))
        scores = wrapped_discriminator(torch.cat([real, fake]))  # one forward, as DistributedDataParallel expects
        loss = softplus(-scores[: len(real)]).mean() + softplus(scores[len(real) :]).mean()
        (loss * scale).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    def step_generator(number: int, scale: float) -> None:
        discriminator.requires_grad_(False)  # no gradients of it are wanted, nor shared
        loss = softplus(-discriminator(wrapped_generator(noise(number, world.device)))).mean()
        (loss * scale).backward()
        discriminator.requires_grad_(True)
        optimizers[0].step()
        optimizers[0].zero_grad()

    torch.manual_seed(settings.seed + world.rank)  # each rank draws other noise
    if state := checkpoints.load("auto"):
        # The first step adds the ranks' gradients in another order than all later ones.
        step_discriminator(torch.zeros(2, 2, device=world.device), 1.0)
        step_generator(2, 1.0)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        step = state["step"]
        checkpoints.restore_rng(state, settings.seed)

    for epoch in range(loader.state_dict()["epoch"], settings.epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            (real,) = batch.data
            step_discriminator(real, batch.scale)
            step_generator(len(real), batch.scale)
            step += 1
            srunddp.heartbeat()
            if preemption.should_stop():
                checkpoints.wait()  # for one that is still being written
                path = save()
                checkpoints.wait()
                preemption.stop(step, path)
            if step % settings.save_every_steps == 0:
                save()
    srunddp.heartbeat(last=True)
    checkpoints.wait()
    return generator


def wrap(model: nn.Module, world: srunddp.World) -> nn.Module:
    return DistributedDataParallel(model) if world.world_size > 1 else model


def network(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def noise(number: int, device: torch.device) -> Tensor:
    return torch.randn(number, NOISE, device=device)


def ring(number: int) -> TensorDataset:
    """Points about the unit circle, the same on all ranks."""
    draw = torch.Generator().manual_seed(1)
    angles = 2 * math.pi * torch.rand(number, generator=draw)
    radii = 1 + SPREAD * torch.randn(number, generator=draw)
    return TensorDataset(torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1))


@torch.no_grad()
def judge(generator: nn.Module, device: torch.device) -> tuple[float, int]:
    """Of 2,000 points: the share within four deviations of the circle, and in how many sectors of it there are some.

    A sector counts that has a quarter at least of its even share.
    """
    points = generator(noise(2000, device)).cpu()
    near = (points.norm(dim=1) - 1).abs() < 4 * SPREAD
    sectors = ((points[:, 1].atan2(points[:, 0]) / (2 * math.pi) + 0.5) * SECTORS).long().clamp(max=SECTORS - 1)
    counts = torch.bincount(sectors[near], minlength=SECTORS)
    return near.float().mean().item(), int((counts >= 2000 / SECTORS / 4).sum())


if __name__ == "__main__":
    main()
