"""One Python, one torch and one version of each named package on all ranks; does torch import, and does torchvision."""

import ast
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TypedDict

from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Observation, Ranks, Severity
from srunddp.check.packages import Package, find, imports, parsed

_PATIENCE = 120.0  # seconds for an import of torch, from a file server that many nodes ask at once
_IMPORT_IT = {"torchmetrics", "lightning", "pytorch_lightning", "timm"}  # torchvision, where it is there
_SLOW, _SLOWER = 10.0, 3  # seconds, and times the usual

_IMPORT = """
import json, sys, time
sys.path[:0] = sys.argv[2:]
start = time.monotonic()
import torch
took = time.monotonic() - start
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    nccl = ""
cuda = getattr(getattr(torch, "version", None), "cuda", None) or ""
found = {"version": str(torch.__version__), "cuda": cuda, "nccl": nccl, "seconds": took}
print("\\n" + json.dumps(found), flush=True)
if sys.argv[1]:
    import torchvision
    if cuda and not getattr(torchvision.version, "cuda", None):
        sys.exit("it is without CUDA: nms, roi_align and its other operators do not run on a GPU")
"""


class Imported(TypedDict):
    """torch as it was imported, and in how many seconds; ``error``, ``vision``: why torch and torchvision were not."""

    version: str
    cuda: str
    nccl: str
    seconds: float
    error: str
    vision: str


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """Of one rank.

    Attributes:
        python: its version; executable, prefix: of the environment.
        packages: torch and those named, by name.
        imported: torch, on local rank 0 alone; and torchvision, if it is there, and named or imported by the script.
        needs_vision: whether the script ends where torchvision's import fails.
    """

    python: str
    executable: str
    prefix: str
    packages: dict[str, Package]
    imported: Imported
    needs_vision: bool = False


NOT_ASKED = Imported(version="", cuda="", nccl="", seconds=0.0, error="", vision="")


def collect(context: CheckContext) -> VersionFacts:
    """This rank's. torch is imported in a process of its own, so that this one stays without it."""
    folder = os.path.dirname(os.path.realpath(context.script)) if context.script else ""
    shared: Callable[[str], str] = context.staged.shared if context.staged else str
    packages = {name: find(name, folder) for name in ("torch", *context.packages)}
    imported, needs_vision = NOT_ASKED, False
    if context.environment.local_rank == 0 and packages["torch"]["place"]:
        vision, needs_vision = _vision(context)
        imported = import_torch(folder, vision=vision and bool(find("torchvision", folder)["place"]))
    return VersionFacts(
        python=platform.python_version(),
        executable=shared(sys.executable),
        prefix=shared(sys.prefix),
        packages={name: Package(**{**each, "place": shared(each["place"])}) for name, each in packages.items()},
        imported=imported,
        needs_vision=needs_vision,
    )


def _vision(context: CheckContext) -> tuple[bool, bool]:
    """Whether torchvision's import is to be tried, and whether the script ends where it fails."""
    tree, named = parsed(context.script)[0], "torchvision" in context.packages
    text = ast.dump(tree) if tree else ""
    if not tree or "import_torchvision" in text:  # with that function the script does without a build that fits
        return named, False
    tried = named or bool(({"torchvision"} | _IMPORT_IT) & imports(tree))
    # A script that declares torchvision's operators itself knows what it does.
    return tried, "torchvision" in imports(tree, optional=False) and "torchvision::" not in text


def import_torch(folder: str, patience: float = _PATIENCE, *, vision: bool = False) -> Imported:
    """What another process says that imports torch as a script in ``folder`` would, and torchvision if asked to."""
    command = [sys.executable, "-P", "-c", _IMPORT, "vision" if vision else "", *([folder] if folder else [])]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=patience
        )
    except subprocess.TimeoutExpired:
        return Imported(**{**NOT_ASKED, "seconds": patience, "error": f"it took more than {patience:g} s"})
    said = [line for line in done.stdout.splitlines() if line.startswith('{"version": ')]
    why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if not said or (done.returncode and not vision):
        return Imported(**{**NOT_ASKED, "error": why})
    return Imported(**{**NOT_ASKED, **json.loads(said[-1]), "vision": why if done.returncode else ""})


def evaluate(seen: Ranks[VersionFacts]) -> Iterator[Finding]:
    """Ranks of different versions fail, or compute different things."""
    yield from _pythons(seen)
    for name in dict.fromkeys(name for one in seen for name in one.facts.packages):
        yield from _package(seen, name)
    for one in seen:
        yield from _import(one)
    yield from _imports(seen.where(lambda one: one.facts.imported["version"]))


def _pythons(seen: Ranks[VersionFacts]) -> Iterator[Finding]:
    hint = "start all ranks in one environment (srun --export=ALL, mpirun -x PATH)"
    seen = yield from seen.differing(lambda one: one.facts.python.rpartition(".")[0], FAIL, "Python", hint)
    yield from seen.differing(lambda one: one.facts.python, WARN, "Python", hint)
    yield from seen.differing(lambda one: f"{one.facts.executable} of {one.facts.prefix}", WARN, "Python is", hint)


def _package(seen: Ranks[VersionFacts], name: str) -> Iterator[Finding]:
    def known(one: Observation[VersionFacts]) -> Package:
        return one.facts.packages[name]

    def place(one: Observation[VersionFacts]) -> str:
        return known(one)["place"].replace(one.facts.prefix, "sys.prefix", 1)

    if lacking := seen.where(lambda one: not known(one)["place"]):
        hint = "install it there, or use an environment that all nodes see"
        yield lacking.finding(FAIL, f"no package {name}", "one on every rank", hint)
    seen = seen.where(lambda one: known(one)["place"])
    hint = f"use one environment; see PYTHONPATH and the script's folder for another {name}"
    level = FAIL if name == "torch" else WARN
    seen = yield from seen.differing(lambda one: known(one)["version"], level, name, hint)
    seen = yield from seen.differing(lambda one: known(one)["cuda"], level, f"{name} for CUDA", hint)
    seen = yield from seen.differing(lambda one: known(one)["git"], WARN, f"{name} of commit", hint)
    yield from seen.differing(place, WARN, f"{name} of", hint)


def _import(one: Observation[VersionFacts]) -> Iterator[Finding]:
    error, seconds, vision = one.facts.imported["error"], one.facts.imported["seconds"], one.facts.imported["vision"]
    if error:
        slow = "see how fast its file system is; copy the environment to the nodes"
        hint = slow if seconds else f"see {one.facts.executable} -c 'import torch' on that node"
        level, expected = (WARN, "seconds") if seconds else (FAIL, "an import")
        yield one.finding(level, f"import torch: {error}", expected, hint)
    if vision:
        hint = "install torchvision from the same index as torch (for the CPU or one CUDA)"
        if "torchvision::" in vision:
            hint += ", or import it by srunddp.train.import_torchvision()"
        level = FAIL if one.facts.needs_vision and "without CUDA" not in vision else WARN
        expected = f"the torchvision of torch {one.facts.packages['torch']['version']}"
        yield one.finding(level, f"import torchvision: {vision}", expected, hint)


def _imports(done: Ranks[VersionFacts]) -> Iterator[Finding]:
    """Of the ranks that have imported torch, with the same version."""
    if not done:
        return
    version, _ = done.minority(lambda one: one.facts.imported["version"])
    done = done.where(lambda one: one.facts.imported["version"] == version)
    hint = "install the same nvidia-nccl; see LD_LIBRARY_PATH and LD_PRELOAD for another libnccl.so"
    yield from done.differing(lambda one: one.facts.imported["nccl"], FAIL, "NCCL", hint, ranks=False)
    usual = median(one.facts.imported["seconds"] for one in done)
    for one in done:
        seconds = one.facts.imported["seconds"]
        if seconds > max(_SLOW, _SLOWER * usual):
            hint = "copy the environment to the nodes, or have the node's file system looked at"
            yield one.finding(WARN, f"import torch took {seconds:.0f} s", f"{usual:.0f} s, as elsewhere", hint)


def node_lines(seen: Ranks[VersionFacts]) -> list[str]:
    """A line for each node, as its lowest rank sees it: ``node01 ok: Python 3.11.2, torch 2.13.0, NCCL 2.29.3, …``."""
    levels: dict[str, Severity] = {}
    for finding in evaluate(seen):
        levels |= {node: min(finding.level, levels.get(node, finding.level)) for node in finding.nodes}
    first = {node: min(ranks, key=lambda one: one.local_rank).facts for node, ranks in seen.by_node().items()}
    states = {node: levels[node].name if node in levels else "ok" for node in first}
    return [f"{node} {states[node]}: {_known(facts)}" for node, facts in first.items()]


def _known(facts: VersionFacts) -> str:
    took = f", import {facts.imported['seconds']:.1f} s" if facts.imported["version"] else ""
    cuda, nccl = facts.packages["torch"]["cuda"] or "-", facts.imported["nccl"] or "-"
    return f"{_packages(facts)}, CUDA {cuda}, NCCL {nccl}{took}"


def _packages(facts: VersionFacts) -> str:
    versions = {name: each["version"] or "unknown" for name, each in facts.packages.items() if each["place"]}
    return ", ".join(
        [f"Python {facts.python}", *(f"{name} {versions.get(name, 'missing')}" for name in facts.packages)]
    )


def summary(seen: Ranks[VersionFacts]) -> str:
    """What rank 0 has, and how long the slowest import took."""
    slowest = max(one.facts.imported["seconds"] for one in seen)
    return f"{_packages(seen[0].facts)}, torch imported in {slowest:.1f} s at most"


CHECK = Check("versions", VersionFacts, collect, evaluate, summary, node_lines=node_lines, within=_PATIENCE + 15.0)
