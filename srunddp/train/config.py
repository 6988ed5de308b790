"""The settings of the shared loop: frozen dataclasses that a YAML file or ``--key=value``
can fill.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from srunddp.config.schema import SettingsBase
from srunddp.util.user_path import expanded

_PROFILE_HINT = "pass a callback that calls torch.profiler, such as that in docs/guides/training.md"
_FSDP_HINT = "leave it out; for FSDP write a loop of your own, such as docs/examples/fsdp_loop.py"


@dataclass(frozen=True, kw_only=True)
class DDPConfig(SettingsBase):
    """Settings of DistributedDataParallel, by the names of its arguments. Settings that not every
    model allows are off by default.

    Attributes:
        gradient_as_bucket_view: keep gradients in the buckets of the all-reduce, which saves a copy
            of them in memory and time.
        static_graph: promise that the same parameters get gradients in every step; allows
            activation checkpointing under DistributedDataParallel, and saves the search for unused
            parameters.
        bucket_cap_mb: megabytes of gradients per all-reduce; None is torch's 25.
        find_unused_parameters: needed if some parameters get no gradient in some steps; costs a
            search of the graph in each step.
        broadcast_buffers: send rank 0's buffers to all ranks once a step and before an evaluation;
            free without buffers.
        sync_batchnorm: compute BatchNorm's statistics over the samples of all ranks; GPUs only.
        comm_hook: send gradients as ``fp16`` or ``bf16`` (NCCL only): half the traffic, with fewer
            digits.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {
        "hook": "write comm_hook",
        "compile": "write compile, without ddp",
        "channels_last": "write channels_last, without ddp",
        "activation_checkpointing": "write activation_checkpointing, without ddp",
    }

    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    comm_hook: Literal["none", "fp16", "bf16"] = "none"


@dataclass(frozen=True, kw_only=True)
class DataLoaderConfig(SettingsBase):
    """How batches are read; the names are from ``torch.utils.data.DataLoader``.

    Attributes:
        num_workers: loader processes per rank; 0 reads in the rank itself. None is one less than
            the CPUs that this rank may use, at most 8, and 0 for a ``TensorDataset`` without
            ``collate``.
        prefetch_factor: batches that each worker reads ahead; None is torch's 2.
        persistent_workers: keep the workers from one epoch to the next, except those of the
            validation data.
        drop_last: leave out an epoch's last step if it is not full, as BatchNorm may need;
            validation data is never left out.
        pin_memory: put batches in page-locked memory; None does so with a GPU.
        multiprocessing_context: how workers start; None is ``forkserver`` with MPI, or with NCCL
            and InfiniBand, if the script's text has ``__name__`` and calls MPI in functions only,
            else ``fork``.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {"threads": "write num_threads, without dataloader"}

    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    drop_last: bool = False
    pin_memory: bool | None = None
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written to ``output_dir``, in addition to one at the end and one before
    a stop, and which are kept.

    Attributes:
        every_epochs: epochs between checkpoints; 0 for never.
        every_steps: optimizer steps between checkpoints; 0 for never.
        every_minutes: minutes between checkpoints; 0 for never.
        keep_last: how many of the newest are kept.
        keep_best: how many of the best by ``monitor`` are kept as well; if above 0, each new best
            figure also writes a checkpoint.
    """

    every_epochs: int = 1
    every_steps: int = 0
    every_minutes: float = 0.0
    keep_last: int = 2
    keep_best: int = 1


@dataclass(frozen=True, kw_only=True)
class PreemptionConfig:
    """What happens when the job has to leave its nodes; ``Trainer`` needs an ``output_dir`` for it.

    Attributes:
        signals: names without SIG: after such a signal the ranks finish the step, write a
            checkpoint and requeue the job. SIGTERM always does the same without requeueing.
        lead_seconds: seconds before the known end of a Slurm job at which the ranks do the same,
            but not before half of the time that was left at the start is over; 0 for never.
        requeue: let Slurm start the job again; false exits with 75.
        max_requeues: the most requeues, as counted by ``SLURM_RESTART_COUNT``.
    """

    signals: tuple[str, ...] = ("USR1", "USR2")
    lead_seconds: float = 120.0
    requeue: bool = True
    max_requeues: int = 100


@dataclass(frozen=True, kw_only=True)
class Config(SettingsBase):
    """The settings of ``Trainer``; ``ddp``, ``dataloader``, ``checkpoint`` and ``preemption`` are
    groups of settings.

    Attributes:
        epochs: passes over the training data.
        max_steps: optimizer steps of the whole run, whatever ``epochs`` says; None uses ``epochs``.
        batch_size: samples per rank and micro-batch, also of evaluations.
        gradient_accumulation_steps: micro-batches per optimizer step, which sees ``world_size *
            gradient_accumulation_steps * batch_size`` samples.
        precision: precision of the forward pass: ``bf16`` and ``fp16`` run it under autocast,
            ``fp16`` with a GradScaler.
        max_grad_norm: clip the norm of all gradients together to this value; None does not clip.
        scale_lr: multiply the learning rate by the samples per step divided by ``base_batch_size``
            (``linear``), or by the square root of that (``sqrt``).
        base_batch_size: samples per step for which the learning rate was chosen; None is
            ``batch_size``, that of one rank.
        schedule: ``cosine`` lowers the learning rate to 0 at the end of the run, by the share of
            the training that is done.
        warmup_steps: number of first steps, in which the learning rate grows linearly.
        scheduler_interval: when a ``scheduler`` is stepped: after each ``step`` or each ``epoch``.
        ema_decay: above 0 and below 1: also keep an exponential moving average of the weights, over
            about the last ``1 / (1 - ema_decay)`` steps, and evaluate it. Each step keeps this
            share of the average.
        fused: use the fused kernels of Adam, AdamW and SGD, unless the script chooses an
            implementation.
        compile: run the model through ``torch.compile``; the first steps take long.
        channels_last: store images with the channels innermost, which convolutions on GPUs read
            faster.
        activation_checkpointing: class names of modules whose activations are recomputed in
            backward instead of kept.
        num_threads: number of torch's threads in this rank; None is at most the number of CPUs that
            this rank may use, unless ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS`` is set.
        seed: seed for the order of samples and for the workers' random numbers.
        evaluate_every_epochs: epochs between evaluations on the validation data; 0 for never.
        evaluate_every_steps: optimizer steps between evaluations; 0 for never.
        monitor: figure of evaluations that decides which model is best: ``loss`` or a metric. With
            several validation sets it is that of the first one, or ``NAME/loss``; without
            ``val_data``, that of training.
        mode: whether a smaller (``min``) or a greater (``max``) figure is better. None is ``min``
            for ``loss``, and for names that end in ``loss``, ``error``, ``mse``, ``mae``, ``rmse``
            or ``perplexity``; ``max`` for those that end in ``accuracy``, ``f1``, ``auroc``,
            ``precision``, ``recall`` or ``iou``; for a torchmetrics object what its
            ``higher_is_better`` says. Set it for any other figure.
        patience: stop after this many evaluations without a better figure; 0 for never.
        output_dir: folder for checkpoints, ``config.yaml`` and ``metrics.jsonl``, which rank 0
            writes; ``~`` and variables in it are replaced. None writes nothing and handles no
            signals.
        resume: ``never``: refuse a folder with checkpoints. ``auto``: continue from the newest
            complete checkpoint of ``output_dir``, if any. Or the path of a checkpoint. A run that
            Slurm or ``--restarts`` has started again always continues from the newest.
        resume_changed_data: continue although the data has another length or order, so that samples
            may be missed or seen twice.
        log_every: steps between the lines for steps in ``metrics.jsonl``; 0 for none.
        tensorboard: also write files for TensorBoard, if it is installed.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {
        "accumulation": "write gradient_accumulation_steps",
        "clip_norm": "write max_grad_norm",
        "best": "write monitor",
        "best_mode": "write mode",
        "loading": "write dataloader",
        "profile": _PROFILE_HINT,
        "profile_ranks": _PROFILE_HINT,
        "parallel": _FSDP_HINT,
        "fsdp": _FSDP_HINT,
    }

    epochs: int = 3
    max_steps: int | None = None
    batch_size: int = 64
    gradient_accumulation_steps: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    max_grad_norm: float | None = None
    scale_lr: Literal["no", "linear", "sqrt"] = "no"
    base_batch_size: int | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    scheduler_interval: Literal["step", "epoch"] = "step"
    ema_decay: float | None = None
    fused: bool = True
    compile: bool = False
    channels_last: bool = False
    activation_checkpointing: tuple[str, ...] = ()
    num_threads: int | None = None
    seed: int = 0
    evaluate_every_epochs: int = 1
    evaluate_every_steps: int = 0
    monitor: str = "loss"
    mode: Literal["min", "max"] | None = None
    patience: int = 0
    output_dir: str | None = None
    resume: str = "never"
    resume_changed_data: bool = False
    log_every: int = 50
    tensorboard: bool = True
    ddp: DDPConfig = field(default_factory=DDPConfig)
    dataloader: DataLoaderConfig = field(default_factory=DataLoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)


def with_expanded_paths(config: Config) -> Config:
    """Return the settings with ``~`` and variables in paths replaced.

    Args:
        config: The settings of the training.

    Raises:
        ConfigError: A variable is not set.
    """
    if config.output_dir is None:
        return config
    resume = config.resume
    if resume not in ("never", "auto"):
        resume = expanded(resume, "resume")
    return replace(config, output_dir=expanded(config.output_dir, "output_dir"), resume=resume)
