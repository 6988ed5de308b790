"""What Slurm is asked for: as ``#SBATCH`` lines, or as salloc's options."""

from __future__ import annotations

import re

from srunddp.sbatch.spec import SlurmJob

# Options that sbatch and salloc have in common, in the order in which they are written.
_NAMES = (
    "job_name", "partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "nodes",
    "ntasks_per_node", "gpus_per_node", "gres", "cpus_per_task", "mem", "time", "array", "dependency", "signal",
    "exclusive",
)  # fmt: skip
_WHY = {
    "ntasks-per-node": "One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink.",
    "signal": "The ranks are warned so many seconds before the end, and write a checkpoint.",
}


def directives(job: SlurmJob) -> list[str]:
    """The lines that sbatch reads, each with its reason where it has one."""
    lines: list[str] = []
    for name, value in _options(job):
        explained = name in _WHY and (job.gpus or name != "ntasks-per-node")
        lines += [f"# {_WHY[name]}"] if explained else []
        lines.append(directive(name, value))
    lines += ["# Slurm does not make this folder; where it is missing the job ends at once, without a word."]
    # In this option Slurm replaces %j and the like.
    lines += [directive("output", job.log_dir.replace("%", "%%") + ("/%x-%A_%a.out" if job.array else "/%x-%j.out"))]
    if job.requeue:
        lines += ["# Slurm may start the job again, under its number.", directive("requeue", True)]
    return [*lines, "# Each start writes behind the one before.", directive("open-mode", "append")]


def directive(option: str, value: object) -> str:
    """A line that sbatch reads: its parser knows quotes, ``#``, and a backslash before any letter."""
    if value is True:
        return f"#SBATCH --{option}"
    text = str(value)
    if not re.fullmatch(r"[\w%+,./:=@*\[\]-]*", text, re.ASCII):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{option}={text}"


def salloc_options(job: SlurmJob) -> list[str]:
    """The same options as words."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in _options(job)]


def _options(job: SlurmJob) -> list[tuple[str, object]]:
    """By name without dashes; True for an option without a value."""
    decided: dict[str, object] = {"job_name": job.name, "ntasks_per_node": job.tasks, "signal": job.warning}
    found = ((name, decided.get(name, getattr(job, name))) for name in _NAMES)
    return [(name.replace("_", "-"), value) for name, value in found if value not in (None, "", False)]
