"""Whether a torchvision belongs to the torch beside it, without importing either.

Its compiled part is linked with libraries of the torch that it was built for, by name. Where one of them is not
there it does not load, and ``import torchvision`` ends with ``operator torchvision::nms does not exist``.
"""

from __future__ import annotations

import mmap
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypedDict

from srunddp.check.packages import Package, distributed

_NEEDED = re.compile(rb"\0((?:libtorch|libc10)\w*\.so|libcudart[\w.-]*\.so\.\d[\d.]*)(?=\0)")
_PINNED = re.compile(r"torch\s*\(?\s*==\s*([^\s,;)]+)")


class Vision(TypedDict):
    """torchvision beside torch; empty where nothing tells it.

    Attributes:
        version: its own.
        script: whether the script imports it, and ends where that fails.
        lacks: libraries of torch that its compiled part needs, and this torch does not have.
        cuda: major number of the CUDA that it is built for.
        no_gpu: whether it is without CUDA beside a torch that has it.
        wants: the one version of torch that its metadata names.
    """

    version: str
    script: bool
    lacks: list[str]
    cuda: str
    no_gpu: bool
    wants: str


def look(torch: Package, torchvision: Package, *, script: bool) -> Vision:
    """What the files of both tell; both are there."""
    libraries = Path(torch["place"], "torch", "lib")
    needed = _needed(Path(torchvision["place"], "torchvision"))
    # Where torch's libraries are elsewhere, as some distributions have them, nothing is known of what it lacks.
    known = (libraries / "libtorch.so").exists() and needed
    lacks = sorted(name for name in needed if "cudart" not in name and not (libraries / name).exists())
    return Vision(
        version=torchvision["version"],
        script=script,
        lacks=lacks if known else [],
        cuda=next((name.partition(".so.")[2].partition(".")[0] for name in needed if "cudart" in name), ""),
        no_gpu=bool(known) and (libraries / "libtorch_cuda.so").exists() and not any("cuda" in name for name in needed),
        wants=_wanted(torchvision["place"]),
    )


def _needed(package: Path) -> set[str]:
    """The libraries of torch and CUDA that the compiled part names; none where it has none."""
    try:
        compiled = next(package.glob("_C*.so"))
        with compiled.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return {name.decode() for name in _NEEDED.findall(text)}
    except (OSError, ValueError, StopIteration):
        return set()


def _wanted(place: str) -> str:
    found = distributed("torchvision", place)
    pinned = (_PINNED.match(line) for line in (found.requires if found else None) or ())
    return next((one[1] for one in pinned if one), "")


def misfit(vision: Vision, torch: Package) -> tuple[str, bool]:
    """What does not fit, and whether the import fails for it; an empty text where all does."""
    name, known = f"torchvision {vision['version']}", torch["version"]
    if vision["lacks"]:
        which = ", ".join(vision["lacks"])
        return f"{name} needs {which}, which torch {known} is without: importing it fails at torchvision::nms", True
    if vision["cuda"] and torch["cuda"] and vision["cuda"] != torch["cuda"].partition(".")[0]:
        return f"{name} is for CUDA {vision['cuda']}, torch {known} for {torch['cuda']}: importing it fails", True
    if vision["wants"] and known and not fnmatchcase(_public(known), _public(vision["wants"])):
        return f"{name} is for torch {vision['wants']}, and importing it beside another may fail", False
    if vision["no_gpu"]:
        return f"{name} is without CUDA: nms, roi_align and its other operators do not run on a GPU", False
    return "", False


def _public(version: str) -> str:
    return version.partition("+")[0]
