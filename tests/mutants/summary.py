"""What a campaign comes to, as a table and a list of the survivors."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.mutants.areas import area_of
from tests.mutants.campaign import Result, Status
from tests.mutants.mutations import Place

MOST_SURVIVORS = 0.15


@dataclass(frozen=True)
class Summary:
    """The results of a campaign, without those of mutants that are known to be equivalent.

    Attributes:
        results: of each mutant that was run.
        equivalent: how many of the drawn mutants are equivalent.
    """

    results: Sequence[Result]
    equivalent: int

    @classmethod
    def of(
        cls, results: Iterable[Result], drawn: Iterable[Place], equivalents: Iterable[Place]
    ) -> Summary:
        """Leave out the equivalents, also those that were run before they were known as such."""
        known = set(equivalents)
        counted = [result for result in results if result.place not in known]
        return cls(counted, len(known.intersection(drawn)))

    @property
    def survivors(self) -> list[Result]:
        """Those that no test noticed."""
        return [result for result in self.results if result.status is Status.SURVIVED]

    @property
    def is_good(self) -> bool:
        """Whether few enough have survived."""
        return len(self.survivors) <= MOST_SURVIVORS * len(self.results)

    def render(self) -> str:
        """The table, and what to look at."""
        rows = [("area", "mutants", *Status)]
        areas = list(dict.fromkeys(area_of(result.file).name for result in self.results))
        for area in sorted(areas):
            rows.append(
                (area, *_counts([each for each in self.results if area_of(each.file).name == area]))
            )
        rows.append(("all", *_counts(self.results)))
        lines = [
            "  ".join(f"{cell:>12}" if at else f"{cell:<18}" for at, cell in enumerate(row))
            for row in rows
        ]
        lines.append(f"{self.equivalent} more are equivalent: tests/mutants/equivalent.yaml")
        if self.results:
            lines.append(
                f"{len(self.survivors) / len(self.results):.0%} survived; expected at most"
                f" {MOST_SURVIVORS:.0%}"
            )
        for result in self.survivors:
            lines += [
                "",
                (
                    f"survived: {result.file}:{result.line} in {result.function or 'the module'},"
                    f" {result.kind}"
                ),
            ]
            lines.append(textwrap.indent(result.before, "  - "))
            lines.append(textwrap.indent(result.after, "  + "))
        return "\n".join(lines)


def _counts(results: Sequence[Result]) -> list[str]:
    by_status = [sum(result.status is status for result in results) for status in Status]
    return [str(count) for count in (len(results), *by_status)]
