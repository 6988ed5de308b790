"""A job of Slurm as a script: for sbatch, or for salloc, under which it starts itself once more."""

from __future__ import annotations

import glob
import os
import shlex
from shlex import quote as word

from srunddp.sbatch import sections as parts
from srunddp.sbatch.sections import Provenance, continued, directive, pattern
from srunddp.sbatch.spec import SlurmJob

_SLEEP = 600  # longer than Slurm takes to end a job
_REPORT = 120  # seconds, for all nodes wait for it


def render(job: SlurmJob, written: Provenance, *, interactive: bool = False) -> str:
    """The script.

    Args:
        job: one that :func:`srunddp.sbatch.validate.check` has passed.
        interactive: for salloc, not sbatch.
    """
    sections = [
        _head(job, written, interactive),
        [] if interactive else _directives(job),
        ["set -euo pipefail"],
        _allocation(job) if interactive else [],
        parts.modules(job),
        parts.environment(job, written),
        parts.exports(job),
        _cpus(job),
        [f"mkdir -p -- {word(job.log_dir)}"] if interactive and job.preflight else [],
        _clean_up(job),
        _patience(job),
        _stage(job),
        _preflight(job),
        *_training(job),
    ]
    return parts.joined(sections)


def options(job: SlurmJob) -> list[tuple[str, object]]:
    """What sbatch and salloc are both asked for, without dashes; None for an option without a value."""
    wished = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "reservation": job.reservation,
        "nodelist": job.nodelist,
        "exclude": job.exclude,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks,
        "gpus-per-node": job.gpus_per_node,
        "gres": job.gres,
        "cpus-per-task": job.cpus_per_task,
        "mem": job.mem,
        "time": job.time,
        "array": job.array,
        "dependency": job.dependency,
        "signal": job.warning,
    }
    found: list[tuple[str, object]] = [(name, value) for name, value in wished.items() if value not in (None, "")]
    return [*found, *([("exclusive", None)] if job.exclusive else [])]


def allocation(job: SlurmJob) -> list[str]:
    """``salloc`` with its options."""
    return ["salloc", *(f"--{name}" if value is None else f"--{name}={value}" for name, value in options(job))]


def output(job: SlurmJob) -> str:
    """Where sbatch writes, with Slurm's patterns."""
    number = "%A_%a" if job.array else "%j"
    return f"{pattern(job.log_dir)}/%x-{number}.out"


def _head(job: SlurmJob, written: Provenance, interactive: bool) -> list[str]:
    ranks = f"{job.tasks} {'rank' if job.tasks == 1 else 'ranks'}"
    size = f"1 node, {ranks}" if job.nodes == 1 else f"{job.nodes} nodes, {ranks} on each"
    start = "bash THIS_FILE" if interactive else f"mkdir -p -- {word(job.log_dir)} && sbatch THIS_FILE"
    return [
        "#!/bin/bash",
        f"# {job.script} on {size}; written by",
        f"#     {shlex.join(written.command)}",
        "# To be started in the folder that its paths are relative to:",
        f"#     {start}",
    ]


_WHY = {
    "ntasks-per-node": "One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink.",
    "signal": "The ranks are warned so many seconds before the end, and write a checkpoint.",
}


def _directives(job: SlurmJob) -> list[str]:
    lines: list[str] = []
    for name, value in options(job):
        explained = name in _WHY and (job.gpus or name != "ntasks-per-node")
        lines += [f"# {_WHY[name]}"] if explained else []
        lines.append(directive(name, value))
    lines += ["# Slurm does not make this folder; where it is missing the job ends at once, without a word."]
    lines += [directive("output", output(job))]
    if job.requeue:
        lines += ["# Slurm may start the job again, under its number.", directive("requeue")]
    return [*lines, "# Each start writes behind the one before.", directive("open-mode", "append")]


def _allocation(job: SlurmJob) -> list[str]:
    again = continued([f"exec {each}" if not number else each for number, each in enumerate(_wrapped(job))])
    return [
        "# Outside a job: once more, under salloc.",
        'if [ -z "${SLURM_JOB_ID:-}" ]; then',
        '  [ -f "$0" ] || { echo "this script has to be a file: bash FILE" >&2; exit 78; }',
        *_indented(again),
        "fi",
    ]


def _wrapped(job: SlurmJob) -> list[str]:
    first, *rest = map(word, allocation(job))
    return [first, *rest, 'bash "$0"']


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _cpus(job: SlurmJob) -> list[str]:
    if not job.cpus_per_task:
        return []
    return [
        "# Since Slurm 22.05 srun does not take this over from the job.",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    ]


def _clean_up(job: SlurmJob) -> list[str]:
    """What goes with the script, however that ends; empty where nothing has to."""
    if not job.stage:
        return []
    return [
        "clean_up() {",
        "  trap - EXIT",
        # At a job's end no step can be started any more, and the copies go by themselves.
        f'  [ -n "${{ended:-}}" ] || {word(job.command)} stage clean || true',
        "}",
        "trap clean_up EXIT",
    ]


def _patience(job: SlurmJob) -> list[str]:
    """Where something follows upon the training."""
    if not (job.stage or job.monitor or job.requeue):
        return []
    return [
        "# Slurm's SIGTERM comes to this shell, too: it waits for the ranks, which may be writing a checkpoint.",
        "ended=",
        "trap ended=yes TERM",
    ]


def _stage(job: SlurmJob) -> list[str]:
    """``srunddp stage push``."""
    if not job.stage:
        return []
    logs = os.path.normpath(job.log_dir)
    without = [*([] if logs.startswith("/") else [f"/{glob.escape(logs)}"]), *job.stage_exclude]
    options = [*(f"--data {word(each)}" for each in job.data), *(f"--exclude {word(each)}" for each in without)]
    return [
        "# To nodes that do not see them; prints the srunddp that every node has. That enters this folder or its copy,",
        "# since not all nodes could start here: so --chdir=/ below.",
        " ".join([f'srunddp=$({word(job.command)} stage push --env "$VIRTUAL_ENV" --project "$PWD"', *options]) + ")",
    ]


def _command(job: SlurmJob) -> str:
    return '"$srunddp"' if job.stage else word(job.command)


def _srun(job: SlurmJob) -> list[str]:
    """srun with its options, up to the command on each node, in lines."""
    step = [
        # Also where the site gives jobs no variables, the ranks get the script's.
        "srun --export=ALL --kill-on-bad-exit=1",
        *(["--chdir=/"] if job.stage else []),
        *(["--gpu-bind=none"] if job.gpus else []),
        *([f"--mpi={word(job.mpi)}"] if job.mpi else []),
    ]
    return [" ".join(step), *_container(job)]


def _container(job: SlurmJob) -> list[str]:
    if job.container:
        gpus = "--nv " if job.gpus else ""
        return [f'apptainer exec {gpus}--bind "$PWD" --pwd "$PWD" {word(job.container)}']
    if job.container_image:
        mounts = "".join(f",{word(each)}" for each in job.container_mounts)
        image = f"--container-image={word(job.container_image)}"
        # Else the image's own values of these would win.
        names = ",".join(each.partition("=")[0] for each in job.env)
        exported = f" --container-env={names}" if names else ""
        return [image, f'--container-mounts="$PWD:$PWD"{mounts} --container-workdir="$PWD"{exported}']
    return []


def _preflight(job: SlurmJob) -> list[str]:
    if not job.preflight:
        return []
    why = "# Where a node, a network or the environment is not fit, the job ends here with 69."
    return [why, *continued([*_srun(job), *parts.check(job, _command(job), staged=job.stage)])]


def _training(job: SlurmJob) -> list[list[str]]:
    why = ["# The first rank that fails ends the others."]
    step = [*_srun(job), *parts.run(job, _command(job), _monitoring(job), staged=job.stage)]
    if not (job.requeue or job.monitor):
        return [[*why, *continued(step)]]
    step[-1] += " || code=$?"
    return [[*why, "code=0", *continued(step)], [*_await_end(job), *_report(job), 'exit "$code"']]


def _monitoring(job: SlurmJob) -> list[str]:
    return [f"--monitor={job.monitor}", f"--monitor-dir={job.log_dir}"] if job.monitor else []


def _await_end(job: SlurmJob) -> list[str]:
    if not job.requeue:
        return []
    return [
        "# 143: there is a checkpoint, and Slurm is about to end the job. One that is preempted, and ends by itself",
        "# before that, would be taken for done.",
        'if [ "$code" = 143 ] && [ -z "$ended" ]; then',
        *(["  clean_up"] if job.stage else []),
        f"  sleep {_SLEEP} || true",
        "fi",
    ]


def _report(job: SlurmJob) -> list[str]:
    if not job.monitor:
        return []
    # Only a container has srunddp, and pyxis starts one for a step alone.
    step = ["srun --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1", *_container(job)] if job.contained else []
    report = f'{word(job.command)} report "$SLURM_JOB_ID" --monitor-dir={word(job.log_dir)} || true'
    first, *rest = [*step, report]
    return [
        "# Where Slurm ends the job there is no time for it: the same command writes it later.",
        'if [ -z "$ended" ]; then',
        *_indented(continued([f"timeout --foreground {_REPORT} {first}", *rest])),
        "fi",
    ]
