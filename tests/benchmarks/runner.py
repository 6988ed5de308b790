"""Measure the ways of each case in turn, and keep each sample in a file, so that a run can be taken
up again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

import srunddp
from srunddp.util.atomic_file import replace_file
from tests.benchmarks.benchmark import Case, CaseResult, NotMeasuredError, Result
from tests.conftest import ROOT

PEERS = (
    "torch",
    "accelerate",
    "transformers",
    "lightning",
    "nvidia-resiliency-ext",
    "mpi4py",
    "idr_torch",
)
INTEROP = ROOT / ".venv-interop"
EZPZ = ROOT / "build" / "ezpz" / "src"


def run(
    cases: Iterator[Case], title: str, about: str, file: Path, *, again: bool = False
) -> Result:
    """Measure what the file does not have yet.

    Args:
        again: forget what the file has.
    """
    result = Result(title, about, setting(), date.today().isoformat())
    if file.exists() and not again:
        before = Result.of(json.loads(file.read_text()))
        result = before if before.setting == result.setting else result
    if not result.complete:
        for case in cases:
            _measure(case, result, file)
        result.complete = True
        _save(result, file)
    return result


def _measure(case: Case, result: Result, file: Path) -> None:
    kept = result.cases.setdefault(case.name, CaseResult())
    kept.unit = case.unit
    kept.limits = list(case.limits)
    for way in case.ways:
        kept.samples.setdefault(way, [])
    for repeat in range(case.repeats):
        for way in order(case.name, list(case.ways), repeat):
            samples = kept.samples[way]
            if len(samples) > repeat or way in kept.not_measured:
                continue
            try:
                samples.append(dict(case.ways[way](repeat)))
                shown = ", ".join(f"{metric} {value:.4g}" for metric, value in samples[-1].items())
            except NotMeasuredError as reason:
                kept.not_measured[way] = shown = str(reason)
            print(
                f"{case.name}, {repeat + 1} of {case.repeats}, {way}: {shown}",
                file=sys.stderr,
                flush=True,
            )
            _save(result, file)


def order(case: str, ways: list[str], repeat: int) -> list[str]:
    """Of the ways in this repeat: shuffled, and the same again when a run is taken up."""
    return random.Random(f"{case} {repeat}").sample(ways, len(ways))


def _save(result: Result, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(asdict(result), indent=1).encode() + b"\n")


def setting() -> dict[str, Any]:
    """The machine, the versions, and the commit, with a mark where files of the package differ from
    it.
    """
    if INTEROP.exists():
        site = sysconfig.get_path("purelib", vars={"base": str(INTEROP)})
    else:
        site = ""
    installed = {
        each.name: each.version for each in importlib.metadata.distributions(path=[site, *sys.path])
    }
    versions = {name: installed[name] for name in PEERS if name in installed}
    if EZPZ.exists():  # from its repository, not installed
        versions["ezpz"] = (EZPZ / "ezpz" / "__about__.py").read_text().split('"')[1]
    slurm = _output("slurmctld", "-V").removeprefix("slurm-wlm ")
    versions = {
        "srunddp": srunddp.__version__,
        "Python": platform.python_version(),
        "Slurm": slurm,
        **versions,
    }
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = {"CPU": _cpu(), "cores": os.cpu_count(), "memory": f"{memory:.0f} GiB", "GPU": gpu}
    commit = _output(
        "git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "srunddp", "bin/srunddp"
    )
    if _output("git", "-C", str(ROOT), "status", "--short", "srunddp", "bin/srunddp"):
        changed = "+"
    else:
        changed = ""
    return {"machine": machine, "versions": versions, "commit": commit + changed}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
