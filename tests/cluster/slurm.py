"""Writes Slurm's configuration files, and starts its daemons."""

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import accounting
from .network import SLURMD_PORT, SRUN_PORTS, Mount, command, tool, tool_environment
from .nodes import INSTANCE, LOGIN, NODES, Machine, Node
from .requirements import cgroup_version

FOLDERS = ("etc", "spool", "log", "run", "dev", "state", "shared")
PARTITION = "gpu"
URGENT = "urgent"
TORCH = "torch"
MEMORY = 6000  # MiB for a job on each node that does not say otherwise
GRACE = 20  # seconds between the SIGTERM of a preempted job and its end

_MUNGED_SECONDS = 60.0
_PMIX = "libpmix.so"
# Lines of cgroup.conf, by the version of the control groups. IgnoreSystemd: Slurm cannot ask
# systemd for control groups, because no systemd runs in the cluster.
_CGROUP_LINES = {
    1: ("CgroupPlugin=cgroup/v1", "CgroupAutomount=no", "ConstrainRAMSpace=yes"),
    2: ("CgroupPlugin=cgroup/v2", "IgnoreSystemd=yes", "ConstrainRAMSpace=yes"),
}


@dataclass(frozen=True)
class Settings:
    """What a test may choose about the cluster."""

    resv_ports: str | None = None
    """A range such as 12000-12999, from which Slurm reserves ports for every job step; None if
    Slurm reserves no ports.

    Slurm 22.05 gives a job step one port more than a node has tasks. With `--resv-ports=COUNT` it
    gives this number of ports, and with `--resv-ports` alone no port.
    """
    interactive_step: bool = False
    """Whether salloc opens its shell on the first node instead of on the login node."""
    oversubscribe: str = "FORCE:4"
    """How many jobs may share a core, as in slurm.conf. With FORCE:4 several large jobs can run at
    the same time; with NO they wait for each other.
    """
    open_management: bool = False
    """Whether the management network carries any traffic; otherwise a firewall lets only Slurm's
    traffic pass.
    """
    accounting: bool = False
    """Whether the cluster has a slurmdbd, so that sacct and sstat answer. It then starts more
    slowly.
    """
    gathering: bool = False
    """Whether Slurm reads the CPU time and memory of tasks every second. With `accounting` it
    always does.
    """
    tracking: str = "cgroup"
    """How Slurm tracks the processes of a job step: `cgroup`, Slurm's default, or `linuxproc`.

    With `cgroup`, Slurm also limits memory. It then sends signals only to the tasks, and to their
    descendants only SIGKILL. With `linuxproc`, it sends each signal to all processes.
    """
    cpus: int = 32
    gpus: int = 8
    gpu_types: tuple[str, ...] = ()
    """The types of the GPUs. Each type gets an equal part of a node's GPUs, in this order. If the
    tuple is empty, the GPUs have no type.
    """
    partitions: tuple[str, ...] = ()
    """The names of further partitions. Each has all nodes, and no time limit."""
    features: tuple[str, ...] = ()
    """The features of all nodes."""
    slurmd_timeout: int = 300
    """Seconds without an answer from a node's slurmd after which Slurm sets the node DOWN."""
    lines: tuple[str, ...] = ()
    """Further lines of slurm.conf."""


def config_file(folder: Path) -> Path:
    return folder / "etc" / "slurm.conf"


def pid(folder: Path, machine: Machine) -> int:
    """Return the process id of the machine's Slurm daemon, which is in the machine's namespaces.

    Raises:
        OSError: The daemon has not written its pid file yet.
    """
    return int(_pid_file(folder, machine).read_text())


def is_started(folder: Path) -> bool:
    """Return whether every Slurm daemon has written its pid file."""
    files = [_pid_file(folder, machine) for machine in (LOGIN, *NODES)]
    return all(file.is_file() and file.read_text().strip() for file in files)


def write_config(folder: Path, settings: Settings) -> None:
    """Create the files and folders that the daemons need, below `folder`."""
    for name in FOLDERS:
        (folder / name).mkdir()
    key = folder / "etc" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    etc = folder / "etc"
    (etc / "gres.conf").write_text(_make_gpus(folder, settings))
    # Without this line, slurmstepds would connect to each other on ports that the kernel chooses,
    # and the firewall would drop the packets.
    (etc / "mpi.conf").write_text("PMIxDirectConn=false\n")
    (etc / "cgroup.conf").write_text("\n".join(_CGROUP_LINES[cgroup_version()]) + "\n")
    write_main_config(folder, settings)
    if settings.accounting:
        accounting.write_config(folder, munge_socket(folder))


def write_main_config(folder: Path, settings: Settings) -> None:
    config_file(folder).write_text(_main_config(folder, settings))


def _gpus(settings: Settings) -> list[tuple[str, range]]:
    """Return the types of GPUs, each with the numbers of its devices. If the settings name no
    types, all GPUs have the type with the empty name.
    """
    each = settings.gpus // max(len(settings.gpu_types), 1)
    types = settings.gpu_types or ("",)
    if each:
        return [(name, range(place * each, (place + 1) * each)) for place, name in enumerate(types)]
    return []


def _make_gpus(folder: Path, settings: Settings) -> str:
    """Create dummy GPU devices, and return the text of the gres.conf that declares them."""
    for number in range(settings.gpus):
        # slurmd requires a character device but never opens it, so these have the numbers of
        # /dev/null (1, 3).
        os.mknod(folder / "dev" / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    lines = []
    for name, numbers in _gpus(settings):
        if name:
            kind = f" Type={name}"
        else:
            kind = ""
        devices = f"{folder}/dev/nvidia[{numbers[0]}-{numbers[-1]}]"
        lines.append(f"NodeName={_node_range()} Name=gpu{kind} File={devices}\n")
    return "".join(lines)


def start(folder: Path, settings: Settings, daemons: list[subprocess.Popen[bytes]]) -> None:
    """Start all daemons without waiting for the nodes.

    Args:
        folder: The cluster's working folder.
        settings: The cluster's settings.
        daemons: Gets each daemon as soon as it is started, so that the caller can end it after an
            error.
    """
    if settings.accounting:
        making = [accounting.make_database(folder)]
        daemons.append(_daemon(folder, LOGIN, *accounting.database(folder), first=making))
    daemons.append(_daemon(folder, LOGIN, "munged", "--foreground", *_munge_options(folder)))
    _wait_munge(folder, daemons[-1])
    config = str(config_file(folder))
    mounts = _pmix_mounts(folder)
    (folder / "checkout").mkdir()
    waiting = []
    if settings.accounting:
        daemons.append(
            _daemon(folder, LOGIN, "slurmdbd", "-D", first=[accounting.wait_database(folder)])
        )
        waiting.append(accounting.wait_slurmdbd())
    daemons.append(
        _daemon(folder, LOGIN, "slurmctld", "-D", "-f", config, mounts=mounts, first=waiting)
    )
    for node in NODES:
        (folder / "spool" / node.name).mkdir()
        daemons.append(start_slurmd(folder, node, mounts))


def start_slurmd(folder: Path, node: Node, mounts: Sequence[Mount]) -> subprocess.Popen[bytes]:
    """Start the slurmd of a node.

    Args:
        folder: The cluster's working folder.
        node: The node.
        mounts: What to mount on the node for PMIx; see `pmix_mounts`.
    """
    words = ("slurmd", "-D", "-N", node.name, "-f", str(config_file(folder)))
    return _daemon(folder, node, *words, mounts=[*mounts, *_around_tmp(folder)])


def pmix_mounts(folder: Path) -> list[Mount]:
    """Return the mounts by which the cluster's machines see PMIx's library, as :func:`start` has
    made them; empty if they need none.
    """
    original = _pmix_folder()
    there = original is not None and (folder / "pmix").exists()
    if there:
        return [("--bind", str(folder / "pmix"), str(original))]
    return []


def _around_tmp(folder: Path) -> list[Mount]:
    """Return the mounts that give a node its own /tmp and /dev/shm.

    Nodes must not share /tmp, because every slurmstepd creates /tmp/spmix_appdir_*, and PMIx would
    fail. They must not share /dev/shm, because processes on different nodes must not communicate by
    shared memory.
    """
    aside = folder / "checkout"
    keep = ("--bind", str(Path.cwd()), str(aside))
    return [keep, *over_tmp(folder), ("-t", "tmpfs", "tmpfs", "/dev/shm")]


def over_tmp(folder: Path, *options: str) -> list[Mount]:
    """Return the mounts that hide a node's /tmp by an empty one. If the working folder, a checkout,
    is in /tmp, it is mounted there again.
    """
    checkout = Path.cwd()
    tmp = ("-t", "tmpfs", *options, "tmpfs", "/tmp")
    back = ("-o", "X-mount.mkdir", "--bind", str(folder / "checkout"), str(checkout))
    return [tmp, back] if checkout.is_relative_to("/tmp") else [tmp]


def _pmix_mounts(folder: Path) -> list[Mount]:
    """Make a copy of the folder of PMIx's library if Slurm's plugin cannot load the library, and
    return the mounts that put the copy in place of the folder; empty if the plugin can load it.

    The plugin loads the library by an absolute path that ends with the name without a version. Only
    Debian's development package has a file with this name, so the copy gets a link with it.
    """
    original = _pmix_folder()
    if original is None or (original / _PMIX).exists():
        return []
    copy = folder / "pmix"
    shutil.copytree(original, copy, symlinks=True)
    (copy / _PMIX).symlink_to(f"{_PMIX}.2")
    return [("--bind", str(copy), str(original))]


def _pmix_folder() -> Path | None:
    """Return the folder of PMIx's library, without links, if it also has the library's components
    in the folder ``pmix``; else None.
    """
    for line in tool("ldconfig", "-p").splitlines():
        words = line.split()
        if words and words[0] == f"{_PMIX}.2":
            folder = Path(words[-1]).resolve().parent
            return folder if (folder / "pmix").is_dir() else None
    return None


def log_tails(folder: Path, lines: int = 8) -> str:
    """Return the last lines of every log that is not empty."""
    tails = []
    for log in sorted((folder / "log").iterdir()):
        if tail := log.read_text(errors="replace").splitlines()[-lines:]:
            tails.append("\n".join((f"--- {log.name}", *tail)))
    return "\n".join(tails)


def _pid_file(folder: Path, machine: Machine) -> Path:
    daemon = "slurmctld" if machine == LOGIN else f"slurmd.{machine.name}"
    return folder / "run" / f"{daemon}.pid"


def _node_range() -> str:
    return ",".join(node.name for node in NODES)


def munge_socket(folder: Path) -> Path:
    """Return the path of the socket of the cluster's munged."""
    return folder / "run" / "munge.socket"


def _munge_options(folder: Path) -> list[str]:
    """Return options that put all files of munged into the working folder, so that they do not
    disturb a munged of the machine.
    """
    files = {
        "--socket": munge_socket(folder),
        "--key-file": folder / "etc" / "munge.key",
        "--pid-file": folder / "run" / "munged.pid",
        "--seed-file": folder / "run" / "munged.seed",
        "--log-file": folder / "log" / "munged.log",
    }
    return [f"{option}={file}" for option, file in files.items()]


def _wait_munge(folder: Path, munged: subprocess.Popen[bytes]) -> None:
    """Wait until munged listens, because slurmctld would end at once if it could not authenticate
    itself.

    Raises:
        RuntimeError: munged does not start.
    """
    deadline = time.monotonic() + _MUNGED_SECONDS
    while not munge_socket(folder).exists():
        if munged.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"munged does not start\n{log_tails(folder)}")
        time.sleep(0.02)


def _daemon(
    folder: Path,
    machine: Machine,
    program: str,
    *options: str,
    mounts: Sequence[Mount] = (),
    first: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a program on a machine in a new session, so that Ctrl-C in a terminal does not reach
    it.

    Args:
        folder: The cluster's working folder.
        machine: The machine.
        program: The program; its output goes to log/PROGRAM.MACHINE.out.
        options: The program's options.
        mounts: What to mount in the namespace of the program.
        first: Shell commands to run there before the program.
    """
    with (folder / "log" / f"{program}.{machine.name}.out").open("wb") as output:
        return subprocess.Popen(
            command(machine, program, *options, mounts=mounts, first=first),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**tool_environment(), "SLURM_CONF": str(config_file(folder))},
            cwd=folder,
            start_new_session=True,
        )


def _main_config(folder: Path, settings: Settings) -> str:
    lines = [
        *_daemon_lines(folder, settings),
        *_scheduler_lines(),
        *_node_lines(settings),
        *settings.lines,
    ]
    if settings.resv_ports:
        lines.append(f"MpiParams=ports={settings.resv_ports}")
    if settings.accounting:
        lines += accounting.config_lines(munge_socket(folder))
    if settings.accounting or settings.gathering:
        lines += accounting.gathering_lines(settings.tracking)
    if settings.interactive_step:
        lines.append("LaunchParameters=use_interactive_step")
    return "\n".join(lines) + "\n"


def _daemon_lines(folder: Path, settings: Settings) -> list[str]:
    return [
        "ClusterName=cluster",
        # Job ids have as many digits as on a cluster that has run for years.
        f"FirstJobId={9876543 + 100000 * ((INSTANCE - 1) % 500)}",
        f"SlurmctldHost={LOGIN.name}({LOGIN.management})",
        "SlurmUser=root",
        "AuthType=auth/munge",
        # A requeued job starts only when its old credentials have expired: by default after two
        # minutes.
        f"AuthInfo=socket={munge_socket(folder)},cred_expire=15",
        f"SlurmctldPidFile={_pid_file(folder, LOGIN)}",
        f"SlurmdPidFile={folder}/run/slurmd.%n.pid",
        f"SlurmdPort={SLURMD_PORT}",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"StateSaveLocation={folder}/state",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd.%n.log",
        "MpiDefault=none",
        # Without this line, every log begins with a complaint that the machine has no mail program.
        "MailProg=/bin/true",
        "ReturnToService=2",
        f"ProctrackType=proctrack/{settings.tracking}",
        f"TaskPlugin={'task/cgroup' if settings.tracking == 'cgroup' else 'task/none'}",
        "KillWait=5",
        # On a busy machine a daemon may take longer than the default of 10 s to answer.
        "MessageTimeout=30",
        "UnkillableStepTimeout=150",  # has to be at least five times MessageTimeout
        "BatchStartTimeout=60",
        f"SlurmdTimeout={settings.slurmd_timeout}",
        # srun listens for its job steps, even if a batch script starts it on a node, where the
        # firewall lets only these ports pass.
        f"SrunPortRange={SRUN_PORTS}",
    ]


def _scheduler_lines() -> list[str]:
    return [
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"DefMemPerNode={MEMORY}",
        # Only the backfill scheduler starts heterogeneous jobs, and by default it runs only every
        # 30 s.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1",
    ]


def _node_lines(settings: Settings) -> list[str]:
    named = ",".join(
        ":".join(filter(None, ("gpu", name, str(len(numbers)))))
        for name, numbers in _gpus(settings)
    )
    gres = (f" Gres={named}" if named else "") + (
        f" Feature={','.join(settings.features)}" if settings.features else ""
    )
    cpus = f"CPUs={settings.cpus} Sockets=1 CoresPerSocket={settings.cpus} ThreadsPerCore=1"
    partition = f"DefaultTime=60 MaxTime=1-0 State=UP OverSubscribe={settings.oversubscribe}"
    return [
        "GresTypes=gpu",
        # Use the CPUs and the memory that this file gives, although the machine has less.
        "SlurmdParameters=config_overrides",
        f"NodeName=DEFAULT {cpus} RealMemory={settings.cpus * MEMORY}{gres} State=UNKNOWN",
        *(
            f"NodeName={node.name} NodeAddr={node.management} NodeHostname={node.name}"
            for node in NODES
        ),
        (
            f"PartitionName={PARTITION} Nodes={_node_range()} PriorityTier=1 GraceTime={GRACE}"
            f" Default=YES {partition}"
        ),
        # Jobs of this partition take nodes from jobs of the first partition, which are then
        # requeued. The partition is hidden, so that a list of nodes does not contain them twice.
        (
            f"PartitionName={URGENT} Nodes={_node_range()} PriorityTier=2 Hidden=YES MaxTime=60"
            " State=UP"
        ),
        # The third partition is a second name for the first, and is hidden as well.
        f"PartitionName={TORCH} Nodes={_node_range()} PriorityTier=1 Hidden=YES {partition}",
        *(
            f"PartitionName={name} Nodes={_node_range()} MaxTime=INFINITE State=UP"
            for name in settings.partitions
        ),
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
    ]
