"""What a job script is made from: :class:`SlurmJob`, whose fields are the options and the keys of the YAML file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What is started, on which resources, and in which environment.

    Attributes:
        script: the training script; also the first argument.
        arguments: the script's; also all that follows it.
        nodes: how many.
        gpus_per_node: as Slurm has it, 4 or a100:4.
        ntasks_per_node: ranks on each node; one for each GPU unless given, or 1 without GPUs.
        modules: environment modules to load, in this order.
        module_purge: unload all modules first.
        venv: folder of a virtual environment; the active one unless another environment is named.
        conda: name or folder of a conda environment.
        env: NAME=VALUE to export, NCCL's settings among them.
        backend: for srunddp.init(): nccl, gloo or auto.
        ifaces: which interface each node uses; see etc/ifaces.conf.
        log_dir: folder for all output.
        rank_logs: a file for each rank's output besides, in log_dir.
        preflight: run srunddp check before the training, which is not started where that finds a failure.
        offline: nothing is downloaded: srunddp run --offline.
        srunddp: the command on the nodes; the environment's own, or else the one that is running.
        run_options: further options of srunddp run.
        job_name: the script's name without its ending unless given.
        gres: such as gpu:4 or gpu:a100:4, instead of gpus_per_node.
        cpus_per_task: for each rank, its loader workers included.
        mem: for each node, such as 64G; 0 for all of it.
        time: limit, such as 04:00:00 or 1-12:00:00.
        partition, account, qos, constraint, reservation, nodelist, exclude, array, dependency: as sbatch has it.
        exclusive: no other job on the nodes.
        requeue: a job that is warned of its end, or preempted, is started again; the script has to resume.
        signal: with which the ranks are warned, and how many seconds before the end; auto is USR2@120 with requeue.
        mpi: for srun's --mpi, such as pmi2; empty for the site's default.
        container: an Apptainer image, which has srunddp.
        container_image: for pyxis; an image that has srunddp.
        container_mounts: for pyxis, SOURCE:TARGET; this folder is mounted in any case.
        monitor: whole seconds between samples of each node's use: srunddp run --monitor; srunddp report follows the
            training.
        stage: bring the environment and this folder to nodes that do not see them, by srunddp stage push.
        data: further folders to bring along.
        stage_exclude: names in this folder that are not brought along, with wildcards; nor is the log folder.
    """

    script: str | None = None
    arguments: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: str | None = None
    ntasks_per_node: int | None = None
    modules: tuple[str, ...] = ()
    module_purge: bool = False
    venv: str | None = None
    conda: str | None = None
    env: tuple[str, ...] = ()
    backend: Literal["nccl", "gloo", "auto"] | None = None
    ifaces: str | None = None
    log_dir: str = "logs"
    rank_logs: bool = False
    preflight: bool = False
    offline: bool = False
    srunddp: str | None = None
    run_options: tuple[str, ...] = ()
    job_name: str | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    nodelist: str | None = None
    exclude: str | None = None
    array: str | None = None
    dependency: str | None = None
    requeue: bool = False
    signal: str = "auto"
    mpi: str = ""
    container: str | None = None
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    monitor: int | None = None
    stage: bool = False
    data: tuple[str, ...] = ()
    stage_exclude: tuple[str, ...] = ()

    @property
    def in_container(self) -> bool:
        """Whether srunddp runs in a container."""
        return bool(self.container or self.container_image)

    @property
    def gpus(self) -> int:
        """GPUs on each node, by ``4`` or ``a100:2,v100:1``, or in gres such as ``gpu:a100:4,tmpfs:100G``."""
        parts = self.gpus_per_node.split(",") if self.gpus_per_node else []
        named = [each.partition(":") for each in (self.gres or "").split(",")]
        parts += [rest for name, _, rest in named if name == "gpu"]
        counts = (part.rpartition(":")[2] for part in parts)
        return sum(int(count) if re.fullmatch(r"[0-9]{1,4}", count) else 1 for count in counts)  # a type alone is one

    @property
    def tasks(self) -> int:
        """Ranks on each node."""
        return self.ntasks_per_node or self.gpus or 1

    @property
    def command(self) -> str:
        """srunddp's name on the nodes."""
        return self.srunddp or "srunddp"

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job_name or PurePath(self.script or "").stem

    @property
    def warning(self) -> str:
        """What ``--signal`` gets; empty for no such option."""
        if self.signal == "auto":
            return "USR2@120" if self.requeue else ""
        return "" if self.signal == "none" else self.signal
