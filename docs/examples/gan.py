"""A GAN in a loop of one's own, without Trainer: two models, and two optimizers in turn.

The generator makes points of a ring in the plane from noise; the discriminator tells them from
those of the data:
    srun --ntasks-per-node=2 srunddp docs/examples/gan.py --output-dir=runs/gan
    mpirun -n 2 srunddp docs/examples/gan.py
    python docs/examples/gan.py
"""

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import srunddp
from srunddp.train import CheckpointManager, DistributedDataLoader, Preemption

NOISE = 8
SPREAD = 0.05
SECTORS = 12
SAVE_EVERY = 200


@dataclass(frozen=True, kw_only=True)
class Settings:
    epochs: int = 15
    output_dir: str = "runs/gan"


def network(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def train(world: srunddp.World, preemption: Preemption, settings: Settings) -> nn.Module:
    torch.manual_seed(0)
    angles = 2 * pi * torch.rand(8000)
    radii = 1 + SPREAD * torch.randn(8000)
    ring = TensorDataset(torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1))
    models = generator, discriminator = (
        network(NOISE, 2).to(world.device),
        network(2, 1).to(world.device),
    )
    ddp_generator, ddp_discriminator = map(DistributedDataParallel, models)
    adam_generator, adam_discriminator = (
        torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.9)) for m in models
    )
    loader = DistributedDataLoader(ring, world, batch_size=64)
    checkpoints = CheckpointManager(f"{settings.output_dir}/checkpoints", world)
    step = 0
    parts = {"generator": generator, "discriminator": discriminator, "loader": loader}
    parts |= {"adam_generator": adam_generator, "adam_discriminator": adam_discriminator}

    def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def learn(real: Tensor, scale: float) -> None:
        noise = torch.randn(2, len(real), NOISE, device=real.device)
        with torch.no_grad():
            made = generator(noise[0])
        # One forward for each backward.
        score_real, score_made = ddp_discriminator(torch.stack([real, made]))
        update(adam_discriminator, (softplus(-score_real) + softplus(score_made)).mean() * scale)
        discriminator.requires_grad_(False)  # its gradients are not wanted here, nor shared
        update(adam_generator, softplus(-discriminator(ddp_generator(noise[1]))).mean() * scale)
        discriminator.requires_grad_(True)

    def save(wait: bool):
        states = {name: part.state_dict() for name, part in parts.items()}
        return checkpoints.save(step, {"step": step, **states}, wait=wait)

    torch.manual_seed(world.rank)  # each rank draws noise of its own
    if state := checkpoints.load("auto"):
        # The first backward sums in another order than later ones.
        learn(torch.zeros(2, 2, device=world.device), 1.0)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        step = state["step"]
        checkpoints.restore_rng(state, seed=0)
    for _ in range(loader.state_dict()["epoch"], settings.epochs):
        for batch in loader:
            learn(*batch.data, batch.scale)
            step += 1
            srunddp.heartbeat()
            if preemption.should_stop():
                preemption.stop(step, save(wait=True))  # ends all ranks; Slurm starts the job again
            if step % SAVE_EVERY == 0:
                save(wait=False)
    save(wait=True)
    return generator


@torch.no_grad()
def judge(generator: nn.Module, device: torch.device) -> str:
    """Of 2,000 points: which sectors have a quarter of the even share, and how many points are near
    the circle.
    """
    points = generator(torch.randn(2000, NOISE, device=device)).cpu()
    near = (points.norm(dim=1) - 1).abs() < 4 * SPREAD
    sectors = (
        ((points[near, 1].atan2(points[near, 0]) / (2 * pi) + 0.5) * SECTORS)
        .long()
        .clamp(max=SECTORS - 1)
    )
    found = (sectors.bincount(minlength=SECTORS) >= 2000 / SECTORS / 4).sum()
    return (
        f"{found} of {SECTORS} sectors, {100 * near.float().mean():.2f} % of the points on the ring"
    )


if __name__ == "__main__":
    with srunddp.init() as world, Preemption(world) as preemption:
        generator = train(world, preemption, srunddp.read_config(Settings))
        if world.rank == 0:
            print(judge(generator, world.device), flush=True)
