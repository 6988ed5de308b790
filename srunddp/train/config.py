"""What a user may set of the shared loop: frozen dataclasses, which a YAML file or ``--key=value``
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
    """The copy of the model on each rank, by DistributedDataParallel's names. What needs a promise
    of the model is off.

    Attributes:
        gradient_as_bucket_view: gradients live in the all-reduce's buckets: one copy of them less,
            in memory and time.
        static_graph: a promise that the same parameters get gradients in every step; allows
            activation checkpointing below DistributedDataParallel, and spares the search for unused
            parameters.
        bucket_cap_mb: megabytes of gradients that are all-reduced at once; None is torch's 25.
        find_unused_parameters: needed if some parameters get no gradient in some steps; costs a
            walk of the graph.
        broadcast_buffers: all ranks get rank 0's buffers once a step and before an evaluation; free
            without buffers.
        sync_batchnorm: BatchNorm's statistics are over all ranks' samples; GPUs only.
        comm_hook: gradients are sent as ``fp16`` or ``bf16`` (NCCL only): half the traffic, with
            fewer digits.
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
    """How batches are read; the names are those of ``torch.utils.data.DataLoader``.

    Attributes:
        num_workers: loader processes per rank; 0 reads in the rank itself. None is the CPUs that
            this rank may use but one, at most 8, and 0 for a ``TensorDataset`` without ``collate``.
        prefetch_factor: batches that each worker reads ahead; None is torch's 2.
        persistent_workers: keep the workers from one epoch to the next; not those of the validation
            data.
        drop_last: leave out an epoch's last step if it is not full, as BatchNorm may need; never of
            validation data.
        pin_memory: page-locked batches; None pins them on a GPU.
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
    """When checkpoints are written to ``output_dir``, beside one at the end and one before a stop,
    and which are kept.

    Attributes:
        every_epochs: epochs from one checkpoint to the next; 0 for never.
        every_steps: the same in optimizer steps.
        every_minutes: the same in minutes.
        keep_last: how many of the newest stay.
        keep_best: how many of the best by ``monitor`` stay as well; above 0, each new best figure
            writes one.
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
        signals: names without SIG, at which the ranks finish the step, write a checkpoint and
            requeue the job. SIGTERM always counts, without the requeueing.
        lead_seconds: the same, this long before the known end of a Slurm job, or half of what was
            left at the start if that is less; 0 for never.
        requeue: have Slurm start the job again; false exits with 75.
        max_requeues: how often at most, by ``SLURM_RESTART_COUNT``.
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
        max_steps: optimizer steps of the whole run, whatever ``epochs`` says; None goes by
            ``epochs``.
        batch_size: samples per rank and micro-batch, also of evaluations.
        gradient_accumulation_steps: micro-batches per optimizer step, which sees ``world_size *
            gradient_accumulation_steps * batch_size`` samples.
        precision: of the forward pass: ``bf16`` and ``fp16`` run it under autocast, ``fp16`` with a
            GradScaler.
        max_grad_norm: clip gradients to this norm of all together; None does not clip.
        scale_lr: multiply the learning rate by a step's samples over ``base_batch_size``
            (``linear``), or by the root of that (``sqrt``).
        base_batch_size: samples per step for which the learning rate was meant; None is
            ``batch_size``, one rank's.
        schedule: ``cosine`` takes the learning rate to 0 at the run's end, by the share that is
            done.
        warmup_steps: first steps, in which the learning rate grows linearly.
        scheduler_interval: when a ``scheduler`` is stepped: after each ``step`` or each ``epoch``.
        ema_decay: above 0 and below 1: also average the weights of about the last ``1 / (1 -
            ema_decay)`` steps, and evaluate that exponential moving average, of which this part
            stays in each step.
        fused: use the fused kernels of Adam, AdamW and SGD, unless the script has chosen an
            implementation.
        compile: run the model through ``torch.compile``; the first steps take long.
        channels_last: images with the channels innermost, which convolutions on GPUs read faster.
        activation_checkpointing: names of modules' classes whose activations are computed again in
            backward, not kept.
        num_threads: torch's threads in this rank; None is at most the CPUs that this rank may use,
            unless ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS`` is set.
        seed: of the order of samples and of the workers' random numbers.
        evaluate_every_epochs: epochs from one evaluation on the validation data to the next; 0 for
            never.
        evaluate_every_steps: the same in optimizer steps.
        monitor: figure of evaluations that tells the best model, ``loss`` or a metric; of several
            validation sets the first one's, or ``NAME/loss``; if no ``val_data``, of training.
        mode: whether a smaller (``min``) or a greater (``max``) figure is better. None is ``min``
            for ``loss``, and for names that end in ``loss``, ``error``, ``mse``, ``mae``, ``rmse``
            or ``perplexity``; ``max`` for those that end in ``accuracy``, ``f1``, ``auroc``,
            ``precision``, ``recall`` or ``iou``; what a torchmetrics object says of itself. For
            another figure it has to be set.
        patience: stop after this number of evaluations without a better figure; 0 for never.
        output_dir: a folder for checkpoints, ``config.yaml`` and ``metrics.jsonl``, which rank 0
            writes; ``~`` and variables in it are replaced. None writes nothing, and signals are not
            handled.
        resume: ``never``: a folder with checkpoints is refused. ``auto``: continue from the newest
            whole checkpoint of ``output_dir``, if any. Or a checkpoint's path. A run that Slurm or
            ``--restarts`` has started again always continues from the newest.
        resume_changed_data: continue although the data has another length or order, and miss
            samples or see them twice.
        log_every: steps between lines of ``metrics.jsonl``; 0 for none.
        tensorboard: write TensorBoard's files too, if it is installed.
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
        config: Of the training.

    Raises:
        ConfigError: A variable is not set.
    """
    if config.output_dir is None:
        return config
    resume = config.resume
    if resume not in ("never", "auto"):
        resume = expanded(resume, "resume")
    return replace(config, output_dir=expanded(config.output_dir, "output_dir"), resume=resume)
