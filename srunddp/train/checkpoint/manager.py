"""A run's checkpoints: when they are written, and which one it goes on from."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from srunddp.errors import ConfigError
from srunddp.telemetry import event
from srunddp.train import rng
from srunddp.train.checkpoint.async_writer import AsyncCheckpointer
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.checkpoint.file import CheckpointError, load_checkpoint
from srunddp.train.config import Config
from srunddp.train.state import VERSION, TrainingState
from srunddp.train.world import World

FOLDER = "checkpoints"
_CHUNK = 2**26


class CheckpointManager:
    """Rank 0 writes and reads; the others send it their random states, and are sent what it has read."""

    def __init__(self, config: Config, world: World, state: TrainingState, log: Callable[[str], None]) -> None:
        """Args:
        config: with an ``output_dir``; log: a line to the user, on rank 0.
        """
        assert config.output_dir is not None
        self._config, self._world, self._state, self._log = config, world, state, log
        self._directory = CheckpointDirectory(
            Path(config.output_dir) / FOLDER, config.checkpoint.keep_last, config.checkpoint.keep_best
        )
        self._writer = AsyncCheckpointer(self._directory)
        if world.rank == 0:
            # Now, so that a folder which cannot be written is known before the first epoch, not after it.
            try:
                self._directory.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{self._directory.folder} cannot be made: {error.strerror}",
                    expected="a folder that rank 0 may write to",
                    hint="correct output_dir",
                ) from None
        self._origin: Path | None = None
        self._last_saved: tuple[int, ...] = ()
        self._saved_at = time.monotonic()

    def due(self, *, epoch: int = 0) -> bool:
        """Whether a checkpoint is due after this step, or with ``epoch`` after that epoch."""
        when = self._config.checkpoint
        if epoch:
            return bool(when.every_epochs and epoch % when.every_epochs == 0)
        return bool(when.every_steps and self._state.step % when.every_steps == 0)

    def due_by_clock(self) -> bool:
        """The same by rank 0's clock, which the others have to be told."""
        minutes = self._config.checkpoint.every_minutes
        return self._world.rank == 0 and bool(minutes) and time.monotonic() >= self._saved_at + 60 * minutes

    def save(self) -> Path:
        """Write a checkpoint of this step beside training; all ranks call this.

        Returns:
            Its path, which exists once it is written.
        """
        state, self._saved_at = self._state, time.monotonic()
        path = self._directory.path(state.step)
        # An epoch's end, and an evaluation, change what is to be saved after a step.
        if self._last_saved == (position := (state.step, state.epoch, state.evaluated)):
            return path
        self._last_saved = position
        states = rng.gather(self._world)
        if self._world.rank == 0:
            self._directory.scores = dict(state.scores)
            whole = {**state.state_dict(), "random": states, "world_size": self._world.world_size}
            self._writer.write(state.step, whole)
        event("checkpoint", time.monotonic() - self._saved_at)
        return path

    def report(self) -> list[Path]:
        """Say what went wrong with checkpoints; training goes on, and tries again when the next one is due.

        Returns:
            Those that have been written since the last call.
        """
        problems, steps = self._writer.poll()
        for problem in problems:
            self._log(problem)
        return [self._directory.path(step) for step in steps]

    def finish(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writer.wait()

    def load_latest(self) -> dict[str, Any] | None:
        """The checkpoint to go on from, if ``config.resume`` names one or finds one; all ranks call this.

        Raises:
            CheckpointError: it is not whole.
        """
        path, state = self._choose() if self._world.rank == 0 else (None, None)
        self._origin = path
        if self._world.world_size > 1:
            state = _sent(path, state, self._world)
        return state

    def restore(self, found: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            CheckpointError: it is not of this model.
        """
        try:
            _check_version(found)
            self._state.load_state_dict(found)
        except (IndexError, KeyError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint is not of this model and optimizer: {' '.join(str(error).split())[:300]}",
                expected="those of the script that wrote it",
                hint="start with another output_dir",
            ) from error
        rng.restore(found["random"], self._world, self._config.seed + self._state.step)
        self._last_saved = (self._state.step, self._state.epoch, self._state.evaluated)
        event("resumed", self._state.step)
        if self._origin:
            self._log(f"goes on from {self._origin}: {self._state.epoch} epochs and {self._state.step} steps are done")

    def _choose(self) -> tuple[Path | None, dict[str, Any] | None]:
        wanted = self._config.resume
        restarted = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        if wanted == "auto" or restarted:
            path, state = self._directory.newest(self._log) or (None, None)
            if state is not None or wanted in ("auto", "never"):
                return path, state
        if wanted != "never":
            state = load_checkpoint(wanted)
            _check_version(state, wanted)
            for path in self._directory.archive_newer(after=state["step"]):
                self._log(f"{path} is from after the checkpoint that was asked for, and was set aside")
            return Path(wanted), state
        if steps := self._directory.steps():
            raise ConfigError(
                f"{self._directory.path(steps[-1])} is there, of an earlier run, and resume is never",
                expected="an output_dir without checkpoints",
                hint="use resume=auto to go on with that run, or another output_dir",
            )
        return None, None


def _check_version(state: Mapping[str, Any], path: str = "") -> None:
    if state.get("version") != VERSION or "step" not in state or "random" not in state:
        raise CheckpointError(
            f"this checkpoint has the version {state.get('version', 'none')}",
            expected=f"one that a Trainer wrote, of version {VERSION}",
            hint="load its model in the script by srunddp.train.load_checkpoint() instead",
            where=path,
        )


def _sent(path: Path | None, state: dict[str, Any] | None, world: World) -> dict[str, Any] | None:
    """What rank 0 has read, on all ranks: a file system that each node has for itself is no obstacle."""
    written = path.read_bytes() if path and state is not None else b""
    size = torch.tensor([len(written)], device=world.device)
    dist.broadcast(size, src=0)
    received = bytearray(written) if world.rank == 0 else bytearray(int(size))
    for start in range(0, int(size), _CHUNK):
        chunk = torch.frombuffer(received, dtype=torch.uint8)[start : start + _CHUNK]
        moved = chunk.to(world.device)
        dist.broadcast(moved, src=0)
        chunk.copy_(moved)
    if world.rank == 0 or not received:
        return state
    loaded: dict[str, Any] = torch.load(io.BytesIO(received), map_location="cpu", weights_only=True)
    return loaded
