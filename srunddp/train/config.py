"""What a user may set of the shared loop: frozen dataclasses, which a YAML file or ``--key=value`` can fill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """The model's copy on each rank; the names are DistributedDataParallel's where it has one.

    The defaults are the fast ones. Those that need a promise of the model are off.

    Attributes:
        gradient_as_bucket_view: gradients live in the all-reduce's buckets: one copy of them less, in memory and time.
        static_graph: the same parameters get gradients in every step; allows activation checkpointing below DDP and
            spares the search for unused ones. A promise, so off.
        bucket_cap_mb: megabytes of gradients that are all-reduced at once; None is torch's 25.
        find_unused_parameters: some parameters get no gradient in some steps. Costs a walk of the graph, so off.
        broadcast_buffers: rank 0's buffers are everybody's before each forward; costs nothing without buffers.
        sync_batchnorm: BatchNorm's statistics over all ranks' samples; GPUs only.
        hook: gradients on the wire: ``fp16`` or ``bf16`` halves them, ``powersgd`` approximates; each loses
            digits, and PowerSGD's memory begins anew after a resume.
        powersgd_rank: of PowerSGD's approximation.
        channels_last: images with the channels innermost, which convolutions on GPUs read faster.
        compile: run the model through ``torch.compile``; the first steps take long, so off.
        activation_checkpointing: classes of modules, by name, whose activations are computed again in backward rather
            than kept.
    """

    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: int = 1
    channels_last: bool = False
    compile: bool = False
    activation_checkpointing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """How the model is sharded with ``parallel`` fsdp, by :func:`torch.distributed.fsdp.fully_shard`.

    Attributes:
        modules: classes of modules, by name, each of which is gathered by itself, such as a transformer's layer; the
            rest of the model is gathered at once.
        reshard_after_forward: let go of what was gathered until the backward pass, which gathers it again.
        param_dtype: of what is gathered and computed with; ``bf16`` halves it, the shards and the sums of gradients
            stay in fp32.
    """

    modules: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    param_dtype: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True, kw_only=True)
class LoadingConfig:
    """How batches are read; the names are those of :class:`torch.utils.data.DataLoader`.

    Attributes:
        num_workers: reading processes per rank; 0 reads in the rank itself. None takes the CPUs that this rank may use
            but one, at most 8, and 0 for tensors that are in memory already.
        prefetch_factor: batches each worker reads ahead; None is torch's default.
        persistent_workers: keep the workers from one epoch to the next.
        drop_last: leave out the last step of an epoch where it is not full, as BatchNorm may need.
        pin_memory: page-locked batches; None pins them where the device is a GPU.
        multiprocessing_context: how workers start; None is ``fork``, or ``forkserver`` where MPI or RDMA makes
            fork unsafe.
        threads: of torch in this rank; None takes the CPUs that this rank may use, unless ``OMP_NUM_THREADS`` is set.
    """

    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    drop_last: bool = False
    pin_memory: bool | None = None
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written to ``output_dir``, and which are kept.

    Attributes:
        every_epochs, every_steps, every_minutes: epochs, steps or minutes from one to the next; 0 for never.
        keep_last: so many of the newest stay.
        keep_best: so many of the best stay besides, by ``Config.best``; each evaluation that is better writes one.
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
        lead_seconds: the same so long before the known end of a Slurm job, or before half of what was left at the start
            where that is less; 0 for never.
        requeue: have Slurm start the job again; else exit with 75.
        max_requeues: at most so often, by ``SLURM_RESTART_COUNT``.
    """

    signals: tuple[str, ...] = ("USR1", "USR2")
    lead_seconds: float = 120.0
    requeue: bool = True
    max_requeues: int = 100


@dataclass(frozen=True, kw_only=True)
class Config:
    """All that :class:`srunddp.Trainer` can be told, apart from the model, the data and functions.

    Attributes:
        epochs: passes over the training data.
        batch_size: samples per rank and micro-batch.
        accumulation: micro-batches per step; a step sees ``world_size * accumulation * batch_size`` samples.
        precision: of the forward pass: ``bf16`` and ``fp16`` run it under autocast, ``fp16`` with a GradScaler.
        parallel: ``ddp``, each rank has the whole model; or ``fsdp``, each has a shard of it, of its gradients and of
            the optimizer's state.
        clip_norm: the largest norm of all gradients together; None for any.
        scale_lr: multiply the optimizer's learning rate by a step's samples over ``base_batch_size``, or by the root.
        base_batch_size: samples per step for which that learning rate was meant; None is ``batch_size``, one rank's.
        schedule: the learning rate per step: ``constant``, or ``cosine`` from its full value to 0 at the end.
        warmup_steps: steps before, in which it grows linearly.
        ema_decay: evaluate an exponential moving average of the weights, such as 0.999: the part of it that stays in
            each step. None for the weights themselves.
        fused: use the optimizer's fused kernels where it has some and the user has chosen none.
        seed: of the order of samples and of the workers' random numbers.
        evaluate_every_epochs, evaluate_every_steps: on the test data; 0 for never.
        best: the figure of an evaluation that tells the best model, ``loss`` or a metric; of training without tests.
        best_mode: whether less or more is better.
        patience: stop after so many evaluations without a better one; 0 for never.
        output_dir: for checkpoints, ``config.yaml``, ``metrics.jsonl`` and traces; None writes nothing.
        resume: ``no``; ``auto`` for the newest whole checkpoint of ``output_dir``, if any; or a checkpoint's path.
            A job that Slurm has started again resumes in any case.
        log_every: steps from one step's line in ``metrics.jsonl`` to the next; 0 for none.
        tensorboard: write its event files too, where it is installed.
        profile: ``"10:15"`` writes a trace of the steps from the 10th up to the 15th.
        profile_ranks: on these ranks.
    """

    epochs: int = 3
    batch_size: int = 64
    accumulation: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    clip_norm: float | None = None
    scale_lr: Literal["no", "linear", "sqrt"] = "no"
    base_batch_size: int | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    ema_decay: float | None = None
    fused: bool = True
    seed: int = 0
    evaluate_every_epochs: int = 1
    evaluate_every_steps: int = 0
    best: str = "loss"
    best_mode: Literal["min", "max"] = "min"
    patience: int = 0
    output_dir: str | None = None
    resume: str = "no"
    log_every: int = 50
    tensorboard: bool = True
    profile: str = ""
    profile_ranks: tuple[int, ...] = (0,)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    loading: LoadingConfig = field(default_factory=LoadingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
