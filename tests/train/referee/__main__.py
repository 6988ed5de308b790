"""The referee's verdicts as a table of Markdown.

    python -m tests.train.referee [--seed N] [PROGRAM ...]

Ends with 1 where a difference is greater than allowed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.train.referee.programs import PROGRAMS
from tests.train.referee.verdicts import BOUND, WORLD_SIZES, Verdict, judge_interrupted, judge_whole


def table(verdicts: Iterable[Verdict]) -> list[str]:
    """A line for each program, with its greatest differences; then why some depend on the ranks."""
    by_program: dict[str, list[Verdict]] = {}
    for each in verdicts:
        by_program.setdefault(each.program, []).append(each)
    sizes = " | ".join(f"ranks: {size}" for size in WORLD_SIZES)
    lines = [f"| program | {sizes} | interrupted |", "|---|" + "---|" * (len(WORLD_SIZES) + 1)]
    for name, found in by_program.items():
        straight = [each for each in found if each.journey.cut is None]
        interrupted = [each.worst for each in found if each.journey.cut is not None]
        figures = [f"{each.worst:.1e}" for each in straight]
        lines.append(f"| {name} | {' | '.join(figures)} | {max(interrupted):.1e} |")
    for name in by_program:
        reason = PROGRAMS[name]().problem.by_rank
        if reason:
            lines += ["", f"{name}: {reason}. The plain loop takes each rank's samples apart."]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.train.referee")
    parser.add_argument("--seed", type=int, default=0, help="of the steps of the interruptions")
    parser.add_argument("programs", nargs="*", help="names of programs; all of them by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        names = arguments.programs or [*PROGRAMS]
        verdicts = [
            *judge_whole(Path(folder), names),
            *judge_interrupted(Path(folder), arguments.seed, names),
        ]
    print("\n".join(table(verdicts)))
    wrong = [each for each in verdicts if each.worst > BOUND]
    for each in wrong:
        print(f"{each.program}, {each}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
