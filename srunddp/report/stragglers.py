"""The few ranks for which all others wait: as DDP's ranks end each step together, it is their own time that tells."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from srunddp.report.summary import RankFigures, Summary, middle, share


@dataclass(frozen=True)
class Outliers:
    """Ranks that are slower than the others.

    Attributes:
        ranks: those; none for no outlier. nodes: theirs.
        excess: seconds in each step by which the slowest is above the others; share: of the step time.
        by_data: the share of it that is waiting for data.
    """

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    excess: float = 0.0
    share: float = 0.0
    by_data: float = 0.0


def outliers(summary: Summary, threshold: float) -> Outliers:
    """Ranks whose own time per step is above the others' median by more than a share of the step time.

    They count where they are few: a quarter of all, or not more than half and all on one node. Where all wait for
    data, that wait is left out of the comparison, as it varies.
    """
    all_wait = (summary.data_share or 0.0) > threshold
    own = {each.rank: value for each in summary.ranks if (value := _own(each, without_data=all_wait)) is not None}
    if len(own) < 2 or not summary.step_s:
        return Outliers()
    usual = middle(list(own.values())) or 0.0
    slow = [rank for rank, value in own.items() if value - usual > threshold * summary.step_s]
    nodes = tuple(dict.fromkeys(summary.layout[rank] for rank in slow))
    few = len(slow) <= max(1, len(own) // 4) or (len(nodes) == 1 and 2 * len(slow) <= len(own))
    if not slow or not few:
        return Outliers()
    worst = max(slow, key=lambda rank: own[rank])
    others = [each for each in summary.ranks if each.rank not in slow]
    figures = next(each for each in summary.ranks if each.rank == worst)
    waits = [each.data_s for each in others if each.data_s is not None]
    more_data = 0.0 if all_wait else (figures.data_s or 0.0) - (fmean(waits) if waits else 0.0)
    excess = own[worst] - usual
    return Outliers(tuple(slow), nodes, excess, share(excess, summary.step_s) or 0.0, more_data / excess)


def _own(figures: RankFigures, *, without_data: bool) -> float | None:
    return figures.steady_work_s if without_data else figures.steady_s
