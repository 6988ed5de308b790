"""Whether all ranks were given the same samples, and those that a run began with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from srunddp.errors import ConfigError, Scope
from srunddp.train.data.fingerprint import Agreement, Fingerprint, Look, compare
from srunddp.train.data.sampler import MicroBatch
from srunddp.train.world import World

_IN_MEMORY = "in_memory"
_READ = "read"
# In place of an epoch: the samples are the same in each.
ANY_EPOCH = -1

_NO_SAMPLES = Fingerprint(0, 0, (), ())


@dataclass(frozen=True)
class _Record:
    """Samples that were looked at.

    Attributes:
        epoch: That they are of; :data:`ANY_EPOCH` where they are the same in each.
        fingerprint: What they come to.
    """

    epoch: int
    fingerprint: Fingerprint


class SameSamples:
    """Looks at some samples of one data set, and compares them.

    A data set that draws random numbers of its own, by another generator than torch's, Python's or
    numpy's global one, is not compared: its samples are others in each reading.
    """

    def __init__(
        self,
        world: World,
        name: str,
        log: Callable[[str], None],
        *,
        is_stream: bool,
        in_memory: Fingerprint | None,
    ) -> None:
        """Compare what is known without reading; a collective.

        Args:
            world: All of its ranks make this.
            name: Of the data in messages.
            log: Prints a line for the user.
            is_stream: The data is iterable. It is looked at in each epoch, as its first samples are
                read there anyway.
            in_memory: What is known of the data without reading.

        Raises:
            ConfigError: Ranks have other data.
        """
        # Whether reading more samples could show nothing new.
        self.is_done = False
        self._world = world
        self._name = name
        self._log = log
        self._is_stream = is_stream
        self._in_memory = in_memory
        self._is_random = False
        self._has_told = False
        # By _IN_MEMORY and _READ: what the run began with, which a checkpoint holds.
        self._began_with: dict[str, _Record] = {}
        if compare(world, in_memory) is Agreement.DIFFERENT:
            raise self._error()
        if in_memory:
            self._began_with[_IN_MEMORY] = _Record(ANY_EPOCH, in_memory)

    def checked(
        self, start: Callable[[Look], Iterator[MicroBatch]], epoch: int
    ) -> Iterator[MicroBatch]:
        """Return the micro-batches of an iteration, once they are known to be of the same samples
        on all ranks; a collective.

        Afterwards ``is_done`` says whether there is nothing more to be seen in another epoch.

        Args:
            start: Begins the iteration, whose first micro-batch has a fingerprint. It is called
                again where something differs, to see whether the samples are others each time.
            epoch: That the samples are of; or ``ANY_EPOCH``.

        Raises:
            ConfigError: Ranks differ.
        """
        parts, fingerprint = _first(start, Look.ONCE)
        before = self._before(_READ, epoch, fingerprint)
        agreement = compare(self._world, fingerprint, before)
        if agreement in (Agreement.DIFFERENT, Agreement.CHANGED):
            # Other samples are an error only if a rank reads the same ones each time. Data that is
            # augmented at random by a generator of its own differs between readings as well.
            parts, repeated = _first(start, Look.REPEATEDLY)
            again = compare(self._world, repeated)
            if agreement is again is Agreement.DIFFERENT:
                raise self._error()
            self._is_random = agreement is Agreement.DIFFERENT or again is Agreement.UNKNOWN
        if agreement is Agreement.UNKNOWN or self._is_random:
            self.is_done = True
        elif fingerprint and fingerprint.samples:
            self.is_done = not self._is_stream
            if before is None:
                self._began_with[_READ] = _Record(epoch, fingerprint)
            if agreement is Agreement.CHANGED:
                self._tell_of_change()
        return parts

    def state_dict(self) -> dict[str, Any]:
        """Return the samples that the run began with, or those of this epoch, as plain values."""
        return {
            source: {"epoch": record.epoch, **record.fingerprint.state_dict()}
            for source, record in self._began_with.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Say so if the samples are not those of a state, now or once they are read.

        Args:
            state: From ``state_dict()``; empty where that is not known.
        """
        for source, each in state.items():
            self._began_with[source] = _Record(each["epoch"], Fingerprint.from_state(each))
        before = self._before(_IN_MEMORY, ANY_EPOCH, self._in_memory)
        if self._in_memory and before and not self._in_memory.is_like(before):
            self._tell_of_change()
        # The samples that this process has read were compared with those of its own beginning: they
        # are to be looked at again, except where they are other ones each time.
        if _READ in state:
            self.is_done = self._is_random

    def _before(self, source: str, epoch: int, now: Fingerprint | None) -> Fingerprint | None:
        """Return what the run began with; None where it cannot be compared with what is read now.

        Of a stream no more samples are looked at than are in a micro-batch, and those of a resume
        are others than those of an epoch's start.
        """
        record = self._began_with.get(source)
        if record is None or now is None:
            return None
        is_comparable = (record.epoch, record.fingerprint.samples) == (epoch, now.samples)
        return record.fingerprint if is_comparable else None

    def _tell_of_change(self) -> None:
        if self._world.rank == 0 and not self._has_told:
            self._log(
                f"the samples of {self._name} are not those that the run began with; a run with"
                " other data needs a folder of its own"
            )
        self._has_told = True

    def _error(self) -> ConfigError:
        hint = "split and shuffle it by a fixed seed, and sort what comes from a set"
        if self._is_stream:
            hint = f"pass sharded=True if the stream splits itself by rank; else {hint}"
        return ConfigError(
            f"the samples of {self._name} differ between ranks",
            expected="the same data on all ranks, each of which gets its part",
            hint=hint,
            scope=Scope.JOB,
        )


def _first(
    start: Callable[[Look], Iterator[MicroBatch]], look: Look
) -> tuple[Iterator[MicroBatch], Fingerprint | None]:
    """Begin an iteration, and return it with the fingerprint of its first micro-batch."""
    parts = start(look)
    first = list(itertools.islice(parts, 1))
    fingerprint = first[0].fingerprint if first else _NO_SAMPLES
    return itertools.chain(first, parts), fingerprint
