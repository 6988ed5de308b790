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

from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Observation, Ranks
from srunddp.check.packages import Package, find, imports, parsed

_PATIENCE = 120.0  # seconds for an import of torch, from a file server that many nodes ask at once
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
        imported: torch, on local rank 0 alone; and torchvision, if it is there and needed.
    """

    python: str
    executable: str
    prefix: str
    packages: dict[str, Package]
    imported: Imported


NOT_ASKED = Imported(version="", cuda="", nccl="", seconds=0.0, error="", vision="")


def collect(context: CheckContext) -> VersionFacts:
    """This rank's. torch is imported in a process of its own, so that this one stays without it."""
    folder = os.path.dirname(os.path.realpath(context.script)) if context.script else ""
    shared: Callable[[str], str] = context.staged.shared if context.staged else str
    packages = {name: find(name, folder) for name in ("torch", *context.packages)}
    imported = NOT_ASKED
    if context.environment.local_rank == 0 and packages["torch"]["place"]:
        imported = import_torch(folder, vision=_needs_vision(context) and bool(find("torchvision", folder)["place"]))
    return VersionFacts(
        python=platform.python_version(),
        executable=shared(sys.executable),
        prefix=shared(sys.prefix),
        packages={name: Package(**{**each, "place": shared(each["place"])}) for name, each in packages.items()},
        imported=imported,
    )


def _needs_vision(context: CheckContext) -> bool:
    """Whether torchvision was named, or SCRIPT imports it and does nothing about a build for another torch."""
    tree = parsed(context.script)[0]
    needed = tree is not None and "torchvision" in imports(tree)
    provided = tree is not None and any(word in ast.dump(tree) for word in ("import_torchvision", "torchvision::"))
    return "torchvision" in context.packages or (needed and not provided)


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
    if lacking := seen.where(lambda one: not one.facts.packages[name]["place"]):
        hint = "install it there, or use an environment that all nodes see"
        yield lacking.finding(FAIL, f"no package {name}", "one on every rank", hint)
    seen = seen.where(lambda one: one.facts.packages[name]["place"])
    hint = f"use one environment; see PYTHONPATH and the script's folder for another {name}"
    level = FAIL if name == "torch" else WARN
    seen = yield from seen.differing(lambda one: one.facts.packages[name]["version"], level, name, hint)
    yield from seen.differing(lambda one: _place(one.facts, name), WARN, f"{name} of", hint)


def _place(facts: VersionFacts, name: str) -> str:
    return facts.packages[name]["place"].replace(facts.prefix, "sys.prefix", 1)


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
        expected = f"the torchvision of torch {one.facts.packages['torch']['version']}"
        yield one.finding(FAIL, f"import torchvision: {vision}", expected, hint)


def _imports(done: Ranks[VersionFacts]) -> Iterator[Finding]:
    """Of the ranks that have imported torch, with the same version."""
    if not done:
        return
    version, _ = done.minority(lambda one: one.facts.imported["version"])
    done = done.where(lambda one: one.facts.imported["version"] == version)
    hint = "install one build of torch on all nodes"
    yield from done.differing(lambda one: one.facts.imported["cuda"], FAIL, "torch for CUDA", hint, ranks=False)
    hint = "install the same nvidia-nccl; see LD_LIBRARY_PATH and LD_PRELOAD for another libnccl.so"
    yield from done.differing(lambda one: one.facts.imported["nccl"], FAIL, "NCCL", hint, ranks=False)
    usual = median(one.facts.imported["seconds"] for one in done)
    for one in done:
        seconds = one.facts.imported["seconds"]
        if seconds > max(_SLOW, _SLOWER * usual):
            hint = "copy the environment to the nodes, or have the node's file system looked at"
            yield one.finding(WARN, f"import torch took {seconds:.0f} s", f"{usual:.0f} s, as elsewhere", hint)


def summary(seen: Ranks[VersionFacts]) -> str:
    """What rank 0 has, and how long the slowest import took."""
    first, slowest = seen[0].facts, max(one.facts.imported["seconds"] for one in seen)
    versions = {name: each["version"] or "unknown" for name, each in first.packages.items() if each["place"]}
    found = [f"Python {first.python}", *(f"{name} {versions.get(name, 'missing')}" for name in first.packages)]
    return f"{', '.join(found)}, torch imported in {slowest:.1f} s at most"


CHECK = Check("versions", VersionFacts, collect, evaluate, summary, within=_PATIENCE + 15.0)
