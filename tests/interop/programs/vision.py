"""Makes torchvision importable for programs whose package imports it, also where its build does not
match torch's: then it has no operators, and the programs use none.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

if importlib.util.find_spec("torchvision") is None:
    # The environment for other people's frameworks shows all packages of the main one but this.
    sys.path.append(str(Path(torch.__file__).resolve().parents[1]))
try:
    import torchvision  # noqa: F401
except RuntimeError:  # operator torchvision::nms does not exist
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    registrations = "torchvision._meta_registrations"
    sys.modules[registrations] = ModuleType(registrations)
