"""torchvision's import, where its build does not match torch's."""

import importlib
from types import ModuleType

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> ModuleType:
    """Import torchvision, also one built for CUDA beside a torch for the CPU.

    There its compiled part does not load, and its import then fails at ``torchvision::nms``, an
    operator of that part. Its data sets, transforms and models do without: the operator is declared
    here, by name only. What needs the part, as ``torchvision.ops.nms`` or
    ``torchvision.io.read_image``, raises torchvision's RuntimeError.

    Loader workers that start again (forkserver, spawn) need it too: call this at the top of the
    script, which they run.

    Raises:
        ImportError: torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", _SIGNATURE)
    return importlib.import_module("torchvision")
