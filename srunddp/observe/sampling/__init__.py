from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Site:
    folder: Path
    node: str
    seconds: float
    interface: str
    rank_variable: str
    rank: int
    supervisor: int
    launcher: int | None


class Sampler:
    def in_worker(self) -> None: ...
    def finish(self, limit: float) -> None: ...


def start(site: Site) -> Sampler:
    return Sampler()
