"""Finds out whether a step calls collectives itself."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch.distributed as dist

from srunddp.train.world import World, all_gather_ints

_NOTHING = contextlib.nullcontext()


class CollectiveWatch:
    """Watches the first forward pass of training, or of evaluations.

    Where a step calls collectives, such as the all_gather of a contrastive loss, a rank without a
    sample has to run it all the same: the others would wait for it. Only those of the default
    process group are seen.

    Attributes:
        found: Whether the step calls some; None until all ranks have agreed.
    """

    def __init__(self, world: World) -> None:
        """Watch nothing yet.

        Args:
            world: The ranks; one alone has no one to wait for it.
        """
        self.found: bool | None = None if world.world_size > 1 else False
        self._world = world
        self._here = False

    def watching(self) -> AbstractContextManager[None]:
        """Return a context for a forward pass, which watches it, unless that is over."""
        if self.found is None:
            return self._watching()
        return _NOTHING

    def agree(self) -> bool:
        """Come to one result on all ranks; all call this after the first forward pass.

        Returns:
            Whether it has turned out just now that the step calls collectives.
        """
        if self.found is not None:
            return False
        self.found = [1] in all_gather_ints(self._world, [int(self._here)])
        return self.found

    # Counted in the process group and not by patching torch.distributed: a step may reach it
    # through any library.
    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        before = _count()
        yield
        if _count() > before:
            self._here = True


def _count() -> int:
    """Return how many collectives the default process group has been asked for.

    torch counts them to compare the order between ranks (TORCH_DISTRIBUTED_DEBUG). 0 where it does
    not tell.
    """
    group = dist.group.WORLD
    count = getattr(group, "_get_sequence_number_for_group", None)
    return int(count()) if count else 0
