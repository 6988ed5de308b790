"""The shared training loop: DistributedDataParallel, with the parts that are easily got wrong done once.

- the order: ``loop`` (a step, an epoch, :class:`Trainer`), ``run`` (what goes on around the steps), ``state`` (where
  training stands), ``agreement`` (what all ranks agree on)
- the model: ``replica`` (its copy on each rank), ``fsdp`` (its shards), ``deferred`` (one on the meta device),
  ``average`` (of its weights), ``optimizer`` (fused kernels, learning rate)
- data: ``order`` (of an epoch), ``shares`` (who gets what of it), ``reading`` (in the workers), ``data`` (on the
  device), ``workers`` and ``cpus`` (how many, and how they start), ``randomness`` (what is drawn)
- figures: ``metrics``, ``stateful`` (torchmetrics), ``late`` (the loss), ``history``, ``progress``, ``profile``,
  ``callbacks``
- checkpoints: ``checkpoint`` (a file), ``shelf`` (a folder of them), ``snapshot`` and ``writer`` (beside training),
  ``saving`` (a run's), ``keeping`` (when, and when to leave); of a model in shards ``shards``
  and ``dcp`` (files), ``sharding`` (a run's)
- the end of a job: ``preemption`` (who wishes it), ``requeue`` (how it goes on)
- settings: ``config``, ``configure`` (from a file and the command line; ``keys``, ``typed``, ``files``), ``settings``
  and ``checks`` (a user's errors, found before they hang or mislead)
- ``world``: what the loop needs to know of the ranks; ``vision``: torchvision's import
"""

from srunddp.config.parse import read_config
from srunddp.train.checkpoint.file import CheckpointError, save_checkpoint
from srunddp.train.checkpoint.resharding import load_checkpoint
from srunddp.train.config import CheckpointConfig, Config, DDPConfig, FSDPConfig, LoadingConfig, PreemptionConfig
from srunddp.train.data.order import Order, Weighted
from srunddp.train.metrics.accumulator import Metric, accuracy
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
