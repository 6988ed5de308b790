"""What a job script does besides the training: copies for it, and what is left to do after it."""

from __future__ import annotations

import glob
import os

from srunddp.site.jobs.job import Job
from srunddp.site.jobs.quoting import word


def clean_up(job: Job) -> list[str]:
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


def patience(job: Job) -> list[str]:
    """Where something follows upon the training."""
    if not (job.stage or job.monitor or job.requeue):
        return []
    return [
        "# Slurm's SIGTERM comes to this shell, too: it waits for the ranks, which may be writing a checkpoint.",
        "ended=",
        "trap ended=yes TERM",
    ]


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
