"""Slurm's configuration files and daemons."""

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
# By the version of the control groups. IgnoreSystemd: nothing that answers for a machine's groups
# runs beside the cluster.
_CGROUP_LINES = {
    1: ("CgroupPlugin=cgroup/v1", "CgroupAutomount=no", "ConstrainRAMSpace=yes"),
    2: ("CgroupPlugin=cgroup/v2", "IgnoreSystemd=yes", "ConstrainRAMSpace=yes"),
}


@dataclass(frozen=True)
class Settings:
    """What a test may choose about the cluster."""

    resv_ports: str | None = None
    """A range such as 12000-12999, from which Slurm reserves ports for every step.

    22.05 gives each step one port more than a node has tasks, `--resv-ports=COUNT` as many as it
    says, and none to a step with a bare `--resv-ports`.
    """
    interactive_step: bool = False
    """Whether salloc opens its shell on the first node instead of on the login node."""
    oversubscribe: str = "FORCE:4"
    """How many jobs may share a core; FORCE:4 lets several large jobs run at once, NO makes them
    queue.
    """
    open_management: bool = False
    """Whether the management network carries everything instead of Slurm only."""
    accounting: bool = False
    """Whether there is a slurmdbd, so that sacct and sstat answer; the start takes longer."""
    gathering: bool = False
    """Whether Slurm looks at the CPU time and memory of tasks every second; with accounting it
    always does.
    """
    tracking: str = "cgroup"
    """By what Slurm tracks a step's processes: `cgroup`, its default, limits memory as well.

    It signals the tasks alone, and SIGKILLs their descendants; `linuxproc` sends each signal to all
    processes.
    """
    cpus: int = 32
    gpus: int = 8
    gpu_types: tuple[str, ...] = ()
    """Among which the GPUs of a node are shared out, in this order."""
    partitions: tuple[str, ...] = ()
    """More names for all nodes, without a limit of time."""
    features: tuple[str, ...] = ()
    """Of all nodes."""
    slurmd_timeout: int = 300
    """Seconds without an answer of a node's slurmd, after which Slurm sets the node DOWN."""
    lines: tuple[str, ...] = ()
    """More lines of slurm.conf."""


def config_file(folder: Path) -> Path:
    return folder / "etc" / "slurm.conf"


def pid(folder: Path, machine: Machine) -> int:
    """The process id of the machine's Slurm daemon, which is in the machine's namespaces."""
    return int(_pid_file(folder, machine).read_text())


def is_started(folder: Path) -> bool:
    """Whether every daemon has got as far as its pid file."""
    files = [_pid_file(folder, machine) for machine in (LOGIN, *NODES)]
    return all(file.is_file() and file.read_text().strip() for file in files)


def write_config(folder: Path, settings: Settings) -> None:
    """Creates everything that the daemons need below `folder`."""
    for name in FOLDERS:
        (folder / name).mkdir()
    key = folder / "etc" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    etc = folder / "etc"
    (etc / "gres.conf").write_text(_make_gpus(folder, settings))
    # Otherwise slurmstepds connect to each other on ports of the kernel's choice, which the
    # firewall drops.
    (etc / "mpi.conf").write_text("PMIxDirectConn=false\n")
    (etc / "cgroup.conf").write_text("\n".join(_CGROUP_LINES[cgroup_version()]) + "\n")
    write_main_config(folder, settings)
    if settings.accounting:
        accounting.write_config(folder, munge_socket(folder))


def write_main_config(folder: Path, settings: Settings) -> None:
    config_file(folder).write_text(_main_config(folder, settings))


def _gpus(settings: Settings) -> list[tuple[str, range]]:
    """Types, and the numbers of their devices; a type without a name for all where none is
    named.
    """
    each = settings.gpus // max(len(settings.gpu_types), 1)
    types = settings.gpu_types or ("",)
    if each:
        return [(name, range(place * each, (place + 1) * each)) for place, name in enumerate(types)]
    return []


def _make_gpus(folder: Path, settings: Settings) -> str:
    """Creates dummy GPU devices and returns the gres.conf that declares them."""
    for number in range(settings.gpus):
        # slurmd demands a character device and never opens it: /dev/null's numbers (1, 3) will do.
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
    """Starts all daemons without waiting for the nodes, and adds each to `daemons`."""
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
    """Starts a node's daemon; `mounts` has PMIx's library."""
    words = ("slurmd", "-D", "-N", node.name, "-f", str(config_file(folder)))
    return _daemon(folder, node, *words, mounts=[*mounts, *_around_tmp(folder)])


def pmix_mounts(folder: Path) -> list[Mount]:
    """What :func:`start` has mounted for it."""
    original = _pmix_folder()
    there = original is not None and (folder / "pmix").exists()
    if there:
        return [("--bind", str(folder / "pmix"), str(original))]
    return []


def _around_tmp(folder: Path) -> list[Mount]:
    """The node's own /tmp and /dev/shm.

    Every slurmstepd creates /tmp/spmix_appdir_*, so PMIx fails as soon as two nodes share /tmp; and
    shared memory must not connect what are meant to be two hosts.
    """
    aside = folder / "checkout"
    keep = ("--bind", str(Path.cwd()), str(aside))
    return [keep, *over_tmp(folder), ("-t", "tmpfs", "tmpfs", "/dev/shm")]


def over_tmp(folder: Path, *options: str) -> list[Mount]:
    """Hide a node's /tmp below an empty one; a checkout that lies in /tmp is put back into it."""
    checkout = Path.cwd()
    tmp = ("-t", "tmpfs", *options, "tmpfs", "/tmp")
    back = ("-o", "X-mount.mkdir", "--bind", str(folder / "checkout"), str(checkout))
    return [tmp, back] if checkout.is_relative_to("/tmp") else [tmp]


def _pmix_mounts(folder: Path) -> list[Mount]:
    """What to mount on every machine so that Slurm's plugin can load the library; nothing if it
    already can.

    The plugin loads it by an absolute path that ends in its plain name, which only Debian's
    development package has: so the machines see a copy of the library's folder that has the name as
    well.
    """
    original = _pmix_folder()
    if original is None or (original / _PMIX).exists():
        return []
    copy = folder / "pmix"
    shutil.copytree(original, copy, symlinks=True)
    (copy / _PMIX).symlink_to(f"{_PMIX}.2")
    return [("--bind", str(copy), str(original))]


def _pmix_folder() -> Path | None:
    """Where the loader's library really is: a folder of its own, beside its components."""
    for line in tool("ldconfig", "-p").splitlines():
        words = line.split()
        if words and words[0] == f"{_PMIX}.2":
            folder = Path(words[-1]).resolve().parent
            return folder if (folder / "pmix").is_dir() else None
    return None


def log_tails(folder: Path, lines: int = 8) -> str:
    """The last lines of every log that has any."""
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
    """Of the munged that this cluster's daemons trust."""
    return folder / "run" / "munge.socket"


def _munge_options(folder: Path) -> list[str]:
    """Everything in the working folder, so that a munged of the machine's own is not disturbed."""
    files = {
        "--socket": munge_socket(folder),
        "--key-file": folder / "etc" / "munge.key",
        "--pid-file": folder / "run" / "munged.pid",
        "--seed-file": folder / "run" / "munged.seed",
        "--log-file": folder / "log" / "munged.log",
    }
    return [f"{option}={file}" for option, file in files.items()]


def _wait_munge(folder: Path, munged: subprocess.Popen[bytes]) -> None:
    """slurmctld ends at once when it cannot authenticate itself."""
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
    """Starts `program` on `machine`, in a session of its own, out of reach of the terminal's
    Ctrl-C.
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
        # As many digits as where a cluster has run for years.
        f"FirstJobId={9876543 + 100000 * ((INSTANCE - 1) % 500)}",
        f"SlurmctldHost={LOGIN.name}({LOGIN.management})",
        "SlurmUser=root",
        "AuthType=auth/munge",
        # A requeued job waits for its old credentials to expire before it starts: two minutes by
        # default.
        f"AuthInfo=socket={munge_socket(folder)},cred_expire=15",
        f"SlurmctldPidFile={_pid_file(folder, LOGIN)}",
        f"SlurmdPidFile={folder}/run/slurmd.%n.pid",
        f"SlurmdPort={SLURMD_PORT}",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"StateSaveLocation={folder}/state",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd.%n.log",
        "MpiDefault=none",
        # Otherwise every log begins with the complaint that the machine has no mail program.
        "MailProg=/bin/true",
        "ReturnToService=2",
        f"ProctrackType=proctrack/{settings.tracking}",
        f"TaskPlugin={'task/cgroup' if settings.tracking == 'cgroup' else 'task/none'}",
        "KillWait=5",
        # A daemon that a busy machine lets wait has not failed: not after 10 s, as by default.
        "MessageTimeout=30",
        "UnkillableStepTimeout=150",  # at least five times as long
        "BatchStartTimeout=60",
        f"SlurmdTimeout={settings.slurmd_timeout}",
        # srun listens for its steps, also when a batch script starts it on a node behind the
        # firewall.
        f"SrunPortRange={SRUN_PORTS}",
    ]


def _scheduler_lines() -> list[str]:
    return [
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"DefMemPerNode={MEMORY}",
        # Heterogeneous jobs are started by the backfill scheduler alone, which looks every 30 s by
        # default.
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
        # Believe this file about CPUs and memory instead of the machine, which has fewer.
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
        # Its jobs take nodes from those of the other, which are then requeued; not counted when
        # nodes are listed.
        (
            f"PartitionName={URGENT} Nodes={_node_range()} PriorityTier=2 Hidden=YES MaxTime=60"
            " State=UP"
        ),
        # Another name for the first, hidden as well.
        f"PartitionName={TORCH} Nodes={_node_range()} PriorityTier=1 Hidden=YES {partition}",
        *(
            f"PartitionName={name} Nodes={_node_range()} MaxTime=INFINITE State=UP"
            for name in settings.partitions
        ),
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
    ]
