"""Finds out whether the user's step calls collectives."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch.distributed as dist

from srunddp.train.world import World, all_gather_ints

_NOTHING = contextlib.nullcontext()


class CollectiveWatch:
    """Watches whether the first forward pass, of training or of evaluations, calls collectives.

    If a step calls collectives, such as the all_gather of a contrastive loss, a rank without a
    sample has to run the step too, because the other ranks would wait for it in the collective.
    Only collectives of the default process group are seen.

    Attributes:
        found: Whether the step calls collectives; None until all ranks have agreed.
    """

    def __init__(self, world: World) -> None:
        """Create a watch, which watches nothing yet.

        Args:
            world: The ranks. With a single rank nothing is watched and ``found`` is False, because
                no rank can wait for another.
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
        """Set ``found`` to the same result on all ranks; all ranks call this after each step.

        The first call after a forward pass is a collective; later calls do nothing.

        Returns:
            Whether the ranks have agreed in this call that the step calls collectives.
        """
        if self.found is not None:
            return False
        self.found = [1] in all_gather_ints(self._world, [int(self._here)])
        return self.found

    # Count by the process group's own counter instead of patching torch.distributed, because a step
    # may call collectives through any library.
    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        before = _count()
        yield
        if _count() > before:
            self._here = True


def _count() -> int:
    """Return how many collectives have been called in the default process group.

    torch counts collectives to compare their order between ranks (TORCH_DISTRIBUTED_DEBUG). The
    result is 0 if the backend does not count them.
    """
    group = dist.group.WORLD
    count = getattr(group, "_get_sequence_number_for_group", None)
    return int(count()) if count else 0
