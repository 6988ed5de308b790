"""How many CPUs this rank may use for itself, and torch's threads on them."""

from __future__ import annotations

import hashlib
import os
import socket

from srunddp.bootstrap.environment import cpus as of_rank
from srunddp.train.world import World


def share(world: World) -> int:
    """How many CPUs this rank may use for itself, at least 1; a collective.

    Those of its affinity mask, divided among the ranks of its node that have the same; see
    :func:`srunddp.bootstrap.environment.cpus.share`.
    """
    return of_rank.share(of_rank.usable(), _sharers(world, of_rank.mask()), os.environ)


def set_threads(cpus: int, wanted: int | None) -> None:
    """Give torch ``wanted`` threads; where None, no more than ``cpus`` unless the user's environment says how many."""
    import torch

    if wanted is not None:
        torch.set_num_threads(wanted)
    elif not {*of_rank.THREADS} & os.environ.keys() and torch.get_num_threads() > cpus:
        torch.set_num_threads(cpus)


def _sharers(world: World, mask: str) -> int:
    """Ranks of this node with this mask, this one included."""
    if world.world_size == 1:
        return 1
    import torch
    import torch.distributed as dist

    own = torch.tensor([_hashed(socket.gethostname()), _hashed(mask)], device=world.device)
    by_rank = [torch.empty_like(own) for _ in range(world.world_size)]
    dist.all_gather(by_rank, own)
    return [row.tolist() for row in by_rank].count(own.tolist())


def _hashed(text: str) -> int:
    """The same on every rank, and within int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)
