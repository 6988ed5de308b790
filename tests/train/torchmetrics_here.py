"""Import this before torchmetrics, whose import fails where torchvision's build does not match torch's."""

from srunddp.train import import_torchvision

import_torchvision()
