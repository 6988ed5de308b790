"""Imports torchvision even if its build does not match torch's."""

import importlib
from types import ModuleType

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> ModuleType:
    """Import torchvision, even a build for CUDA with a torch for the CPU.

    In that case its compiled part does not load, and its import fails at ``torchvision::nms``, an
    operator of that part. Data sets, transforms and models do not need the part, so the operator is
    declared here, by name only. Functions that need the part, such as ``torchvision.ops.nms`` or
    ``torchvision.io.read_image``, raise torchvision's RuntimeError.

    Loader workers that import the script (forkserver, spawn) need this too, so call it at the top
    of the script.

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
