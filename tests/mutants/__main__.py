"""Change the product at N random places, one at a time, and see whether the nearest tests notice.

The developer's tree stays as it is: all happens in a copy in build/mutants. A second call with the
same seed goes on after what is there. Look at each survivor: write the test that notices it, or
name it in tests/mutants/equivalent.yaml with the reason why none can.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import ROOT
from tests.mutants.areas import AREAS, draw, nearest_tests
from tests.mutants.campaign import Campaign, Result, Results, Status
from tests.mutants.equivalents import read_equivalents, to_yaml
from tests.mutants.mutations import Mutation
from tests.mutants.summary import Summary
from tests.mutants.workspace import Workspace

FOLDER = ROOT / "build" / "mutants"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    areas = [area.name for area in AREAS]
    parser.add_argument(
        "count",
        type=int,
        metavar="N",
        help="how many mutants; of a larger N the first are the same",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="the same seed gives the same mutants (default: 1)"
    )
    parser.add_argument(
        "--area", action="append", choices=areas, help="change this part alone (may be repeated)"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument(
        "--summary", action="store_true", help="print what is there already, and run nothing"
    )
    parser.add_argument(
        "--survivors", action="store_true", help="first run those again that have survived"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the copy and the results")
    return parser.parse_args()


def say(line: str) -> None:
    """Print a line at once, for who follows the log."""
    print(line, flush=True)


def describe(mutation: Mutation | Result) -> str:
    """On one line."""
    before, after = (" ".join(text.split()) for text in (mutation.before, mutation.after))
    return f"{mutation.file}:{mutation.line} {mutation.kind}: {before}  =>  {after}"


def run(mutations: Sequence[Mutation], results: Results, folder: Path, again: bool) -> None:
    """Run the tests on each mutant that has no result yet; with ``again`` also on the survivors."""
    known = results.read()
    done = {
        place for place, result in known.items() if not (again and result.status is Status.SURVIVED)
    }
    left = [mutation for mutation in mutations if mutation.place not in done]
    if not left:
        return
    workspace = Workspace(folder)
    workspace.prepare()
    campaign = Campaign(workspace, lambda file: nearest_tests(workspace.tree, file), say)
    for number, mutation in enumerate(left, 1):
        say(f"{number} of {len(left)}: {describe(mutation)}")
        result = campaign.judge(mutation)
        results.add(result)
        say(f"{result.status} in {result.seconds:.0f} s{f' by {result.by}' if result.by else ''}")
        if result.status is Status.SURVIVED:
            say(to_yaml(result.place))


def main() -> int:
    """Run a campaign and print its table; the exit code is 1 where too many have survived."""
    given = arguments()
    areas = [area for area in AREAS if not given.area or area.name in given.area]
    drawn = list(itertools.islice(draw(ROOT, given.seed, areas), given.count))
    if given.list:
        for mutation in drawn:
            say(describe(mutation))
        return 0
    equivalents = read_equivalents()
    results = Results(given.folder / f"results-{given.seed}.jsonl")
    if not given.summary:
        counted = [mutation for mutation in drawn if mutation.place not in equivalents]
        run(counted, results, given.folder, given.survivors)
    places = {mutation.place for mutation in drawn}
    found = [result for place, result in results.read().items() if place in places]
    summary = Summary.of(found, places, equivalents)
    say(summary.render())
    return 0 if summary.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
