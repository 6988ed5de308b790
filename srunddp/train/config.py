"""What a user may set of the shared loop: frozen dataclasses, which a YAML file or ``--key=value`` can fill."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from srunddp.config.schema import SettingsBase

_PROFILE_HINT = "pass a callback that calls torch.profiler, such as that in docs/reference.md"
_FSDP_HINT = "leave it out; for FSDP write a loop of your own, such as docs/examples/fsdp_loop.py"


@dataclass(frozen=True, kw_only=True)
class DDPConfig(SettingsBase):
    """The model's copy on each rank; the names are DistributedDataParallel's.

    The defaults are the fast ones. Those that need a promise of the model are off.

    Attributes:
        gradient_as_bucket_view: gradients live in the all-reduce's buckets: one copy of them less, in memory and time.
        static_graph: the same parameters get gradients in every step; allows activation checkpointing below DDP and
            spares the search for unused ones. A promise, so off.
        bucket_cap_mb: megabytes of gradients that are all-reduced at once; None is torch's 25.
        find_unused_parameters: some parameters get no gradient in some steps. Costs a walk of the graph, so off.
        broadcast_buffers: rank 0's buffers are everybody's before each forward; costs nothing without buffers.
        sync_batchnorm: BatchNorm's statistics over all ranks' samples; GPUs only.
        comm_hook: gradients on the wire: ``fp16`` or ``bf16`` (NCCL only) halves them, and loses digits.
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
    """How batches are read; the names are those of :class:`torch.utils.data.DataLoader`.

    Attributes:
        num_workers: reading processes per rank; 0 reads in the rank itself. None takes the CPUs that this rank may use
            but one, at most 8, and 0 for tensors that are in memory already.
        prefetch_factor: batches each worker reads ahead; None is torch's default.
        persistent_workers: keep the training data's workers from one epoch to the next.
        drop_last: leave out the last step of an epoch where it is not full, as BatchNorm may need.
        pin_memory: page-locked batches; None pins them where the device is a GPU.
        multiprocessing_context: how workers start; None is ``fork``, or ``forkserver`` where MPI or RDMA makes
            fork unsafe.
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
    """When checkpoints are written to ``output_dir``, and which are kept.

    Attributes:
        every_epochs, every_steps, every_minutes: epochs, steps or minutes from one to the next; 0 for never.
        keep_last: so many of the newest stay.
        keep_best: so many of the best stay besides, by ``Config.monitor``; each evaluation that is better writes one.
    """

    every_epochs: int = 1
    every_steps: int = 0
    every_minutes: float = 0.0
    keep_last: int = 2
    keep_best: int = 1


@dataclass(frozen=True, kw_only=True)
class PreemptionConfig:
    """What happens when the job is preempted; Trainer needs an ``output_dir`` for it.

    Attributes:
        signals: by these names, without SIG: finish the step, write a checkpoint, requeue the job.
        lead_seconds: the same so long before the known end of a Slurm job, or half of what was left at the start where
            that is less; 0 for never.
        requeue: have Slurm start the job again; else exit with 75.
        max_requeues: at most so often, by ``SLURM_RESTART_COUNT``.
    """

    signals: tuple[str, ...] = ("USR1", "USR2")
    lead_seconds: float = 120.0
    requeue: bool = True
    max_requeues: int = 100


@dataclass(frozen=True, kw_only=True)
class Config(SettingsBase):
    """All that :class:`srunddp.Trainer` can be told, apart from the model, the data and functions.

    Attributes:
        epochs: passes over the training data.
        max_steps: optimizer steps of the whole run, whatever ``epochs`` says; None goes by ``epochs``.
        batch_size: samples per rank and micro-batch.
        gradient_accumulation_steps: micro-batches per optimizer step, which sees ``world_size *
            gradient_accumulation_steps * batch_size`` samples.
        precision: of the forward pass: ``bf16`` and ``fp16`` run it under autocast, ``fp16`` with a GradScaler.
        max_grad_norm: the largest norm of all gradients together; None for any.
        scale_lr: multiply the optimizer's learning rate by a step's samples over ``base_batch_size``, or by the root.
        base_batch_size: samples per step for which that learning rate was meant; None is ``batch_size``, one rank's.
        schedule: the learning rate: ``constant``, or ``cosine`` from its full value to 0, by the share of the run's
            samples that are done.
        warmup_steps: steps before, in which it grows linearly.
        scheduler_interval: whether a scheduler of one's own is stepped after each ``step`` or each ``epoch``.
        ema_decay: evaluate an exponential moving average of the weights, such as 0.999: the part of it that stays in
            each step. None for the weights themselves.
        fused: use the optimizer's fused kernels where it has some and the user has chosen none.
        compile: run the model through ``torch.compile``; the first steps take long, so off.
        channels_last: images with the channels innermost, which convolutions on GPUs read faster.
        activation_checkpointing: classes of modules, by name, whose activations are computed again in backward rather
            than kept.
        num_threads: of torch in this rank; None takes the CPUs that this rank may use, unless ``OMP_NUM_THREADS`` is
            set.
        seed: of the order of samples and of the workers' random numbers.
        evaluate_every_epochs, evaluate_every_steps: on the validation data; 0 for never.
        monitor: the figure of an evaluation that tells the best model, ``loss`` or a metric; of training without
            validation data.
        mode: whether the figure is better the smaller (``min``) or the greater (``max``) it is.
        patience: stop after so many evaluations without a better one; 0 for never.
        output_dir: for checkpoints, ``config.yaml`` and ``metrics.jsonl``; None writes nothing.
        resume: ``never``; ``auto`` for the newest whole checkpoint of ``output_dir``, if any; or a checkpoint's path.
            A job that Slurm has started again resumes in any case.
        resume_changed_data: go on from a checkpoint although the training data has another length or order since.
        log_every: steps from one step's line in ``metrics.jsonl`` to the next; 0 for none.
        tensorboard: write its event files too, where it is installed.
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
    mode: Literal["min", "max"] = "min"
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
