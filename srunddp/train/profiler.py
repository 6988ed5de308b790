"""A trace of a few steps, by torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from srunddp.errors import ConfigError, Scope

if TYPE_CHECKING:
    import torch.profiler


def parse(text: str) -> range:
    """Read ``10:15``: the steps 10 to 14.

    Raises:
        ConfigError: it is not of that form, or no step is in it.
    """
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text.strip())
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if not steps:
        hint = "write --profile=10:15 for the steps 10 to 14"
        raise ConfigError(f"profile is {text!r}", expected="FIRST:END, END above FIRST", hint=hint, scope=Scope.JOB)
    return steps


class Profile:
    """Traces those of the steps that are made, in one file for Chrome's ``about:tracing`` or Perfetto.

    A trace that cannot be made or written ends nothing: ``log`` is called with the reason.
    """

    def __init__(self, steps: range, path: Path, log: Callable[[str], None]) -> None:
        """Nothing starts yet.

        Args:
            steps: as :func:`parse` gives them.
            path: such as ``trace-rank0.json``; compressed where it ends in ``.gz``.
            log: takes a line for the user.
        """
        self._steps = steps
        self._path = path
        self._log = log
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Call it before each step, counted as ``steps`` are; steps may be left out."""
        if self._profiler is None and step in self._steps:
            self._start()

    def after(self, step: int) -> None:
        """Call it after the step."""
        if self._profiler is not None and step + 1 >= self._steps.stop:
            self.close()

    def close(self) -> None:
        """Write what there is, if anything."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._steps = range(0)
        # A killed job leaves no half of a trace under its name. The last suffix tells torch whether to compress.
        partial = self._path.with_name(f"partial-{self._path.name}")
        try:
            profiler.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(partial))
            partial.replace(self._path)
        except (OSError, RuntimeError) as error:
            self._log(f"no trace in {self._path}: {error}")

    def _start(self) -> None:
        from torch.autograd.profiler import _is_profiler_enabled
        from torch.profiler import profile

        # A second one would end in a segmentation fault.
        if _is_profiler_enabled:
            self._steps = range(0)
            self._log(f"no trace in {self._path}: the script profiles itself")
            return
        self._profiler = profile()
        self._profiler.start()
