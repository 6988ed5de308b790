"""Finds out whether the user's step calls collectives."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch.distributed as dist

from srunddp.train.world import World, all_gather_ints

_NOTHING = contextlib.nullcontext()


class CollectiveWatch:
    """Watches the first forward pass of training, or of evaluations.

    If a step calls collectives, such as the all_gather of a contrastive loss, a rank without a
    sample has to run it too, because the others would wait for it. Only collectives of the default
    process group are seen.

    Attributes:
        found: Whether the step calls collectives; None until all ranks have agreed.
    """

    def __init__(self, world: World) -> None:
        """Create a watch, which watches nothing yet.

        Args:
            world: The ranks; with a single one, no rank can wait for another.
        """
        self.found: bool | None = None if world.world_size > 1 else False
        self._world = world
        self._here = False

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that watches a forward pass, unless the result is known already."""
        if self.found is None:
            return self._watching()
        return _NOTHING

    def agree(self) -> bool:
        """Agree on one result on all ranks; all call this after the first forward pass.

        Returns:
            Whether this call has found out that the step calls collectives.
        """
        if self.found is not None:
            return False
        self.found = [1] in all_gather_ints(self._world, [int(self._here)])
        return self.found

    # Count in the process group instead of patching torch.distributed: a step may call it through
    # any library.
    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        before = _count()
        yield
        if _count() > before:
            self._here = True


def _count() -> int:
    """Return how many collectives have been called in the default process group.

    torch counts them to compare the order between ranks (TORCH_DISTRIBUTED_DEBUG). 0 if the backend
    does not count.
    """
    group = dist.group.WORLD
    count = getattr(group, "_get_sequence_number_for_group", None)
    return int(count()) if count else 0
