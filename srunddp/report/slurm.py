"""Adds to a summary what only Slurm knows, such as the time limit of the job."""

import re
from dataclasses import replace

from srunddp.report.summary import Summary
from srunddp.util import slurm_command

_STEP = re.compile(r"[0-9]{1,18}\.[0-9]{1,18}")
_GONE = ("not found", "Invalid job id")  # in scontrol's answer


def completed(summary: Summary) -> Summary:
    """Ask Slurm whether the job step is over, for the job's time limit, and how long the job has
    lasted, and add the answers to a summary.
    """
    step = f"{summary.job}.{summary.step}"
    if not _STEP.fullmatch(step):  # Slurm did not start the run
        return summary
    if summary.ending.running:
        # Ask whether the step still exists, because a killed step has not recorded its end.
        said = slurm_command.output("scontrol", "--oneliner", "show", "step", step, any_status=True)
        summary = replace(
            summary, ending=replace(summary.ending, running=not any(word in said for word in _GONE))
        )
    known = slurm_command.job(summary.job)
    # For the id of a job array, Slurm may answer with one of its tasks, which is another run.
    if known is None or known.number != summary.job:
        return summary
    return replace(
        summary, time_limit_s=summary.time_limit_s or known.limit_s, job_s=known.lasted_s
    )
