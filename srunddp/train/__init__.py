"""The shared training loop: DistributedDataParallel or FSDP, with the parts that are easily got wrong done once."""

from srunddp.config.parse import read_config
from srunddp.train.checkpoint.file import CheckpointError, save_checkpoint
from srunddp.train.checkpoint.resharding import load_checkpoint
from srunddp.train.config import CheckpointConfig, Config, DDPConfig, FSDPConfig, LoadingConfig, PreemptionConfig
from srunddp.train.data.order import Order, Weighted
from srunddp.train.metrics.accumulator import Metric, accuracy
from srunddp.train.preemption.preemption import Preemption
from srunddp.train.progress import EpochRecord
from srunddp.train.torchvision_compat import import_torchvision
from srunddp.train.trainer import Callback, Trainer
from srunddp.train.world import World

__all__ = [
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "Config",
    "DDPConfig",
    "EpochRecord",
    "FSDPConfig",
    "LoadingConfig",
    "Metric",
    "Order",
    "Preemption",
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
