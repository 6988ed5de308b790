"""A loop of one's own for a model in shards: torch's ``fully_shard`` (FSDP2) and
torch.distributed.checkpoint.

    srun --nodes=2 --ntasks-per-node=4 srunddp docs/examples/fsdp_loop.py --output-dir=runs/fsdp
    mpirun -n 2 srunddp docs/examples/fsdp_loop.py
    python docs/examples/fsdp_loop.py

Each rank keeps a part of each parameter, of its gradient and of the optimizer's state, and gathers
the layers one by one. It writes its part of a checkpoint, so all nodes have to see
``--output-dir``. A signal, or the job's end, stops all ranks after the same step. Started again, on
any number of ranks, the loop goes on from the newest checkpoint.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import srunddp
from srunddp.train import Preemption


@dataclass(frozen=True, kw_only=True)
class Settings:
    epochs: int = 10
    batch_size: int = 16  # of a rank
    lr: float = 0.003
    save_every: int = 40  # steps
    output_dir: Path = Path("runs/fsdp")  # of the checkpoints


def main() -> None:
    settings = srunddp.read_config(Settings)
    digits = load_digits()
    with srunddp.init() as world, Preemption(world) as preemption:
        model, optimizer = build(world, settings.lr)
        inputs = torch.tensor(digits.images / 16, dtype=torch.float32, device=world.device)
        targets = torch.tensor(digits.target, device=world.device)
        # The other images are to validate with.
        samples = 1400
        per_step = settings.batch_size * world.world_size
        steps_per_epoch = samples // per_step
        done = load(settings.output_dir, model, optimizer)
        for step in range(done + 1, settings.epochs * steps_per_epoch + 1):
            # The order follows from the step: a run that goes on sees the samples that are left.
            epoch, place = divmod(step - 1, steps_per_epoch)
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
            own = order[place * per_step + world.rank : (place + 1) * per_step : world.world_size]
            loss = nn.functional.cross_entropy(model(inputs[own]), targets[own])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            srunddp.heartbeat()
            if step % 10 == 0:
                dist.all_reduce(mean := loss.detach() / world.world_size)
                print(
                    f"step {step}: loss {float(mean):.6f}\n" if world.rank == 0 else "",
                    end="",
                    flush=True,
                )
            if preemption.should_stop():
                # Ends all ranks.
                preemption.stop(step, save(settings.output_dir, step, model, optimizer))
            if step % settings.save_every == 0 or step % steps_per_epoch == 0:
                save(settings.output_dir, step, model, optimizer)
        with torch.no_grad():  # on all ranks, which gather the layers together
            right = model.eval()(inputs[samples:]).argmax(dim=1) == targets[samples:]
    if world.rank == 0:
        print(f"val accuracy {100 * float(right.float().mean()):.2f} %", flush=True)


def build(world: srunddp.World, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A Transformer whose tokens are an image's rows; each of its layers is gathered by itself."""
    torch.manual_seed(0)  # the same values on all ranks, each of which keeps its part
    layers = [
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
    ]
    model = nn.Sequential(nn.Linear(8, 32), *layers, nn.Flatten(), nn.Linear(8 * 32, 10))
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Write a checkpoint, on all ranks; the newest two stay. Its file .metadata is written last."""
    srunddp.heartbeat(last=True)  # what follows may take longer than a step
    path = folder / f"step-{step:08}"
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    for old in sorted(folder.glob("step-*/.metadata"))[:-2] if dist.get_rank() == 0 else ():
        shutil.rmtree(old.parent)
    return path


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the newest whole checkpoint that rank 0 finds; how many steps are done."""
    newest = [max((str(path.parent) for path in folder.glob("step-*/.metadata")), default="")]
    dist.broadcast_object_list(newest, src=0)
    if newest[0]:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=newest[0])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(newest[0].rpartition("-")[2] or 0)


if __name__ == "__main__":
    main()
