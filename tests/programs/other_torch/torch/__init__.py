"""Another torch than that of the environment, as a forgotten PYTHONPATH brings it."""

from torch.version import __version__ as __version__
