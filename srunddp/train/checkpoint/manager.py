"""A run's checkpoints: written by rank 0 beside training, and which one a run goes on from."""

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

# Bytes up to which a tensor of a loaded checkpoint is copied out of the file: a page.
_SMALL = 4096
# Bytes of one broadcast. Ranks without the file hold one such piece beside what they have received.
_PIECE = 1 << 22


class CheckpointManager:
    """The checkpoints of one run, in a folder; all ranks make one and call its methods, after the
    same steps.

    Rank 0's state is saved, with the random states of all ranks:

        manager = CheckpointManager("checkpoints", world)
        if state := manager.load("auto"):
            model.load_state_dict(state["model"])
            manager.restore_rng(state, seed=0)

    Attributes:
        scores: of the steps that have one; less is better. They are saved and loaded, too.
        loaded: the file that ``load()`` has read.
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
        """Make the folder, and see whether it can be written, now rather than after the first
        epoch.

        Args:
            folder: of this run alone, which rank 0 sees.
            world: from ``srunddp.init()``.
            keep_last: so many of the newest stay, and always the one that was saved last.
            keep_best: so many of the best stay, too; ``best.pt`` is a link to the best.
            log: called on rank 0 with lines to the user; None logs them as warnings.

        Raises:
            ConfigError: rank 0 cannot write there.
            PeerError: the same, on the other ranks.
        """
        self.loaded: Path | None = None
        self._world = world
        self._log = log or partial(logging.getLogger("srunddp").warning, "srunddp: %s")
        path = Path(expanded(folder, "the folder of checkpoints"))
        self._directory = CheckpointDirectory(path, keep_last, keep_best)
        self.scores = self._directory.scores
        self._writer = AsyncCheckpointer(self._directory, self._log)
        # On a CPU load_state_dict() may keep a tensor as it is, so that an optimizer would go on in
        # a mapped file that rank 0 deletes later. To a GPU they are copied.
        self._mmap = world.device.type != "cpu"
        on_rank_zero(world, self._make_folder)

    def check(self, state: Mapping[str, Any]) -> None:
        """Find out before the first step whether a state can be saved.

        It costs no more than its plain values.

        Args:
            state: of rank 0, the others' is not used.

        Raises:
            CheckpointError: it holds something else than tensors and plain values; PeerError on the
                other ranks.
        """
        on_rank_zero(self._world, lambda: check_savable(emptied(state), self._directory.folder))

    def save(
        self, step: int, state: Mapping[str, Any], *, score: float | None = None, wait: bool = False
    ) -> Path:
        """Copy the state and write it beside training.

        A checkpoint is left out where the one before is still being written. A line says that, and
        what the disk refuses; training goes on.

        Args:
            step: how many optimizer steps are done.
            state: tensors and plain values; of rank 0, the others' is not used.
            score: how good the model is; less is better.
            wait: until the one before and this one are written; for the last one, and before a
                stop.

        Returns:
            The path, which exists once the checkpoint is written.

        Raises:
            CheckpointError: this one or the one before cannot be loaded again, or another run has
                begun in this folder; with ``wait``, this one could not be written. PeerError then,
                on the other ranks.
        """
        # With ``wait`` none may be left out, and so the one before has to be written first. All
        # ranks wait where no time limit counts: a gather below would meet one.
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
        """Wait until nothing is being written any more; no time limit counts meanwhile.

        Returns:
            Whether the latest checkpoint was written, rather than left out.

        Raises:
            CheckpointError: it could not be written; PeerError on the other ranks.
        """
        return on_rank_zero(self._world, self._writer.wait)

    def report(self) -> list[Path]:
        """Return the files that have been written since the last call; none on other ranks.

        What could not be written is said.
        """
        return [self.path(step) for step in self._writer.poll()]

    def load(self, resume: str = "auto") -> dict[str, Any] | None:
        """Return what ``save()`` was given, tensors on the CPU, and the manager's own key
        ``srunddp``; None for a new run.

        What runs that began earlier save there is refused from then on. Ranks that do not see rank
        0's file are sent it. On a GPU the tensors stay in the file until they are used: copy those
        that are not moved to the GPU.

        Args:
            resume: ``auto`` for the newest whole one, if any; a checkpoint's path, after which
                later ones are set aside; or ``never``. A job that Slurm has started again takes the
                newest one in any case.

        Raises:
            ConfigError: there are checkpoints, and ``resume`` is ``never``; or later ones cannot be
                set aside.
            CheckpointError: the one with this path is not whole, or not a manager's. PeerError on
                the other ranks.
        """
        state: dict[str, Any] | None = None

        def choose() -> tuple[str, str, int] | None:
            nonlocal state
            path, state = self._choose(resume)
            if state:
                return (str(path.absolute()), last_line(path), path.stat().st_size)
            return None

        # One rank chooses, as a listing of the folder may differ between nodes for seconds (NFS).
        chosen = on_rank_zero(self._world, choose)
        if not chosen:
            return None
        name, line, size = chosen
        path = Path(name)
        self.loaded = path
        if self._world.rank:
            state = self._same(path, line)
        # The broadcasts are collectives: if one rank lacks the file, all take part.
        is_lacking = state is None
        if any_rank(self._world, is_lacking):
            sent = _send_checkpoint(self._world, path, size, lacking=is_lacking)
            if is_lacking:
                state = sent
        assert state is not None
        # A tensor in a mapped file, or in the bytes of a broadcast, keeps all of them in memory:
        # for the step counters of Adam, which stay on the CPU, that would be the whole checkpoint.
        state = map_tensors(state, _cloned_if_small, lambda value: value)
        self.scores.update(state[OWN]["scores"])
        event("resumed", state[OWN]["step"])
        return state

    def restore_rng(self, state: Mapping[str, Any], seed: int) -> None:
        """Go on with the random states of a loaded state.

        A rank of which it has none, as there are more ranks now, begins with its own.

        Args:
            state: From :meth:`load`.
            seed: Of those that begin.
        """
        own = state[OWN]
        rng.restore(own["random"], self._world, seed + own["step"])

    def path(self, step: int) -> Path:
        """Return where a checkpoint is, or would be.

        Args:
            step: after which it was saved.
        """
        return self._directory.path(step)

    def _make_folder(self) -> None:
        with self._writing():
            self._directory.folder.mkdir(parents=True, exist_ok=True)
            # Some file systems let a file be made and refuse its first block: a quota, a full disk.
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
        # Neither a person nor a script has said resume= for this start: Slurm has started the job
        # again, or --restarts the script, by the command line of the first start.
        by_slurm = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        restarted = restart_count() > 0 or by_slurm
        if resume == "never" and not restarted:
            self._refuse_earlier_run()
        # Before the newest is looked for: what a run that began earlier writes after that would be
        # newer than the one that this run goes on from. From here on it is refused.
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
                f"{self.path(steps[-1])} is there, of an earlier run, and resume is never",
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
        """Return what this rank sees by that path, if it is rank 0's file; else None."""
        # A folder of that name may be another one on each node, as below /tmp.
        with suppress(CheckpointError):
            if last_line(path) == line:
                return load_checkpoint(path, mmap=self._mmap)
        return None


def _send_checkpoint(
    world: World, path: Path, size: int, *, lacking: bool
) -> dict[str, Any] | None:
    """Send rank 0's file to the ranks that lack it; all ranks call this.

    Args:
        world: The ranks.
        path: Of the file, on rank 0.
        size: Its bytes.
        lacking: Whether this rank lacks it.

    Returns:
        Its content where it was lacking, else None. The bytes are kept once: the tensors lie in
        them.
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
            "no CheckpointManager has saved it",
            expected="a checkpoint of this version of srunddp",
            hint="load its model in the script by srunddp.train.load_checkpoint() instead",
            where=str(path),
        )
    return path, state
