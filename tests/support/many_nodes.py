"""Plays a thousand nodes with eight ranks and four interfaces each. A function gives the answers of
all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from srunddp.check.messages import CheckMessage

A = TypeVar("A", bound=CheckMessage)
NODES = 1000
PER_NODE = 8
INTERFACES = 4


class ManyNodes:
    """In place of rank 0's session of a check: asks no process, but calls a function.

    Args:
        answer: Returns the answer of a rank to a question.
    """

    def __init__(self, answer: Callable[[int, CheckMessage], CheckMessage]) -> None:
        self.errors: dict[int, str] = {}
        self._answer = answer
        self._nodes = {rank: f"node{rank // PER_NODE:04d}" for rank in range(NODES * PER_NODE)}

    @property
    def nodes(self) -> dict[int, str]:
        """The node of each rank. The dict is made anew each time, as in the real session."""
        return dict(sorted(self._nodes.items()))

    @property
    def node_leaders(self) -> dict[str, int]:
        return {node: rank for rank, node in sorted(self._nodes.items(), reverse=True)}

    def ask(
        self, questions: Mapping[int, CheckMessage], within: float, wanted: type[A]
    ) -> dict[int, A]:
        answers = {rank: self._answer(rank, question) for rank, question in questions.items()}
        return {rank: each for rank, each in answers.items() if isinstance(each, wanted)}

    def broadcast(
        self,
        question: CheckMessage,
        within: float,
        wanted: type[A],
        ranks: Iterable[int] | None = None,
    ) -> dict[int, A]:
        asked = self._nodes if ranks is None else ranks
        return self.ask(dict.fromkeys(asked, question), within, wanted)


@contextmanager
def quick(seconds: float = 6.0) -> Iterator[None]:
    """Check that the block takes less CPU time than this. The default is ten times what it should
    take; comparing each node with each other node would take minutes.
    """
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


def host(rank: int) -> str:
    return f"10.{rank % INTERFACES}.{rank // PER_NODE // 250}.{rank // PER_NODE % 250 + 1}"


ADDRESSES = {rank: (f"ib{rank % INTERFACES}", host(rank)) for rank in range(NODES * PER_NODE)}
