"""Removes what was staged for a job from its nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable

from srunddp.site.staging.jobs import Job
from srunddp.site.staging.step import Step


def clean(job: Job, timeout: float, say: Callable[[str], None]) -> None:
    """Remove the job's folder from all nodes, but for files that were written there.

    Args:
        timeout: seconds that a node may take; say: takes a line for each node where files stay.

    Raises:
        StagingError: ranks still use it, or a node does not answer.
    """
    with Step(job, sys.executable, timeout) as step:
        answers = step.ask(do="clean")
        if all(answer["kept"] is None for answer in answers.values()):
            say(f"nothing was staged for job {job.number} in {job.base}")
        for node in sorted(answers):
            if kept := answers[node]["kept"]:
                files = "1 file" if kept == 1 else f"{kept} files"
                say(f"{node} keeps {files} written in a copy: {job.folder}")
        step.wait()
