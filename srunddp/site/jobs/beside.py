"""What a job script starts beside the training, and ends with it."""

from __future__ import annotations

import glob
import os

from srunddp.site.jobs.job import Job
from srunddp.site.jobs.quoting import pattern, word


def clean_up(job: Job) -> list[str]:
    """What ends with the script, however that ends; empty where nothing has to."""
    if not cleans_up(job):
        return []
    end = ['  [ ${#monitors[@]} = 0 ] || kill "${monitors[@]}" 2>/dev/null || true'] if job.monitor else []
    return [
        *(["monitors=()"] if job.monitor else []),
        "clean_up() {",
        "  trap - EXIT",
        *end,
        # At a job's end no step can be started any more, and the copies go by themselves.
        *([f'  [ -n "${{ended:-}}" ] || {word(job.command)} stage clean || true'] if job.stage else []),
        "}",
        "trap clean_up EXIT",
    ]


def patience(job: Job) -> list[str]:
    """Where something follows upon the training."""
    if not (cleans_up(job) or job.requeue):
        return []
    asks = job.requeue or job.stage
    return [
        "# Slurm's SIGTERM comes to this shell, too: it waits for the ranks, which may be writing a checkpoint.",
        *(["ended="] if asks else []),
        f"trap {'ended=yes' if asks else ':'} TERM",
    ]


def cleans_up(job: Job) -> bool:
    """Whether something has to end with the script."""
    return bool(job.monitor or job.stage)


def monitors(job: Job) -> list[str]:
    """top and nvidia-smi."""
    if not job.monitor:
        return []
    output = f'--output={word(pattern(job.log_dir))}/"$1-%j-%N.log"'
    lines = [
        "# One on each node, beside the ranks; the signals that Slurm sends to all steps do not end it.",
        "monitor() {",
        '  srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task=1 \\',
        f"    --open-mode=append {output} \\",
        '    bash -c "trap \'\' HUP INT USR1 USR2; ! command -v \\"\\$1\\" >/dev/null || exec \\"\\$@\\"" \\',
        '    monitor "$@" </dev/null >/dev/null 2>&1 &',
        '  monitors+=("$!")',
        "}",
        f'monitor top -b -d {job.monitor} -u "$(id -un)"',
    ]
    return [*lines, *([f"monitor nvidia-smi dmon -s pucvmet -d {job.monitor}"] if job.gpus else [])]


def stage(job: Job) -> list[str]:
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
