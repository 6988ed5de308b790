"""What is wrong with a job, before any script is written of it; nothing is asked of the machine."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterator

from srunddp.errors import ConfigError
from srunddp.sbatch import nccl
from srunddp.sbatch.formats import FORMATS, fits
from srunddp.sbatch.spec import LaunchSpec, MpirunJob, SlurmJob
from srunddp.util.hostlist import expand

_OURS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
_OURS |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
# The script's own, and those that bash does not let be changed.
_SCRIPTS = {"code", "ended", "srunddp", "BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}
_PATHS = ("script", "venv", "conda", "ifaces", "log_dir", "container", "data", "hostfile")
_LONGEST = 4000  # of Slurm's options; its parser takes 8 KiB
_POSITIVE = ("nodes", "ntasks_per_node", "cpus_per_task", "monitor")
# What a command would take for one of its options.
_NOT_OPTIONS = ("conda", "container", "container_image", "srunddp", "mpirun", "hostfile", "venv", "log_dir", "ifaces")


def check(start: LaunchSpec, *, interactive: bool = False) -> None:
    """See whether a script can be written.

    Args:
        interactive: for salloc.

    Raises:
        ConfigError: it cannot, or would not do what is wished.
    """
    for name, text in _texts(start):
        _check_text(name, text)
        _check_path(name, text)
    _check_numbers(start)
    _check_lists(start)
    _check_environment(start)
    _check_formats(start)
    _check_ranks(start)
    if isinstance(start, SlurmJob):
        _check_name(start)
        _check_nodelist(start)
        _check_signal(start)
        _check_together(start, interactive)
        _check_staged(start)
    elif isinstance(start, MpirunJob):
        _check_hosts(start)


def notes(start: LaunchSpec) -> Iterator[str]:
    """What may be meant otherwise."""
    for name, _, value in (each.partition("=") for each in start.env):
        if doubt := nccl.doubt(name):
            yield f"--env: {doubt}"
        if name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            yield f"--env {name}={value} is for every node, and wins over ifaces.conf"
    if start.gpus and start.tasks > start.gpus:
        yield f"{start.tasks} ranks share {start.gpus} {_s('GPU', start.gpus)} on each node"
    elif start.tasks < start.gpus:
        yield f"{start.tasks} {_s('rank', start.tasks)} for {start.gpus} GPUs on each node: each rank takes one"
    if isinstance(start, SlurmJob) and start.requeue and not any("resume" in each for each in start.arguments):
        yield "--requeue, but no argument such as --resume=auto: a script that does not resume by itself begins anew"


def _texts(start: LaunchSpec) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(start):
        value = getattr(start, field.name)
        if isinstance(value, str):
            yield field.name, value
        elif isinstance(value, tuple):
            yield from ((field.name, each) for each in value)


def _check_text(name: str, text: str) -> None:
    if not text.isprintable():
        hint = "leave line ends and the like away"
        raise ConfigError(f"{option(name)} {text!r}", expected="letters that can be printed", hint=hint)
    if not text and name not in ("mpi", "arguments"):
        raise ConfigError(f"{option(name)} is empty", expected="a value", hint="leave it away, or give it one")
    if text.startswith("-") and name in _NOT_OPTIONS:
        found = f"{option(name)} {text!r} begins with a dash"
        raise ConfigError(found, expected="a name that is no option", hint=f"write ./{text} if it is a file")
    if len(text) > _LONGEST and name != "arguments":
        raise ConfigError(f"{option(name)} has {len(text)} letters", expected=f"at most {_LONGEST}", hint="shorten it")


def _check_path(name: str, text: str) -> None:
    if name in _PATHS and text.startswith("~"):
        found = f"{option(name)} {text!r}"
        raise ConfigError(found, expected="a path without ~, which nobody expands there", hint="write $HOME instead")


def _check_numbers(start: LaunchSpec) -> None:
    if not start.script:
        raise ConfigError("no script", expected="a training script", hint="name it after the options")
    for name in _POSITIVE:
        number = getattr(start, name, None)
        if number is not None and not 1 <= number <= 10**6:
            raise ConfigError(f"{option(name)} {number}", expected="1 or more", hint="correct it")
    if "\\" in start.log_dir:
        hint = "choose another folder"
        raise ConfigError(
            f"--log-dir {start.log_dir!r}", expected="no backslash, which Slurm reads otherwise", hint=hint
        )


def _check_lists(start: LaunchSpec) -> None:
    for each in start.modules:
        if not re.fullmatch(r"[\w.+@/][\w.+@/:=~-]*", each):
            hint = "repeat --modules for each"
            raise ConfigError(f"--modules {each!r}", expected="one module, such as CUDA/12.4", hint=hint)
    for each in start.run_options:
        if not each.startswith("-"):
            hint = f"write --run-options=--{each}"
            raise ConfigError(f"--run-options {each!r}", expected="an option of srunddp run", hint=hint)
    for each in start.env:
        name, equals, _ = each.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(f"--env {each!r}", expected="NAME=VALUE", hint="write one variable for each --env")
        if name in _SCRIPTS:
            raise ConfigError(f"--env {name}", expected="no variable of bash's or the script's own", hint="rename it")
        if name in _OURS or name.startswith("SLURM_"):
            by = "Slurm" if name.startswith("SLURM_") else "srunddp, for each rank"
            raise ConfigError(f"--env {name}", expected=f"no variable that is set by {by}", hint="leave it away")


def _check_environment(start: LaunchSpec) -> None:
    kinds = ("venv", "conda", "container", "container_image")
    named = [option(kind) for kind in kinds if getattr(start, kind, None)]
    if len(named) > 1:
        raise ConfigError(" and ".join(named), expected="one environment", hint=f"leave all but {named[0]} away")


def _check_ranks(start: LaunchSpec) -> None:
    if start.backend != "nccl":
        return
    if not start.gpus:
        hint = "add --gpus-per-node=N, or take --backend=gloo"
        raise ConfigError("--backend nccl without GPUs", expected="a GPU for each rank", hint=hint)
    if start.tasks > start.gpus:
        found = f"{start.tasks} ranks for {start.gpus} {_s('GPU', start.gpus)} on each node"
        hint = f"leave --ntasks-per-node away, or say {start.gpus}"
        raise ConfigError(found, expected="at most one rank for each GPU, as NCCL has it", hint=hint)


def _check_formats(start: LaunchSpec) -> None:
    for key, (_, words, example) in FORMATS.items():
        text = getattr(start, key, "")
        if text and not fits(key, text):
            raise ConfigError(f"{option(key)} {text!r}", expected=words, hint=f"write such as {example}")


def _check_name(job: SlurmJob) -> None:
    if "/" in job.name or not job.name:
        hint = "choose another --job-name"
        raise ConfigError(f"--job-name {job.name!r}", expected="no slash: it is in the output's name", hint=hint)
    if job.gres and job.gpus_per_node:
        raise ConfigError("--gres and --gpus-per-node", expected="one of them", hint="leave --gres away")


def _check_nodelist(job: SlurmJob) -> None:
    if not job.nodelist:
        return
    named = len(set(expand(job.nodelist, where="--nodelist")))
    if named > job.nodes:
        found = f"--nodelist has {named} nodes, --nodes {job.nodes}"
        raise ConfigError(found, expected="at most as many as the job has", hint=f"say --nodes={named}, or name fewer")


def _check_signal(job: SlurmJob) -> None:
    receiver, _, rest = job.warning.rpartition(":")
    name = rest.partition("@")[0].removeprefix("SIG")
    if name and not name.isdigit() and name not in {each.name.removeprefix("SIG") for each in signal.Signals}:
        raise ConfigError(f"--signal {job.signal!r}", expected="a signal's name or number", hint="write USR2@120")
    if "B" in receiver:
        hint = f"write {rest}"
        raise ConfigError(f"--signal {job.signal!r}", expected="a signal for the ranks, not the batch shell", hint=hint)


def _check_together(job: SlurmJob, interactive: bool) -> None:
    of_batch = [name for name in ("requeue", "array") if getattr(job, name)]
    if interactive and of_batch:
        hint = f"leave {option(of_batch[0])} away, or submit it by sbatch"
        raise ConfigError(f"--salloc with {option(of_batch[0])}", expected="what salloc knows", hint=hint)
    if job.container_mounts and not job.container_image:
        raise ConfigError("--container-mounts without --container-image", expected="both", hint="name the image")
    for each in job.container_mounts:
        if "," in each:
            hint = "repeat --container-mounts for each"
            raise ConfigError(f"--container-mounts {each!r}", expected="one SOURCE:TARGET, without a comma", hint=hint)


def _check_staged(job: SlurmJob) -> None:
    if job.stage and not job.venv:
        hint = "name one with --venv; srunddp stage build makes one"
        raise ConfigError("--stage without a virtual environment", expected="one to bring along", hint=hint)
    for name in ("data", "stage_exclude"):
        if getattr(job, name) and not job.stage:
            raise ConfigError(f"{option(name)} without --stage", expected="both", hint="add --stage")
    if job.stage and job.rank_logs:
        hint = "leave --rank-logs away, and add --run-options=--prefix: node and rank before each line of the job's log"
        raise ConfigError("--rank-logs with --stage", expected="a log folder that all nodes see", hint=hint)
    if job.stage and job.monitor:
        hint = "leave --monitor away, or add --run-options=--monitor --run-options=--monitor-dir=DIR with such a folder"
        raise ConfigError("--monitor with --stage", expected="a log folder that all nodes see", hint=hint)


def _check_hosts(job: MpirunJob) -> None:
    if job.hosts and job.nodes not in (1, len(job.slots)):
        found = f"--nodes {job.nodes} for the {len(job.slots)} of --hosts"
        raise ConfigError(found, expected="as many", hint="leave --nodes away")
    if job.hosts and job.hostfile:
        raise ConfigError("--hosts and --hostfile", expected="one of them", hint="leave --hostfile away")
    for host in job.hosts.split(",") if job.hosts else ():
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(?::[1-9]\d{0,5})?", host, re.ASCII):
            raise ConfigError(f"--hosts {host!r}", expected="HOST or HOST:RANKS", hint="write such as --hosts=a:2,b:2")
    many = [f"{host} has {count}" for host, count in job.slots.items() if count > job.gpus]
    if job.backend == "nccl" and many:
        expected = f"at most {job.gpus} ranks on a host, one for each GPU"
        raise ConfigError(f"--hosts: {many[0]} ranks", expected=expected, hint="correct --hosts or --gpus-per-node")
    if job.nodes > 1 and not job.hosts and not job.hostfile:
        raise ConfigError(
            f"--nodes {job.nodes} without hosts", expected="their names", hint="add --hosts or --hostfile"
        )


def option(name: str) -> str:
    """A key as the command line has it."""
    return name if name in ("script", "arguments") else "--" + name.replace("_", "-")


def _s(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"
