"""A start by mpirun as a script, in Open MPI's words or MPICH's."""

from __future__ import annotations

import shlex
from shlex import quote as word

from srunddp.sbatch import sections as parts
from srunddp.sbatch.sections import Provenance, continued
from srunddp.sbatch.spec import MpirunJob

_PATHS = ("PATH", "LD_LIBRARY_PATH")
_EXPORT_PATHS = [
    "# For the other hosts, where mpirun starts the ranks by ssh. It complains of one that is not set.",
    'export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}"',
]


def render(job: MpirunJob, written: Provenance) -> str:
    """The script.

    Args:
        job: one that :func:`srunddp.sbatch.validate.check` has passed.
    """
    start = [*_mpirun(job), *parts.run(job, word(job.command))]
    sections = [
        _head(job, written),
        ["set -euo pipefail"],
        parts.modules(job),
        parts.environment(job, written),
        parts.exports(job),
        _EXPORT_PATHS,
        _preflight(job),
        [f"# {_why(job)}", *continued(start)],
    ]
    return parts.joined(sections)


def _head(job: MpirunJob, written: Provenance) -> list[str]:
    ranks = f"{job.ranks} {'rank' if job.ranks == 1 else 'ranks'}"
    return [
        "#!/bin/bash",
        f"# {job.script} on {ranks}; written by",
        f"#     {shlex.join(written.command)}",
        "# To be started in the folder that its paths are relative to:",
        "#     bash THIS_FILE",
    ]


def _why(job: MpirunJob) -> str:
    if job.mpi == "openmpi":
        return "--bind-to none: a rank needs CPUs for its loader workers, and Open MPI would give it one."
    return "-bind-to none: a rank needs CPUs for its loader workers."


def _names(job: MpirunJob) -> list[str]:
    """Of the variables that the ranks need."""
    own = [each.partition("=")[0] for each in job.env]
    return list(dict.fromkeys([*_PATHS, *(["VIRTUAL_ENV"] if job.venv else []), *own]))


def _mpirun(job: MpirunJob) -> list[str]:
    counts = set(job.slots.values()) or {job.tasks}
    # So many on each host; where they differ, as many as each has slots for.
    each = counts.pop() if len(counts) == 1 else None
    hosts = ",".join(f"{host}:{count}" for host, count in job.slots.items())
    if job.mpi == "openmpi":
        where = [f"--host {word(hosts)}"] if hosts else _hostfile(job, "--hostfile")
        mapping = f"ppr:{each}:node" if each else "slot"
        first = [f"{word(job.mpirun)} -np {job.ranks}", *where, f"--map-by {mapping} --bind-to none"]
        return [" ".join(first), " ".join(f"-x {name}" for name in _names(job))]
    where = [f"-hosts {word(hosts)}"] if hosts else _hostfile(job, "-f")
    first = [f"{word(job.mpirun)} -n {job.ranks}", *where, *([f"-ppn {each}"] if each else []), "-bind-to none"]
    return [" ".join(first), " ".join(f'-genv {name} "${name}"' for name in _names(job))]


def _hostfile(job: MpirunJob, option: str) -> list[str]:
    return [f"{option} {word(parts.as_path(job.hostfile))}"] if job.hostfile else []


def _preflight(job: MpirunJob) -> list[str]:
    if not job.preflight:
        return []
    why = "# Where a host, a network or the environment is not fit, this ends here with 69."
    return [why, *continued([*_mpirun(job), *parts.check(job, word(job.command))])]
