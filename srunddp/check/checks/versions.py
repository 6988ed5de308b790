"""Check that all ranks have one Python, one torch and one version of each named package, and that
torch and torchvision can be imported.
"""

import ast
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from statistics import median
from typing import Any

from srunddp.check.checks.launch import imports, parsed
from srunddp.check.finding import (
    FAIL,
    TOO_LONG,
    WARN,
    Check,
    CheckContext,
    Finding,
    Observation,
    Ranks,
    run_python,
)
from srunddp.util.kernel_file import text_of

_PATIENCE = 120.0  # seconds to import torch, perhaps from a file server that many nodes ask at once
_SLOW = 10.0  # seconds that an import may always take
_SLOWER = 3  # times the usual seconds that an import may take

# This code prints what it finds before it imports torchvision, because that import may crash. It
# prints a line end first, because other output at the start may lack one.
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
found = {"torch": str(torch.__version__), "cuda": cuda, "nccl": nccl, "seconds": took}
print("\\n" + json.dumps(found), flush=True)
if sys.argv[1]:
    import torchvision
"""


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """The versions of Python, torch and the named packages on one rank.

    Attributes:
        python: The version of Python.
        executable: The path of the interpreter.
        prefix: The path of the environment (``sys.prefix``).
        versions, places: For torch and each named package, its version and its folder as
            :func:`find` returns them. The version is ``missing`` or ``unknown`` instead of empty,
            and the folder has the text ``sys.prefix`` for the environment's path.
        torch, cuda, nccl: The versions that ``import torch`` shows, on local rank 0 only.
        seconds: How many seconds ``import torch`` took; 0 if this rank did not import it.
        error: Why torch could not be imported; else empty.
        vision: Why torchvision could not be imported; else empty.
    """

    python: str
    executable: str
    prefix: str
    versions: dict[str, str]
    places: dict[str, str]
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    seconds: float = 0.0
    error: str = ""
    vision: str = ""


def collect(context: CheckContext) -> VersionFacts:
    """Collect the versions that this rank would import. A child process imports torch, so that it
    is not loaded in this process.
    """
    if context.script:
        folder = os.path.dirname(os.path.realpath(context.script))
    else:
        folder = ""
    shared: Callable[[str], str]
    if context.staged:
        shared = context.staged.shared
    else:
        shared = str
    prefix = shared(sys.prefix)
    found = {name: find(name, folder) for name in ("torch", *context.packages)}
    # Import torch on only one rank of each node, because all ranks of a node see the same files,
    # and would slow each other down.
    imported = {}
    if context.environment.local_rank == 0 and found["torch"][1]:
        imported = import_torch(
            folder, vision=_needs_vision(context) and bool(find("torchvision", folder)[1])
        )
    return VersionFacts(
        python=platform.python_version(),
        executable=shared(sys.executable),
        prefix=prefix,
        versions={
            name: version or ("unknown" if place else "missing")
            for name, (version, place) in found.items()
        },
        places={
            # Replace the environment's path: if it differs on a rank, that is one finding, and not
            # one more for each package.
            name: shared(place).replace(prefix, "sys.prefix", 1)
            for name, (_, place) in found.items()
        },
        **imported,
    )


def find(name: str, first: str = "") -> tuple[str, str]:
    """Find the package that ``import name`` would import, or else the distribution with that name.
    Nothing is imported.

    Args:
        name: The name of a module or a distribution.
        first: The script's folder, which Python searches first; empty without a script.

    Returns:
        The version, empty if it is not known, and the folder. Both are empty if there is no such
        package.
    """
    module = name.partition(".")[0]
    origin = _origin(module, first)
    if not origin:
        there = next(iter(distributions(name=name) if name else ()), None)
        if there:
            return (there.version, str(there.locate_file("")))
        return ("", "")
    if os.path.basename(origin).startswith("__init__."):
        package = os.path.dirname(origin)
    else:
        package = origin
    place = os.path.dirname(package)
    # Prefer the version in torch/version.py, because the version in torch's metadata may lack the
    # build, such as +cpu.
    if module == "torch":
        own = _assigned(Path(package, "version.py"))
    else:
        own = ""
    return own or _version(module, place) or _assigned(Path(origin)), place


def _origin(module: str, first: str) -> str:
    """Return the file of a module, or the folder of a package without ``__init__.py``; empty if
    there is none.
    """
    try:
        spec = PathFinder.find_spec(module, [first]) if first else None
        if spec is None or spec.origin is None:  # a plain folder beside the script hides no package
            # For a name with dots find_spec() would import the packages above; this name has no
            # dots.
            spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        # find_spec() raises a ValueError for a loaded module without `__spec__`, such as __main__.
        return ""
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def _version(module: str, place: str) -> str:
    """Return the version of the distribution in the folder ``place`` that has this module, not of
    one in another folder of ``sys.path``; empty if there is none.
    """
    for name in (module, *packages_distributions().get(module, ())):
        for found in distributions(name=name, path=[place]):
            return found.version
    return ""


def _assigned(path: Path) -> str:
    """Return the text that a file assigns to ``__version__``; empty if it assigns none or cannot be
    read.
    """
    # Matches `__version__ = '2.13.0+cpu'` and `__version__: Final[str] = "1.2"`.
    found = re.search(
        r"""^__version__\s*(?::[^=\n]*)?=\s*["']([^"'\n]*)["']""", text_of(path), re.MULTILINE
    )
    if found:
        return found[1]
    return ""


def _needs_vision(context: CheckContext) -> bool:
    """Tell whether torchvision was named, or the script imports it without guarding against a
    torchvision that was built for another torch.
    """
    tree = parsed(context.script)[0]
    needed = tree is not None and "torchvision" in imports(tree)
    # The script uses srunddp's helper, or defines the operator torchvision::nms itself, which such
    # a build lacks.
    provided = tree is not None and any(
        word in ast.dump(tree) for word in ("import_torchvision", "torchvision::")
    )
    return "torchvision" in context.packages or (needed and not provided)


def import_torch(
    folder: str, patience: float = _PATIENCE, *, vision: bool = False
) -> dict[str, Any]:
    """Import torch in another process, as the script would.

    Args:
        folder: The script's folder, where Python looks first; empty for none.
        patience: The seconds that the import may take.
        vision: Whether to import torchvision too.

    Returns:
        Attributes of :class:`VersionFacts` by name: the versions, or in ``error`` why the import
        failed.
    """
    words = ["vision" if vision else "", *([folder] if folder else [])]
    printed, why = run_python(_IMPORT, *words, within=patience)
    said = [line for line in printed.splitlines() if line.startswith('{"torch": ')]
    # With ``vision``, an error after torch's line comes from the import of torchvision.
    if not said or (why and not vision):
        return {"error": why or "exit code 0"}
    return {**json.loads(said[-1]), "vision": why}


def evaluate(seen: Ranks[VersionFacts]) -> Iterator[Finding]:
    """Judge the versions and the imports, because ranks with different versions fail or compute
    different results.
    """
    yield from _pythons(seen)
    for name in dict.fromkeys(name for one in seen for name in one.facts.places):
        yield from _package(seen, name)
    for one in seen:
        yield from _import(one)
    yield from _imports(seen.where(lambda one: one.facts.torch))


def _pythons(seen: Ranks[VersionFacts]) -> Iterator[Finding]:
    hint = "start all ranks in one environment (srun --export=ALL, mpirun -x PATH)"
    # Bytecode and extension modules depend on the minor version, and work with all its patch
    # versions.
    seen = yield from seen.differing(
        lambda one: one.facts.python.rpartition(".")[0], FAIL, "Python", hint
    )
    yield from seen.differing(lambda one: one.facts.python, WARN, "Python", hint)
    yield from seen.differing(
        lambda one: f"{one.facts.executable} of {one.facts.prefix}", WARN, "Python is", hint
    )


def _package(seen: Ranks[VersionFacts], name: str) -> Iterator[Finding]:
    if lacking := seen.where(lambda one: not one.facts.places[name]):
        hint = "install it there, or use an environment that all nodes see"
        yield lacking.finding(FAIL, f"no package {name}", "one on every rank", hint)
    seen = seen.where(lambda one: one.facts.places[name])
    hint = f"use one environment; see PYTHONPATH and the script's folder for another {name}"
    level = FAIL if name == "torch" else WARN
    seen = yield from seen.differing(lambda one: one.facts.versions[name], level, name, hint)
    yield from seen.differing(lambda one: one.facts.places[name], WARN, f"{name} of", hint)


def _import(one: Observation[VersionFacts]) -> Iterator[Finding]:
    error = one.facts.error
    vision = one.facts.vision
    if error:
        slow = error.startswith(TOO_LONG)
        hint = "see how fast its file system is; copy the environment to the nodes"
        if not slow:
            hint = f"see {one.facts.executable} -c 'import torch' on that node"
        yield one.finding(
            WARN if slow else FAIL,
            f"import torch: {error}",
            "seconds" if slow else "an import",
            hint,
        )
    if vision:
        hint = "install torchvision from the same index as torch (for the CPU or one CUDA)"
        if "torchvision::" in vision:
            hint += ", or import it by srunddp.train.import_torchvision()"
        expected = f"the torchvision of torch {one.facts.versions['torch']}"
        yield one.finding(FAIL, f"import torchvision: {vision}", expected, hint)


def _imports(done: Ranks[VersionFacts]) -> Iterator[Finding]:
    """Compare the imports of torch among the ranks that imported its most frequent version."""
    if not done:
        return
    version, _ = done.minority(lambda one: one.facts.torch)
    done = done.where(lambda one: one.facts.torch == version)
    hint = "install one build of torch on all nodes"
    yield from done.differing(lambda one: one.facts.cuda, FAIL, "torch for CUDA", hint, ranks=False)
    hint = "install the same nvidia-nccl; see LD_LIBRARY_PATH and LD_PRELOAD for another libnccl.so"
    yield from done.differing(lambda one: one.facts.nccl, FAIL, "NCCL", hint, ranks=False)
    usual = median(one.facts.seconds for one in done)
    for one in done:
        seconds = one.facts.seconds
        if seconds > max(_SLOW, _SLOWER * usual):
            hint = "copy the environment to the nodes, or have the node's file system looked at"
            yield one.finding(
                WARN, f"import torch took {seconds:.0f} s", f"{usual:.0f} s, as elsewhere", hint
            )


def summary(seen: Ranks[VersionFacts]) -> str:
    """Write the versions of rank 0, and how long the slowest import of torch took."""
    first = seen[0].facts
    slowest = max(one.facts.seconds for one in seen)
    found = [
        f"Python {first.python}",
        *(f"{name} {version}" for name, version in first.versions.items()),
    ]
    return f"{', '.join(found)}, torch imported in {slowest:.1f} s at most"


# Give the check more time than the import has, because the message about a slow import tells the
# user more than the message about a slow check.
CHECK = Check("versions", VersionFacts, collect, evaluate, summary, within=_PATIENCE + 15.0)
