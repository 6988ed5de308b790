"""Run benchmarks, print their ratios, and write the page with them; ``bin/bench`` is this, after
its set-up.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import time
from pathlib import Path

from tests.benchmarks import page, runner
from tests.cluster.cluster import ClusterError
from tests.conftest import ROOT

NAMES = (
    "start",
    "rendezvous",
    "storm",
    "late",
    "restart",
    "scale",
    "overhead",
    "monitor",
    "loop",
    "checkpoint",
    "streams",
    "vision",
)
LONG = ("goodput",)  # by name only


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bin/bench", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(NAMES)}, which are all; or {', '.join(LONG)}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "benchmarks", help="of the results"
    )
    parser.add_argument(
        "--page", action="store_true", help="only write docs/benchmarks from the folder's results"
    )
    given = parser.parse_args()
    if wrong := sorted({*given.names} - {*NAMES, *LONG}):
        parser.error(f"no benchmark {', '.join(wrong)}; expected of {', '.join((*NAMES, *LONG))}")
    return given


def main() -> None:
    given = arguments()
    if given.page:
        page.publish(given.folder)
        return
    # All ways load compiled modules, as installed packages do.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in given.names or NAMES:
        module = importlib.import_module(f"tests.benchmarks.{name}")
        title, _, about = (inspect.getdoc(module) or "").partition("\n\n")
        began = time.monotonic()
        file = given.folder / f"{name}{'.quick' if given.quick else ''}.json"
        try:
            print(
                page.table(
                    runner.run(module.cases(given.quick), title, about, file, again=given.again)
                ),
                flush=True,
            )
        except ClusterError as error:
            print(f"{name} is not measured: {error}", file=sys.stderr)
        print(f"{name} took {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
