"""A run's checkpoints: rank 0 writes them in the background, and all ranks load the same one."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from mmap import MAP_SHARED
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from srunddp.bootstrap.process_group.store import restart_count
from srunddp.errors import ConfigError
from srunddp.telemetry import event
from srunddp.train import rng
from srunddp.train.checkpoint.async_writer import AsyncCheckpointer, emptied, map_tensors
from srunddp.train.checkpoint.directory import CheckpointDirectory, disk_hint
from srunddp.train.checkpoint.file import (
    OWN,
    CheckpointError,
    check_savable,
    last_line,
    load_checkpoint,
    load_open,
    write_all,
)
from srunddp.train.world import World, any_rank, on_rank_zero
from srunddp.util.kernel_file import memory_file
from srunddp.util.user_path import expanded

# Bytes (one page) up to which a tensor of a loaded checkpoint is copied out of the file.
_SMALL = 4096
# Bytes of one broadcast. Ranks without the file hold one such piece in addition to the received
# bytes.
_PIECE = 1 << 22


class CheckpointManager:
    """The checkpoints of one run, in a folder. All ranks create a manager and call its methods,
    after the same steps.

    Rank 0's state is saved, with the random states of all ranks:

        manager = CheckpointManager("checkpoints", world)
        if state := manager.load("auto"):
            model.load_state_dict(state["model"])
            manager.restore_rng(state, seed=0)

    Attributes:
        scores: The score of each step that has one; lower is better. They are saved and loaded too.
        loaded: The file that ``load()`` has read; None if it has read none.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        world: World,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Create the folder, and check now, rather than after the first epoch, that it can be
        written.

        Args:
            folder: The folder of this run only, which rank 0 must see.
            world: The return value of ``srunddp.init()``.
            keep_last: How many of the newest checkpoints to keep; the last one saved is always
                kept.
            keep_best: How many of the best to keep in addition; ``best.pt`` is a link to the best.
            log: Called on rank 0 with lines for the user; None logs them as warnings.

        Raises:
            ConfigError: Rank 0 cannot write to the folder.
            PeerError: The same, on the other ranks.
        """
        self.loaded: Path | None = None
        self._world = world
        self._log = log or partial(logging.getLogger("srunddp").warning, "srunddp: %s")
        path = Path(expanded(folder, "the folder of checkpoints"))
        self._directory = CheckpointDirectory(path, keep_last, keep_best)
        self.scores = self._directory.scores
        self._writer = AsyncCheckpointer(self._directory, self._log)
        # Map files only if this rank has a GPU, to which tensors are copied. On a CPU,
        # load_state_dict() may keep a tensor as it is, so an optimizer would work in a mapped file
        # that rank 0 deletes later.
        self._mmap = world.device.type != "cpu"
        on_rank_zero(world, self._make_folder)

    def check(self, state: Mapping[str, Any]) -> None:
        """Check, before the first step, that a state can be saved.

        This is cheap: only the plain values are pickled.

        Args:
            state: The state on rank 0; that of other ranks is not used.

        Raises:
            CheckpointError: The state contains something other than tensors and plain values;
                PeerError on the other ranks.
        """
        on_rank_zero(self._world, lambda: check_savable(emptied(state), self._directory.folder))

    def save(
        self, step: int, state: Mapping[str, Any], *, score: float | None = None, wait: bool = False
    ) -> Path:
        """Copy the state, and write it in the background.

        A checkpoint is skipped if the previous one is still being written. A skipped checkpoint and
        an error of the disk are reported in a line, and training goes on.

        Args:
            step: The number of optimizer steps done so far.
            state: Tensors and plain values on rank 0; the state of other ranks is not used.
            score: How good the model is; lower is better.
            wait: Wait until the previous checkpoint and this one are written; for the last
                checkpoint, and before a stop.

        Returns:
            The path, which exists once the checkpoint is written.

        Raises:
            CheckpointError: This checkpoint or the previous one could not be loaded again, or
                another run has begun in this folder; with ``wait``, also if this one could not be
                written. With ``wait`` the other ranks raise PeerError.
        """
        # With ``wait`` this checkpoint must not be skipped, so the previous one has to be written
        # first. All ranks wait here, without a time limit: the gather below has one.
        if wait:
            on_rank_zero(self._world, self._writer.join)
        began = time.monotonic()
        random = rng.gather(self._world)
        if self._world.rank == 0:
            if score is not None:
                self.scores[step] = score
            own = {
                "step": step,
                "world_size": self._world.world_size,
                "random": random,
                "scores": dict(self.scores),
            }
            self._writer.write(step, {**state, OWN: own})
        event("checkpoint", time.monotonic() - began)
        if wait:
            self.wait()
        return self.path(step)

    def wait(self) -> bool:
        """Wait until no checkpoint is being written; there is no time limit.

        Returns:
            Whether the latest checkpoint was written; False if it was skipped.

        Raises:
            CheckpointError: The checkpoint could not be written; PeerError on the other ranks.
        """
        return on_rank_zero(self._world, self._writer.wait)

    def report(self) -> list[Path]:
        """Return, on rank 0, the files that were written since the last call; an empty list on
        other ranks.

        If a file could not be written, a line for the user says so.
        """
        return [self.path(step) for step in self._writer.poll()]

    def load(self, resume: str = "auto") -> dict[str, Any] | None:
        """Load a checkpoint: the state given to ``save()``, with tensors on the CPU, and the
        manager's own key ``srunddp``; None for a new run.

        From then on, runs that began earlier can no longer write checkpoints here. Rank 0 sends its
        file to ranks that do not see it. With a GPU the tensors stay in the file until they are
        used: copy those that are not moved to the GPU.

        Args:
            resume: ``auto`` for the newest complete checkpoint, if any; a checkpoint's path, which
                sets later ones aside; or ``never``. A job that Slurm has started again loads the
                newest one in any case.

        Raises:
            ConfigError: There are checkpoints, and ``resume`` is ``never``; or later ones cannot be
                set aside.
            CheckpointError: The checkpoint at this path is not complete, or was not saved by a
                manager. PeerError on the other ranks.
        """
        state: dict[str, Any] | None = None

        def choose() -> tuple[str, str, int] | None:
            nonlocal state
            path, state = self._choose(resume)
            if state:
                return (str(path.absolute()), last_line(path), path.stat().st_size)
            return None

        # Let rank 0 choose for all: on NFS, listings of a folder may differ between nodes for
        # seconds.
        chosen = on_rank_zero(self._world, choose)
        if not chosen:
            return None
        name, line, size = chosen
        path = Path(name)
        self.loaded = path
        if self._world.rank:
            state = self._same(path, line)
        # The broadcasts are collectives: if one rank lacks the file, all ranks take part.
        is_lacking = state is None
        if any_rank(self._world, is_lacking):
            sent = _send_checkpoint(self._world, path, size, lacking=is_lacking)
            if is_lacking:
                state = sent
        assert state is not None
        # Copy small tensors: one that stays in the mapped file, or in the bytes of a broadcast,
        # keeps all of the checkpoint in memory. So would the step counters of Adam, which stay on
        # the CPU.
        state = map_tensors(state, _cloned_if_small, lambda value: value)
        self.scores.update(state[OWN]["scores"])
        event("resumed", state[OWN]["step"])
        return state

    def restore_rng(self, state: Mapping[str, Any], seed: int) -> None:
        """Restore the random states from a loaded state.

        A rank without a saved random state, because there are more ranks now, is seeded anew.

        Args:
            state: From :meth:`load`.
            seed: The seed of ranks without a saved state.
        """
        own = state[OWN]
        rng.restore(own["random"], self._world, seed + own["step"])

    def path(self, step: int) -> Path:
        """Return the path of a checkpoint, whether it exists or not.

        Args:
            step: The step after which it was saved.
        """
        return self._directory.path(step)

    def _make_folder(self) -> None:
        with self._writing():
            self._directory.folder.mkdir(parents=True, exist_ok=True)
            # With a full disk or quota, a file can sometimes be created but not its first block.
            with TemporaryFile(dir=self._directory.folder, buffering=0) as file:
                file.write(bytes(4096))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{self._directory.folder} cannot be written: {error.strerror}",
                expected="a folder that rank 0 may write to",
                hint=f"{disk_hint(error)}, or choose another",
            ) from None

    def _choose(self, resume: str) -> tuple[Path, dict[str, Any] | None]:
        # If Slurm has started the job again, or srunddp the script because of --restarts, the
        # command line is that of the first start, so nobody has chosen resume= for this start.
        by_slurm = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        restarted = restart_count() > 0 or by_slurm
        if resume == "never" and not restarted:
            self._refuse_earlier_run()
        # Begin before looking for the newest checkpoint: otherwise an earlier run could still write
        # a newer one than that from which this run continues. From begin() on it cannot.
        with self._writing():
            self._directory.begin()
        if resume == "auto" or restarted:
            found = self._directory.newest(self._log, mmap=self._mmap)
            if found:
                return _checked(*found)
        if resume not in ("auto", "never"):
            path, state = _checked(Path(resume), load_checkpoint(resume, mmap=self._mmap))
            self._set_aside(after=state[OWN]["step"])
            return path, state
        return Path(), None

    def _refuse_earlier_run(self) -> None:
        steps = self._directory.steps()
        if steps:
            raise ConfigError(
                f"{self.path(steps[-1])} exists from an earlier run, and resume is never",
                expected="a folder without checkpoints",
                hint="use resume=auto to go on with that run, or another folder",
            )

    def _set_aside(self, after: int) -> None:
        with self._writing():
            for path in self._directory.archive_newer(after):
                self._log(
                    f"{path} is from after the checkpoint that was asked for, and was set aside"
                )

    def _same(self, path: Path, line: str) -> dict[str, Any] | None:
        """Load the file at that path if it is rank 0's file; return None otherwise."""
        # Compare the last line, because a folder of that name may be a different one on each node,
        # as under /tmp.
        with suppress(CheckpointError):
            if last_line(path) == line:
                return load_checkpoint(path, mmap=self._mmap)
        return None


def _send_checkpoint(
    world: World, path: Path, size: int, *, lacking: bool
) -> dict[str, Any] | None:
    """Send rank 0's file to the ranks that lack it, by broadcasts in which all ranks take part.

    Args:
        world: The ranks.
        path: The file on rank 0.
        size: The size of the file in bytes.
        lacking: Whether this rank lacks the file.

    Returns:
        The content of the file on a rank that lacked it, else None. The bytes are in memory only
        once: the tensors refer to them.
    """
    piece = bytearray(_PIECE)
    tensor = torch.frombuffer(piece, dtype=torch.uint8)
    with (
        open(path if world.rank == 0 else "/dev/null", "rb") as file,
        open(memory_file(), "rb+", buffering=0) as kept,
    ):
        for start in range(0, size, _PIECE):
            # On the other ranks this reads nothing, and the broadcast overwrites the piece.
            file.readinto(piece)
            moved = tensor.to(world.device)
            dist.broadcast(moved, src=0)
            if lacking:
                tensor.copy_(moved)
                write_all(kept, memoryview(piece)[: size - start])
        return load_open(kept, path, MAP_SHARED) if lacking else None


def _cloned_if_small(tensor: Tensor) -> Tensor:
    if tensor.numel() * tensor.dtype.itemsize <= _SMALL:
        return tensor.clone()
    return tensor


def _checked(path: Path, state: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    if not {"step", "random", "scores"} <= state.get(OWN, {}).keys():
        raise CheckpointError(
            "it was not saved by a CheckpointManager",
            expected="a checkpoint of this version of srunddp",
            hint="load its model in the script by srunddp.train.load_checkpoint() instead",
            where=str(path),
        )
    return path, state
