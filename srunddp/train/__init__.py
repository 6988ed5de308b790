"""The shared training loop: DistributedDataParallel, with the error-prone parts solved once."""

from srunddp.config.parse import read_config
from srunddp.train.callback import Callback
from srunddp.train.checkpoint.file import CheckpointError, load_checkpoint, save_checkpoint
from srunddp.train.checkpoint.manager import CheckpointManager
from srunddp.train.config import (
    CheckpointConfig,
    Config,
    DataLoaderConfig,
    DDPConfig,
    PreemptionConfig,
)
from srunddp.train.data.loader import DistributedDataLoader
from srunddp.train.data.order import Order, Weighted
from srunddp.train.data.steps import Batch, StepBatches
from srunddp.train.metrics.accumulator import Metric, accuracy
from srunddp.train.preemption.preemption import Preemption
from srunddp.train.progress import EpochRecord
from srunddp.train.torchvision_compat import import_torchvision
from srunddp.train.trainer import Trainer
from srunddp.train.world import World

__all__ = [
    "Batch",
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointManager",
    "Config",
    "DDPConfig",
    "DataLoaderConfig",
    "DistributedDataLoader",
    "EpochRecord",
    "Metric",
    "Order",
    "Preemption",
    "PreemptionConfig",
    "StepBatches",
    "Trainer",
    "Weighted",
    "World",
    "accuracy",
    "import_torchvision",
    "load_checkpoint",
    "read_config",
    "save_checkpoint",
]
