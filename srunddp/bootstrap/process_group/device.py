"""Chooses the device of a rank.

torch counts the visible devices. ``CUDA_VISIBLE_DEVICES`` is not parsed, because it may contain
UUIDs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from srunddp.bootstrap.environment.slurm import gpus_here, has_own
from srunddp.bootstrap.environment.types import Environment
from srunddp.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

BACKENDS = ("nccl", "gloo", "auto")


def device_index(local_rank: int, local_world_size: int, visible: int, *, own: bool = False) -> int:
    """Return the number of a rank's CUDA device: 0 if the rank sees only one GPU, or only GPUs that
    no other rank sees; else its local rank.

    Args:
        local_rank, local_world_size: torch's terms.
        visible: ``torch.cuda.device_count()``, at least 1.
        own: whether no other rank sees these GPUs, by :func:`has_own`.

    Raises:
        ConfigError: fewer GPUs are visible than ranks share this node.
    """
    if visible == 1 or own:
        return 0
    if visible >= local_world_size:
        return local_rank
    raise ConfigError(
        f"{visible} GPUs are visible to local rank {local_rank}, and {local_world_size} ranks share"
        " this node",
        expected="one GPU for each rank, or all GPUs of the node for each",
        hint=f"start with --gpus-per-node={local_world_size} --gpu-bind=none, or with fewer tasks",
    )


def identity(index: int) -> str:
    """Return the UUID of a CUDA device, for the check that only one rank uses it.

    The result is empty if several ranks may use one device (``NCCL_MULTI_RANK_GPU_ENABLE=1``), or
    if another device has the same UUID, as on ROCm or with MIG instances.
    """
    import torch

    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    uuids = [
        str(torch.cuda.get_device_properties(each).uuid)
        for each in range(torch.cuda.device_count())
    ]
    if uuids.count(uuids[index]) == 1:
        return uuids[index]
    return ""


def claim_gpu(store: Store, node: str, gpu: str, rank: int) -> None:
    """Check that no other rank uses this rank's GPU. NCCL would refuse it later, with a less clear
    message.

    Args:
        store: the store that all ranks share.
        node: this rank's node.
        gpu: the UUID of this rank's device.
        rank: this rank's number.

    Raises:
        ConfigError: another rank has the same GPU.
    """
    # With an empty expected value, the store sets the key only if it does not exist yet, and always
    # returns the key's value. So the second of two ranks with one GPU gets the number of the first.
    holder = store.compare_set(f"srunddp/gpu/{node}/{gpu}", "", str(rank)).decode()
    if holder != str(rank):
        raise ConfigError(
            f"ranks {holder} and {rank} on {node} have the same GPU, {gpu}",
            expected="a GPU for each rank",
            hint=(
                "start with --gpus-per-node=N --ntasks-per-node=N --gpu-bind=none, or use --backend"
                " gloo"
            ),
        )


def unused_devices(local_world_size: int, visible: int, *, own: bool = False) -> str:
    """Return a warning if a rank sees several GPUs that no other rank uses; else an empty text.

    Args:
        local_world_size: the number of ranks on the rank's node.
        visible: the number of GPUs that the rank sees.
        own: whether the rank sees several GPUs that no other rank sees.
    """
    if own:
        unused = ", ".join(f"cuda:{index}" for index in range(1, visible))
        return (
            f"each rank sees {visible} GPUs of its own, {unused} unused; start one rank per GPU:"
            " --gpus-per-task=1"
        )
    if local_world_size > 1 or visible <= 1:
        return ""
    return (
        f"one rank on this node and {visible} visible GPUs: {visible - 1} stay idle; start one rank"
        f" per GPU with --ntasks-per-node={visible} --gpus-per-node={visible} --gpu-bind=none"
    )


def idle_gpus(environment: Environment, variables: Mapping[str, str]) -> str:
    """Return a note if Slurm has given this node several GPUs, and only one rank runs there; else
    an empty text. This does not import torch, so a supervisor can call it.

    Args:
        environment: this rank's environment.
        variables: its environment variables.
    """
    gpus = gpus_here(variables)
    if environment.local_world_size != 1 or gpus < 2:
        return ""
    return (
        f"one rank on {environment.node}, to which Slurm has given {gpus} GPUs: {gpus - 1} stay"
        f" idle, unless the script itself uses several -> for a rank on each, start {gpus} ranks"
        f" per node, as with srun --ntasks-per-node={gpus} --gpus-per-node={gpus} --gpu-bind=none"
    )


def select_device(
    backend: str, local_rank: int, local_world_size: int
) -> tuple[torch.device, str, str]:
    """Choose the device and the backend, and make the device the current one before CUDA is used.

    Args:
        backend: ``nccl``, ``gloo`` or ``auto``, which means NCCL if torch sees a GPU, else Gloo.
        local_rank, local_world_size: torch's terms.

    Returns:
        The device, the backend, and a warning about GPUs that stay idle; the warning is empty if
        none does.

    Raises:
        ConfigError: the backend is unknown, NCCL has no GPU, or there are too few GPUs.
    """
    import torch

    if backend not in BACKENDS:
        raise ConfigError(
            f"backend {backend!r}",
            expected=f"one of {', '.join(BACKENDS)}",
            hint="correct its name",
        )
    # device_count() asks NVML if it can, and makes no CUDA context.
    visible = torch.cuda.device_count()
    if backend == "nccl" and not visible:
        raise ConfigError(
            "backend nccl, and torch sees no GPU",
            expected="at least one visible GPU",
            hint=(
                "ask Slurm for GPUs (--gpus-per-node), install a CUDA build of torch, or use"
                " --backend gloo"
            ),
        )
    if not visible:
        return torch.device("cpu"), "gloo", ""
    own = has_own(os.environ, local_world_size, visible)
    device = torch.device("cuda", device_index(local_rank, local_world_size, visible, own=own))
    # Set the device before anything uses CUDA: otherwise each rank would open a context on the
    # node's first GPU, which costs memory there.
    torch.cuda.set_device(device)
    return (
        device,
        "nccl" if backend == "auto" else backend,
        unused_devices(local_world_size, visible, own=own),
    )
