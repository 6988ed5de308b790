"""Launches a PyTorch training script on a Slurm or MPI cluster, one process per GPU."""

from typing import TYPE_CHECKING, Any

from srunddp._version import __version__

if TYPE_CHECKING:
    from srunddp.bootstrap.process_group.init import init as init
    from srunddp.bootstrap.process_group.store import restart_count as restart_count
    from srunddp.bootstrap.process_group.world import World as World
    from srunddp.telemetry import heartbeat as heartbeat
    from srunddp.train import Callback as Callback
    from srunddp.train import Config as Config
    from srunddp.train import Trainer as Trainer
    from srunddp.train import read_config as read_config

__all__ = [
    "Callback",
    "Config",
    "Trainer",
    "World",
    "__version__",
    "heartbeat",
    "init",
    "read_config",
    "restart_count",
]

_HOMES = {
    "Callback": "srunddp.train",
    "Config": "srunddp.train",
    "Trainer": "srunddp.train",
    "World": "srunddp.bootstrap.process_group.world",
    "heartbeat": "srunddp.telemetry",
    "init": "srunddp.bootstrap.process_group.init",
    "read_config": "srunddp.train",
    "restart_count": "srunddp.bootstrap.process_group.store",
}


def __getattr__(name: str) -> Any:
    # Most of these modules import torch, which takes seconds: `import srunddp` must not do that.
    import importlib

    if name == "train":  # the guides write srunddp.train.NAME
        return importlib.import_module("srunddp.train")
    if name not in _HOMES:
        raise AttributeError(f"module 'srunddp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
