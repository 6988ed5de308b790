"""Defines a job: :class:`SlurmJob`, whose fields are the options of srunddp sbatch and the keys of
its YAML file.
"""

import re
from dataclasses import dataclass
from pathlib import PurePath

from srunddp.sbatch.slurm_options import split
from srunddp.util.slurm_tres import tres_count

_LOGS = "logs"  # the folder if --log-dir is not given; srunddp run --monitor has the same default


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job: the script to start, its resources, and its environment.

    Attributes:
        script: The training script; on the command line, the first argument.
        arguments: Arguments of the script; on the command line, all words after it.
        module: SCRIPT is a module's name, as in python -m.
        nodes: Number of nodes, spare nodes included; 1 unless ntasks is given.
        ntasks_per_node: Ranks on each node; one for each GPU unless given, or 1 without GPUs.
        modules: Environment modules to load, in this order.
        module_purge: Unload all modules first.
        venv: Folder of a virtual environment; the active one unless another environment is named.
        conda: Name or folder of a conda environment.
        env: A variable to export, for example a setting of NCCL; may be given again, like all
            options that are lists in a file.
        setup: A line of bash that is run before the step, such as "source setup.sh" or "ulimit -c
            0".
        backend: The option of srunddp run; None if it is not given.
        ifaces: The option of srunddp run; None if it is not given.
        log_dir: The option of srunddp run. The folder has the job's log, too. None means that ranks
            have no files of their own, and the job's log is in the folder logs.
        preflight: Run srunddp check first; if it finds a failure, the training is not started.
        offline: The option of srunddp run.
        srunddp: Path of srunddp on the nodes; unless given, srunddp of the job's environment, or
            this srunddp if the environment has none.
        restarts: The option of srunddp run; None if it is not given.
        spare_nodes: The option of srunddp run; None if it is not given. nodes counts the spare
            nodes too.
        min_nodes: The option of srunddp run; None if it is not given.
        result: The option of srunddp run; None if it is not given.
        run_options: Options of srunddp run, such as --prefix; each can also be given directly.
        job_name: The script's name without its ending unless given.
        cpus_per_task: CPUs of each rank, including those for its loader workers.
        requeue: Start the job again when its time limit or a preemption ends it; the script has to
            catch the signal, save, and resume, as srunddp.Trainer does.
        signal: A signal for all ranks, such as USR1@300 for 300 seconds before the time limit; auto
            is USR2@120 with --requeue, else none.
        mpi: For srun's --mpi, such as pmi2; empty for the site's default.
        srun_arg: An option of srun for the ranks, such as --cpu-bind=cores.
        sbatch_arg: An option of sbatch that srunddp does not know, such as one of a plug-in.
        container: An Apptainer image that has srunddp. Slurm's own --container is
            --sbatch-arg=--container=BUNDLE.
        container_image: For pyxis; an image that has srunddp.
        container_mounts: For pyxis, SOURCE:TARGET; the working folder is always mounted.
        monitor: The option of srunddp run, written as 5s; None if it is not given. With it,
            srunddp report follows the training.
        monitor_dir: The option of srunddp run; None if it is not given.
        stage: Copy the environment and the working folder to nodes that do not see them, by srunddp
            stage push.
        data: Further folders that --stage copies.
        stage_exclude: Names in the working folder that are not copied, with wildcards; the log
            folder is never copied.
    """

    script: str | None = None
    arguments: tuple[str, ...] = ()
    module: bool = False
    nodes: int | None = None
    ntasks_per_node: int | None = None
    modules: tuple[str, ...] = ()
    module_purge: bool = False
    venv: str | None = None
    conda: str | None = None
    env: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    backend: str | None = None
    ifaces: str | None = None
    log_dir: str | None = None
    preflight: bool = False
    offline: bool = False
    srunddp: str | None = None
    restarts: int | None = None
    spare_nodes: int | None = None
    min_nodes: int | None = None
    result: str | None = None
    run_options: tuple[str, ...] = ()
    job_name: str | None = None
    cpus_per_task: int | None = None
    requeue: bool | None = None
    signal: str = "auto"
    mpi: str = ""
    srun_arg: tuple[str, ...] = ()
    sbatch_arg: tuple[str, ...] = ()
    container: str | None = None
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    monitor: str | None = None
    monitor_dir: str | None = None
    stage: bool = False
    data: tuple[str, ...] = ()
    stage_exclude: tuple[str, ...] = ()

    @property
    def in_container(self) -> bool:
        """Whether srunddp runs in a container, of Apptainer or of pyxis."""
        return bool(self.container or self.container_image)

    @property
    def slurm(self) -> dict[str, str | bool]:
        """The options in ``sbatch_arg``: their values by their names; True for an option without a
        value.
        """
        return dict(map(split, self.sbatch_arg))

    @property
    def run(self) -> dict[str, str | bool]:
        """The options in ``run_options``: their values by their names; True for an option without a
        value.
        """
        return dict(map(split, self.run_options))

    @property
    def node_count(self) -> int | None:
        """The value for ``--nodes``; None if Slurm decides."""
        if self.nodes:
            return self.nodes
        return None if "ntasks" in self.slurm else 1

    @property
    def gpus(self) -> int:
        """How many GPUs the options ask for on each node; 0 if they do not tell. The options may
        name types of GPUs, as in ``a100:2,v100:1`` or ``gpu:a100:4``.
        """
        named = [each.partition(":") for each in str(self.slurm.get("gres", "")).split(",")]
        gres = ",".join(rest or "1" for name, _, rest in named if name == "gpu")
        # Add the two numbers, of which one is 0: validate.check refuses --gres together with
        # --gpus-per-node.
        on_each_node = _count(self.slurm.get("gpus-per-node")) + _count(gres)
        if on_each_node:
            return on_each_node
        on_all = _count(self.slurm.get("gpus")) // (self.nodes or 1)
        if on_all:
            return on_all
        return self._gpus_per_task * (self.ntasks_per_node or 1)

    @property
    def _gpus_per_task(self) -> int:
        """How many GPUs each task has by ``--gpus-per-task`` or ``--tres-per-task``; 0 without
        these options.
        """
        in_list = tres_count(str(self.slurm.get("tres-per-task", "")), "gres/gpu")
        return _count(self.slurm.get("gpus-per-task")) or in_list

    @property
    def has_gpus(self) -> bool:
        """Whether the job asks for GPUs. This can be true when ``gpus`` is 0, because some options
        do not tell the number on a node.
        """
        return bool(self.gpus or {"gpus", "gpus-per-socket"} & self.slurm.keys())

    @property
    def tasks(self) -> int:
        """How many ranks each node has; 0 if Slurm decides."""
        if self.ntasks_per_node:
            return self.ntasks_per_node
        if {"ntasks", "ntasks-per-gpu", "ntasks-per-tres"} & self.slurm.keys():
            return 0
        if self._gpus_per_task:
            return 1  # with these options, the number of tasks gives the number of GPUs
        return self.gpus or 1

    @property
    def world_size(self) -> int:
        """How many ranks there are; 0 if Slurm decides."""
        return max(0, (self.node_count or 0) - (self.spare_nodes or 0)) * self.tasks

    @property
    def outlives_nodes(self) -> bool:
        """Whether the run may go on without a lost node, so that Slurm must not end the job."""
        return bool(self.spare_nodes or self.min_nodes)

    @property
    def restarts_ranks(self) -> bool:
        """Whether ranks may be restarted within the job."""
        return bool(self.restarts)

    @property
    def folder(self) -> str:
        """The folder in which the job starts; empty for the folder in which it is submitted."""
        return str(self.slurm.get("chdir", ""))

    @property
    def log_folder(self) -> str:
        """The folder of the job's log and of the files that srunddp check writes."""
        return self.log_dir or _LOGS

    @property
    def monitor_folder(self) -> str:
        """The folder in which the sampler writes its files, if the job has ``monitor``."""
        return self.monitor_dir or self.log_folder

    @property
    def log_folders(self) -> list[str]:
        """The folders that must exist when the job starts, relative to the folder in which it
        starts.
        """
        has_readings = bool(self.monitor) and not self.monitor_dir
        in_log_folder = "output" not in self.slurm or self.log_dir or has_readings or self.preflight
        of_files = [
            str(self.slurm.get(name, "")).rpartition("/")[0] for name in ("output", "error")
        ]
        # Leave out folders with %j and the like: Slurm replaces these only when the job starts.
        plain = [folder for folder in of_files if "%" not in folder]
        return [*filter(None, dict.fromkeys([self.log_folder if in_log_folder else "", *plain]))]

    @property
    def command(self) -> str:
        """The name of srunddp on the nodes, or its path there."""
        return self.srunddp or "srunddp"

    @property
    def name(self) -> str:
        """The job's name: ``job_name``, or else the script's or the module's name."""
        script = self.script or ""
        return self.job_name or (
            script.rpartition(".")[2] if self.module else PurePath(script).stem
        )

    @property
    def warning(self) -> str:
        """The value for ``--signal`` of sbatch; empty if the option is not given."""
        if self.signal == "auto":
            if self.requeue:
                return "USR2@120"
            return ""
        if self.signal == "none":
            return ""
        return self.signal


def _count(devices: str | bool | None) -> int:
    """Return the sum of the numbers in a list of devices such as ``a100:2,v100:1``; a type without
    a number counts 1. The result is 0 for an empty text and for None.
    """
    counts = (part.rpartition(":")[2] for part in str(devices or "").split(",") if part)
    # A part without a number is a type, such as a100. Slurm gives one device of this type.
    return sum(int(count) if re.fullmatch(r"[0-9]{1,4}", count) else 1 for count in counts)
