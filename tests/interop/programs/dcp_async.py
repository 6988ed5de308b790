"""torch.distributed.checkpoint.async_save in a background process after every fifth step, and the
checkpoints read again.
"""

import hashlib
import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from record import leave, network, options
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def digest(weights: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        assert isinstance(tensor, DTensor)
        found.update(tensor.full_tensor().detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    out = options().out
    dist.init_process_group("cpu:gloo")
    torch.manual_seed(0)
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    saved = {}
    saving: Future[Any] | None = None
    for step in range(20):
        batch = torch.randn(16, 10, generator=generator)
        loss = torch.nn.functional.cross_entropy(model(batch), (batch.sum(dim=1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
        if step % 5 == 4:
            if saving is not None:
                saving.result()
            weights, moments = get_state_dict(model, optimizer)
            saved[step] = digest(weights)
            begun = dcp.async_save(
                {"model": weights, "optimizer": moments},
                checkpoint_id=out / f"step{step}",
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            assert isinstance(begun, Future)
            saving = begun
    assert saving is not None
    saving.result()
    for step, expected in saved.items():
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=out / f"step{step}")
        assert digest(weights) == expected
    place = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    leave(out, *place, losses, saved=list(saved.values()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
