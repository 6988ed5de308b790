"""What a supervisor says of its own rank's failure: from the worker's words, from its status, or of itself."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srunddp.supervisor import failure_files
from srunddp.supervisor.failure import Failure, Weight, by_launcher, of_status, time_of_day
from srunddp.supervisor.stacks import Dump
from srunddp.util import memory

_ASKED_COUNTS = 120.0  # what fails so long after the launcher's signal fails for a reason of its own


@dataclass
class Report:
    """Makes this rank's :class:`Failure`.

    Attributes:
        rank, node: of this rank; dump: of its worker's stacks.
        log: the file that gets its traceback, or None.
    """

    rank: int
    node: str
    dump: Dump
    log: Path | None
    _asked: tuple[int, float] | None = None
    _oom_kills: int = field(default_factory=memory.oom_kills)

    def asked(self, now: float) -> int:
        """The number of the signal with which the launcher has asked this run to end; 0 for none, or long ago."""
        return self._asked[0] if self._asked and now < self._asked[1] + _ASKED_COUNTS else 0

    def ask(self, number: int, now: float) -> None:
        """The launcher has sent a signal that ends a run."""
        self._asked = (number, now)

    def of_status(self, status: int, now: float, *, dumped_core: bool = False) -> Failure:
        """Of a worker that ended without a word, by its exit code or minus its signal."""
        killed = status == -signal.SIGKILL and memory.oom_kills() > self._oom_kills
        hint = "out of memory" if killed else "core dumped" if dumped_core else ""
        cause, trace, weight = of_status(status, self.dump.read(), hint)
        return self.of(cause, status if status >= 0 else 128 - status, now, weight, trace)

    def of_message(self, told: Mapping[str, Any], now: float) -> Failure:
        """Of a worker that has told of its exception."""
        weight, trace, shown = Weight(told["weight"]), told["traceback"], told["shown"]
        return self.of(told["cause"], told["exit_code"], now, weight, trace, shown=shown)

    def of(
        self,
        cause: str,
        code: int,
        now: float,
        weight: Weight = Weight.PRIMARY,
        trace: str = "",
        *,
        shown: bool = False,
    ) -> Failure:
        """Of anything."""
        asked = self.asked(now)
        if asked and weight is not Weight.STOPPED:
            own = f"; then {cause}" if trace and code != 128 + asked else ""
            cause = f"{by_launcher(asked)}{own}"
            weight, trace = Weight.ASKED, trace if own else ""
        return Failure(self.rank, self.node, cause, code, weight, trace, time_of_day(), shown)

    def write(self, failure: Failure) -> None:
        """Its traceback goes to the rank's log unless it has been shown; only when the others have been told."""
        if self.log and failure.traceback and not failure.shown:
            failure_files.write(self.log, failure.traceback.rstrip("\n") + "\n")
