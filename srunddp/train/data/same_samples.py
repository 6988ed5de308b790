"""Checks that all ranks have the same samples, and that a resumed run still has the samples with
which it began.
"""

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
# Used instead of an epoch's number if the samples are the same in each epoch.
ANY_EPOCH = -1

_NO_SAMPLES = Fingerprint(0, 0, (), ())


@dataclass(frozen=True)
class _Record:
    """The fingerprint of some samples, and the epoch from which they are.

    Attributes:
        epoch: The epoch of the samples; :data:`ANY_EPOCH` if they are the same in each epoch.
        fingerprint: The fingerprint of the samples.
    """

    epoch: int
    fingerprint: Fingerprint


class SameSamples:
    """Compares some samples of one data set between ranks, and with those of an earlier run.

    A data set is not compared if it draws random numbers from a generator of its own, instead of
    the global generators of torch, Python or numpy: its samples differ in each reading.

    Attributes:
        is_done: Whether samples of later epochs need not be compared, because comparing them would
            show nothing new.
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
        """Compare the parts of the data set that are in memory; a collective.

        Args:
            world: The ranks, all of which create this.
            name: The name of the data in messages.
            log: Prints a line for the user.
            is_stream: Whether the data is iterable. Iterable data is compared in each epoch,
            because
                its first samples are read there anyway.
            in_memory: The fingerprint of the parts that are in memory; None if there is none.

        Raises:
            ConfigError: The data differs between ranks.
        """
        self.is_done = False
        self._world = world
        self._name = name
        self._log = log
        self._is_stream = is_stream
        self._in_memory = in_memory
        self._is_random = False
        self._has_told = False
        # The fingerprints of the samples that the run began with: of those in memory, with the key
        # _IN_MEMORY, and of those that were read, with the key _READ. A checkpoint contains them.
        self._began_with: dict[str, _Record] = {}
        if compare(world, in_memory) is Agreement.DIFFERENT:
            raise self._error()
        if in_memory:
            self._began_with[_IN_MEMORY] = _Record(ANY_EPOCH, in_memory)

    def checked(
        self, start: Callable[[Look], Iterator[MicroBatch]], epoch: int
    ) -> Iterator[MicroBatch]:
        """Begin an iteration, check that the samples are the same on all ranks, and return its
        micro-batches; a collective.

        Afterwards ``is_done`` says whether later epochs need not be checked.

        Args:
            start: Begins the iteration, whose first micro-batch has a fingerprint. It is called
                again if fingerprints differ, to see whether the samples differ in each reading.
            epoch: The epoch of the samples; ``ANY_EPOCH`` if they are the same in each epoch.

        Raises:
            ConfigError: The samples differ between ranks.
        """
        parts, fingerprint = _first(start, Look.ONCE)
        before = self._before(_READ, epoch, fingerprint)
        agreement = compare(self._world, fingerprint, before)
        if agreement in (Agreement.DIFFERENT, Agreement.CHANGED):
            # That samples differ between ranks is an error only if each rank reads the same samples
            # every time. Data that is augmented by a generator of its own differs between readings
            # too.
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
        """Return, as plain values, the fingerprints of the samples that the run began with.

        A fingerprint with which newer samples could not be compared, because it was from another
        epoch, is replaced by that of the newer samples.
        """
        return {
            source: {"epoch": record.epoch, **record.fingerprint.state_dict()}
            for source, record in self._began_with.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the samples in memory with those of a state, and let :meth:`checked` compare
        those that are read later. Rank 0 prints a line if samples differ.

        Args:
            state: The return value of ``state_dict()``; empty if it is not known.
        """
        for source, each in state.items():
            self._began_with[source] = _Record(each["epoch"], Fingerprint.from_state(each))
        before = self._before(_IN_MEMORY, ANY_EPOCH, self._in_memory)
        if self._in_memory and before and not self._in_memory.is_like(before):
            self._tell_of_change()
        # Samples that this process has read before were not compared with this state: compare
        # samples again, unless they differ in each reading.
        if _READ in state:
            self.is_done = self._is_random

    def _before(self, source: str, epoch: int, now: Fingerprint | None) -> Fingerprint | None:
        """Return the fingerprint with which the run began; None if it cannot be compared with
        ``now``, because it is from another epoch or has another number of samples.

        Of a stream, at most the samples of one micro-batch have a fingerprint, so after a resume
        their number may be different.
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
    """Begin an iteration; return all of its micro-batches, and the fingerprint of the first one.

    Without any micro-batch the fingerprint is that of no samples.
    """
    parts = start(look)
    first = list(itertools.islice(parts, 1))
    fingerprint = first[0].fingerprint if first else _NO_SAMPLES
    return itertools.chain(first, parts), fingerprint
