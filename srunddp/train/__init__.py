"""The shared training loop: DistributedDataParallel, with the parts that are easily got wrong done once.

- ``loop``: the order of a step and of an epoch, :class:`Trainer`
- ``replica``: the model on all ranks, and its DistributedDataParallel wrap
- ``data``: each rank's shard, and which of its samples count
- ``metrics``: sums and counts over all ranks, divided once
- ``checkpoint``: files that are whole or not there
- ``progress``: what an epoch came to, and the one line that says so
- ``checks``: a user's errors, found before they hang or mislead
- ``world``: what the loop needs to know of the ranks
- ``vision``: torchvision's import
"""

from srunddp.train.callbacks import Callback
from srunddp.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from srunddp.train.config import CheckpointConfig, Config, DDPConfig, LoadingConfig, PreemptionConfig
from srunddp.train.configure import read_config
from srunddp.train.loop import Trainer
from srunddp.train.metrics import Metric, accuracy
from srunddp.train.order import Order, Weighted
from srunddp.train.progress import EpochRecord
from srunddp.train.vision import import_torchvision
from srunddp.train.world import World

__all__ = [
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "Config",
    "DDPConfig",
    "EpochRecord",
    "LoadingConfig",
    "Metric",
    "Order",
    "PreemptionConfig",
    "Trainer",
    "Weighted",
    "World",
    "accuracy",
    "import_torchvision",
    "load_checkpoint",
    "read_config",
    "save_checkpoint",
]
