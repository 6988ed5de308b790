"""The file with a run's metrics, which is written if the site's ifaces.conf has ``metrics:``."""

from __future__ import annotations

import os
import time
from pathlib import Path

from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup
from srunddp.monitor.metrics_file import MetricsFile, RunLabels, RunState, user_name
from srunddp.run.run_files import requeues
from srunddp.supervisor.limits import Limits
from srunddp.telemetry import TelemetryPage
from srunddp.util.console import say_amid_output


class _StepWatch:
    """Reads this rank's count of steps, and notes the time at which it last found a new step.

    Attributes:
        steps: The number of steps at the last look.
        at: Unix time of the last look at which there was a new step; None before the first step.
    """

    def __init__(self, page: TelemetryPage) -> None:
        self._page = page
        self.steps = 0
        self.at: float | None = None

    def look(self) -> None:
        steps = self._page.steps_made()
        if steps != self.steps:
            self.steps = steps
            self.at = time.time()


def metrics_file(
    folder: Path,
    setup: RankSetup,
    meeting: RendezvousInfo,
    page: TelemetryPage,
    *,
    stalls: int,
    checkpointed: float | None,
    limits: Limits,
) -> MetricsFile:
    """Return the file with the metrics of this node's ranks; it is not written yet.

    Args:
        folder: The folder of the textfile collector.
        setup: This rank's setup; it is the first rank of its node.
        meeting: Rank 0's answer at the rendezvous.
        page: The shared page with the steps and checkpoints of this start.
        stalls: How many of the previous starts have ended with a stall.
        checkpointed: Unix time of the last checkpoint of the previous starts; None for none.
        limits: The time limits, of which ``metrics_every`` says how often the file is written.
    """
    environment = setup.environment
    job = os.environ.get("SLURM_JOB_ID", "")
    step = meeting.run
    if environment.step:
        job = environment.step.job
        step = environment.step.step
    restarts = requeues() + setup.options.generation
    started = time.time()
    watch = _StepWatch(page)

    def state() -> RunState:
        watch.look()
        return RunState(
            ranks=meeting.local_world_size,
            steps=watch.steps,
            restarts=restarts,
            stalls=stalls,
            started=started,
            stepped=watch.at,
            checkpointed=page.checkpointed_at() or checkpointed,
        )

    def warn(line: str) -> None:
        # Only rank 0 prints the warning, because other nodes mostly have the same fault, and users
        # cannot correct it.
        if environment.rank == 0:
            say_amid_output(line)

    return MetricsFile(
        folder,
        lambda: RunLabels(job, step, user_name(), environment.node),
        state,
        every=limits.metrics_every,
        warn=warn,
    )
