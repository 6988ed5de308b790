"""One Python, one torch and one version of each named package on all ranks; does torch import, and does torchvision."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypedDict

from srunddp.check.comparison import by_node, finding_about, minority, on_node
from srunddp.check.finding import Check, CheckContext, Finding, Observation, Severity
from srunddp.check.packages import Package, find, imports, names, parsed, quotes
from srunddp.check.torchvision_abi import Vision, look, misfit

NAME = "versions"
_PATIENCE = 120  # seconds for an import of torch, from a file server that many nodes ask at once
_IMPORT_IT = {"torchmetrics", "lightning", "pytorch_lightning", "timm"}  # torchvision, where it is there
_SLOW, _SLOWER = 10.0, 3  # seconds, and times the usual

_IMPORT = """
import json, sys, time
sys.path[:0] = sys.argv[1:]
start = time.monotonic()
import torch
took = time.monotonic() - start
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    nccl = ""
cuda = getattr(getattr(torch, "version", None), "cuda", None)
print("\\n" + json.dumps({"version": str(torch.__version__), "cuda": cuda or "", "nccl": nccl, "seconds": took}))
"""


class Imported(TypedDict):
    """torch as it was imported, and in how many seconds; ``error`` says why it was not."""

    version: str
    cuda: str
    nccl: str
    seconds: float
    error: str


@dataclass(frozen=True)
class VersionFacts:
    """Of one rank.

    Attributes:
        python: its version; executable, prefix: of the environment.
        packages: torch and those named, by name.
        imported: torch, on local rank 0 alone.
        vision: torchvision, there as well, if it is there, and named or imported by the script.
    """

    python: str
    executable: str
    prefix: str
    packages: dict[str, Package]
    imported: Imported
    vision: Vision | None = None


Ranks = Sequence[Observation[VersionFacts]]
NOT_ASKED = Imported(version="", cuda="", nccl="", seconds=0.0, error="")


def collect(subject: CheckContext) -> VersionFacts:
    """This rank's. torch is imported in a process of its own, so that this one stays without it."""
    folder = os.path.dirname(os.path.realpath(subject.script)) if subject.script else ""
    shared: Callable[[str], str] = subject.staged.shared if subject.staged else str
    packages = {name: find(name, folder) for name in ("torch", *subject.packages)}
    ask = subject.environment.local_rank == 0 and packages["torch"]["place"]
    vision = _vision(packages, subject.script, folder) if ask else None
    for package in packages.values():
        package["place"] = shared(package["place"])
    return VersionFacts(
        python=platform.python_version(),
        executable=shared(sys.executable),
        prefix=shared(sys.prefix),
        packages=packages,
        imported=import_torch(folder) if ask else NOT_ASKED,
        vision=vision,
    )


def _vision(packages: dict[str, Package], script: str | None, folder: str) -> Vision | None:
    tree, _ = parsed(script)
    # With import_torchvision() a mixed build is provided for.
    if tree and names(tree, "import_torchvision"):
        tree = None
    if "torchvision" not in packages and not (tree and ({"torchvision"} | _IMPORT_IT) & imports(tree)):
        return None
    torchvision = find("torchvision", folder)
    # Who writes its name as a text looks for it, or declares its operators.
    fails = tree is not None and "torchvision" in imports(tree, guarded=False) and not quotes(tree, "torchvision")
    return look(packages["torch"], torchvision, script=fails) if torchvision["place"] else None


def import_torch(folder: str, patience: float = _PATIENCE) -> Imported:
    """What another process says that imports torch as a script in ``folder`` would."""
    command = [sys.executable, "-P", "-c", _IMPORT, *([folder] if folder else [])]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=patience
        )
    except subprocess.TimeoutExpired:
        return Imported(version="", cuda="", nccl="", seconds=patience, error=f"it took more than {patience:g} s")
    said = [line for line in done.stdout.splitlines() if line.startswith('{"version": ')]
    if done.returncode or not said:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Imported(version="", cuda="", nccl="", seconds=0.0, error=lines[-1])
    imported: Imported = json.loads(said[-1]) | {"error": ""}
    return imported


def judge(seen: Ranks) -> Iterator[Finding]:
    """Ranks of different versions fail, or compute different things."""
    yield from _pythons(seen)
    for name in dict.fromkeys(name for one in seen for name in one.facts.packages):
        yield from _package(seen, name)
    yield from _imports(seen)
    for one in seen:
        if one.facts.vision:
            yield from _misfit(one, one.facts.vision)


def _misfit(one: Observation[VersionFacts], vision: Vision) -> Iterator[Finding]:
    torch = one.facts.packages["torch"]
    found, fails = misfit(vision, torch)
    if found:
        hint = "install torchvision from the same index as torch (for the CPU or one CUDA)"
        if vision["lacks"]:
            hint += ", or import it by srunddp.train.import_torchvision()"
        level = Severity.FAIL if fails and vision["script"] else Severity.WARN
        yield on_node(one, level, NAME, found, f"the torchvision of torch {torch['version']}", hint)


def _pythons(seen: Ranks) -> Iterator[Finding]:
    hint = "start all ranks in one environment (srun --export=ALL, mpirun -x PATH)"
    seen = yield from _differing(
        seen, lambda one: one.facts.python.rpartition(".")[0], Severity.FAIL, "Python {}", hint
    )
    yield from _differing(seen, lambda one: one.facts.python, Severity.WARN, "Python {}", hint)
    where = "Python is {}"
    yield from _differing(seen, lambda one: f"{one.facts.executable} of {one.facts.prefix}", Severity.WARN, where, hint)


def _package(seen: Ranks, name: str) -> Iterator[Finding]:
    def known(one: Observation[VersionFacts]) -> Package:
        return one.facts.packages[name]

    def place(one: Observation[VersionFacts]) -> str:
        return known(one)["place"].replace(one.facts.prefix, "sys.prefix", 1)

    lacking = [one for one in seen if not known(one)["place"]]
    if lacking:
        message = (
            f"no package {name}",
            "one on every rank",
            "install it there, or use an environment that all nodes see",
        )
        yield finding_about(lacking, Severity.FAIL, NAME, message)
    seen = [one for one in seen if known(one)["place"]]
    hint = f"use one environment; see PYTHONPATH and the script's folder for another {name}"
    bad = Severity.FAIL if name == "torch" else Severity.WARN
    seen = yield from _differing(seen, lambda one: known(one)["version"], bad, f"{name} {{}}", hint)
    seen = yield from _differing(seen, lambda one: known(one)["cuda"], bad, f"{name} for CUDA {{}}", hint)
    seen = yield from _differing(seen, lambda one: known(one)["git"], Severity.WARN, f"{name} of commit {{}}", hint)
    yield from _differing(seen, place, Severity.WARN, f"{name} of {{}}", hint)


def _imports(seen: Ranks) -> Iterator[Finding]:
    for one in seen:
        error, seconds = one.facts.imported["error"], one.facts.imported["seconds"]
        if error and seconds:
            hint = "see how fast its file system is; copy the environment to the nodes"
            yield on_node(one, Severity.WARN, NAME, f"import torch: {error}", "seconds", hint)
        elif error:
            hint = f"see {one.facts.executable} -c 'import torch' on that node"
            yield on_node(one, Severity.FAIL, NAME, f"import torch: {error}", "an import", hint)
    done: Ranks = [one for one in seen if one.facts.imported["version"]]
    hint = "install the same nvidia-nccl; see LD_LIBRARY_PATH and LD_PRELOAD for another libnccl.so"
    done = yield from _differing(done, lambda one: one.facts.imported["version"], None, "", "")
    yield from _differing(done, lambda one: one.facts.imported["nccl"], Severity.FAIL, "NCCL {}", hint, ranks=False)
    usual = median(one.facts.imported["seconds"] for one in done) if done else 0.0
    for one in done:
        seconds = one.facts.imported["seconds"]
        if seconds > max(_SLOW, _SLOWER * usual):
            hint = "copy the environment to the nodes, or have the node's file system looked at"
            yield on_node(
                one, Severity.WARN, NAME, f"import torch took {seconds:.0f} s", f"{usual:.0f} s, as elsewhere", hint
            )


def _differing(
    seen: Ranks,
    value: Callable[[Observation[VersionFacts]], str],
    level: Severity | None,
    found: str,
    hint: str,
    *,
    ranks: bool = True,
) -> Generator[Finding, None, Ranks]:
    """Who differs, unless ``level`` is None; returns those who do not: further differences follow from this one."""
    if not seen:
        return seen
    usual, others = minority(seen, value)
    for known, who in others.items():
        if level is not None:
            message = (found.format(known or "unknown"), f"{usual or 'unknown'}, as on most ranks", hint)
            yield finding_about(who, level, NAME, message, ranks=ranks)
    return [one for one in seen if value(one) == usual]


def node_lines(seen: Ranks) -> list[str]:
    """A line for each node, as its lowest rank sees it: ``node01 ok: Python 3.11.2, torch 2.13.0, NCCL 2.29.3, …``."""
    levels: dict[str, Severity] = {}
    for finding in judge(seen):
        levels |= {node: min(finding.level, levels.get(node, finding.level)) for node in finding.nodes}
    lines = []
    for node, ranks in by_node(seen).items():
        first = min(ranks, key=lambda one: one.local_rank).facts
        state = levels[node].name if node in levels else "ok"
        lines.append(f"{node} {state}: {', '.join((f'Python {first.python}', *_known(first)))}")
    return lines


def _packages(facts: VersionFacts) -> list[str]:
    return [
        f"{name} {(package['version'] or 'unknown') if package['place'] else 'missing'}"
        for name, package in facts.packages.items()
    ]


def _known(facts: VersionFacts) -> Iterator[str]:
    yield from _packages(facts)
    yield f"CUDA {facts.packages['torch']['cuda'] or '-'}, NCCL {facts.imported['nccl'] or '-'}"
    if facts.imported["version"]:
        yield f"import {facts.imported['seconds']:.1f} s"


def summary(seen: Ranks) -> str:
    """What rank 0 has, and how long the slowest import took."""
    facts = min(seen, key=lambda one: one.rank).facts
    slowest = max(one.facts.imported["seconds"] for one in seen)
    return f"Python {facts.python}, {', '.join(_packages(facts))}, torch imported in {slowest:.1f} s at most"


CHECK = Check(NAME, VersionFacts, collect, judge, summary, node_lines, within=_PATIENCE + 15.0)
