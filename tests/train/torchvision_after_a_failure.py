"""Imports torchvision twice in vain, as a program would that tries; then by srunddp. Prints what
nms does then.
"""

import importlib
import sys

import torch

from srunddp.train import import_torchvision

for name in ("torchvision", "torchvision.transforms.v2"):
    try:
        importlib.import_module(name)
    except RuntimeError as error:
        print(error)

torchvision = import_torchvision()
assert import_torchvision() is torchvision is sys.modules["torchvision"]
from torchvision.transforms import v2  # noqa: E402

image = v2.RandomHorizontalFlip(1.0)(torch.arange(12.0).reshape(3, 2, 2))
assert image[0].tolist() == [[1, 0], [3, 2]]
assert torchvision.models.resnet18(num_classes=2).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 2)

boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.9]])
for nms in (torchvision.ops.nms, torch.ops.torchvision.nms):
    try:
        print("kept", nms(boxes, torch.tensor([0.5, 0.6]), 0.5).tolist())
    except (RuntimeError, NotImplementedError) as error:
        print("error", str(error).partition(".")[0])
