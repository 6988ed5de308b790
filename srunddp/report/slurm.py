"""What Slurm alone knows of a run."""

import re
from dataclasses import replace

from srunddp.report.summary import Summary
from srunddp.util import slurm_command

_STEP = re.compile(r"[0-9]{1,18}\.[0-9]{1,18}")
_GONE = ("not found", "Invalid job id")  # as scontrol has it


def completed(summary: Summary) -> Summary:
    """Add what Slurm knows of a run's job.

    This is whether the step is over, the job's time limit, and how long the job has lasted.
    """
    step = f"{summary.job}.{summary.step}"
    if not _STEP.fullmatch(step):  # Slurm did not start the run
        return summary
    if summary.ending.running:
        # As far as the controller knows: a step that was killed has not recorded its end.
        said = slurm_command.output("scontrol", "--oneliner", "show", "step", step, any_status=True)
        summary = replace(
            summary, ending=replace(summary.ending, running=not any(word in said for word in _GONE))
        )
    known = slurm_command.job(summary.job)
    # Asked for an array, Slurm answers with its tasks, and the first of them may be another run.
    if known is None or known.number != summary.job:
        return summary
    return replace(
        summary, time_limit_s=summary.time_limit_s or known.limit_s, job_s=known.lasted_s
    )
