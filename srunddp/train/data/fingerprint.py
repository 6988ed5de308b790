"""Short fingerprints of the numbers in a few samples, by which ranks compare their data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum, IntEnum
from typing import Any

import numpy
import torch
from torch import Tensor

from srunddp.train.rng import seeded
from srunddp.train.world import World, all_gather_ints, all_reduce_max

# The most averages per array. More than one are needed, because a single average of an image does
# not change with the order of its rows. With 16 a fingerprint, which checkpoints contain, has some
# hundred numbers.
_PARTS = 16
# How far averages of equal data may differ, relative to the mean magnitude of the array. Between
# nodes with different processors or numbers of threads, rounding differs, and image libraries
# decode by different code.
_TOLERANCE = 1e-3
# How often samples are read to notice random ones. With an augmentation that changes every second
# reading, such as a flip, 8 readings of one sample are alike in 1 of 128 cases, and 8 readings of
# four samples practically never.
_READINGS = 8


class Look(IntEnum):
    """How samples are read for a fingerprint."""

    NONE = 0
    ONCE = 1
    REPEATEDLY = 2  # to notice a data set that draws its own random numbers


class Agreement(Enum):
    """The result of comparing the ranks' fingerprints."""

    ALIKE = "alike"
    CHANGED = "alike, but not as before"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of some samples.

    Attributes:
        samples: The number of samples.
        whole: A hash of all that must be exactly the same: integers, shapes of arrays, and text.
        averages: The averages of parts of each array of floating-point numbers or bytes.
        allowed: How far each of the averages may differ between equal samples.
    """

    samples: int
    whole: int
    averages: tuple[float, ...]
    allowed: tuple[float, ...]

    def is_like(self, other: Fingerprint) -> bool:
        """Return whether the samples are the same, except for rounding.

        Args:
            other: The fingerprint of another rank, or of an earlier run.
        """
        if (self.whole, len(self.averages)) != (other.whole, len(other.averages)):
            return False
        allowed = map(max, self.allowed, other.allowed)
        return all(
            abs(own - others) <= limit
            for own, others, limit in zip(self.averages, other.averages, allowed, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the fingerprint as plain values, for :meth:`from_state`."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Fingerprint:
        """Create a fingerprint from its state.

        Args:
            state: The return value of ``state_dict()``.
        """
        return cls(
            state["samples"], state["whole"], tuple(state["averages"]), tuple(state["allowed"])
        )


def hashed(value: object) -> int:
    """Return a hash below 2**56, which fits an int64 and is the same on every rank.

    Args:
        value: Bytes, or an object with the same ``repr`` on every rank.
    """
    # Python's own hash() of a string differs between processes, by PYTHONHASHSEED.
    data = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def some_indices(count: int) -> list[int]:
    """Return the indices of the first sample, the last, and two in between.

    Args:
        count: The number of samples; for 0 there are no indices.
    """
    # Use a set, because some of these indices are the same if there are fewer than four samples.
    chosen = {0, count // 3, 2 * count // 3, count - 1}
    return sorted(index for index in chosen if 0 <= index < count)


def look_at(
    read: Callable[[], Iterable[Any]], look: Look, number: int, *, text: bool = False
) -> Fingerprint | None:
    """Read samples, and compute their fingerprint.

    Args:
        read: Reads the samples again at each call. Random numbers that it draws are the same on
            every rank, and later random numbers are not affected.
        look: Whether to read the samples once, or repeatedly to see whether readings differ.
        number: The seed of the random numbers that ``read`` draws.
        text: Whether text counts too, as for :func:`fingerprint_of`.

    Returns:
        The fingerprint; None if the samples differ between readings, or cannot be read.
    """
    try:
        first = _read(read, number, text)
        if look is Look.REPEATEDLY:
            for _ in range(_READINGS - 1):
                if _read(read, number, text) != first:
                    return None
    except Exception:
        # The code of the data set has failed. Do not raise its error here: if an epoch contains the
        # sample, training fails too, with a traceback that makes sense to the user.
        return None
    return first


def _read(read: Callable[[], Iterable[Any]], number: int, text: bool) -> Fingerprint | None:
    with seeded(number):
        return fingerprint_of(read(), text=text)


def fingerprint_of(samples: Iterable[Any], *, text: bool = False) -> Fingerprint | None:
    """Return the fingerprint of samples; None if they cannot be inspected.

    Args:
        samples: The samples, of any structure; they are not changed.
        text: Whether text counts too. Of a text with slashes, such as a path, only the part after
            the last slash counts, because folders may differ between nodes.
    """
    numbers = _Numbers(text)
    count = 0
    try:
        for sample in samples:
            numbers.add(sample)
            count += 1
    except Exception:  # a class of the user may raise anything
        return None
    return Fingerprint(
        count, hashed(numbers.whole), tuple(numbers.averages), tuple(numbers.allowed)
    )


class _Numbers:
    """Collects what a fingerprint is made of from samples.

    Attributes:
        whole: Numbers, hashes and texts that must be exactly the same.
        averages: The averages of parts of arrays.
        allowed: How far each of the averages may differ between equal samples.
    """

    def __init__(self, text: bool) -> None:
        """Create an empty collection.

        Args:
            text: Whether text counts too.
        """
        self._text = text
        self.whole: list[object] = []
        self.averages: list[float] = []
        self.allowed: list[float] = []

    def add(self, value: Any) -> None:
        """Add the numbers in a value.

        Args:
            value: A sample or a part of one; a value of an unknown kind has no numbers.
        """
        match value:
            # Match strings before sequences: the items of a string are strings again, so taking a
            # string apart would never end.
            case str() | bytes() | bytearray():
                if self._text:
                    self._add_text(value)
            case int():
                self.whole.append(int(value))
            case float() | complex():
                self._add_array(numpy.asarray(value))
            case Tensor():
                self._add_tensor(value)
            case _ if _is_array(value):
                self._add_array(numpy.asarray(value))
            case _:
                self._add_parts(value)

    def _add_text(self, value: str | bytes | bytearray) -> None:
        if isinstance(value, str):
            self.whole.append(value.rpartition("/")[2])
        else:
            self.whole.append(hashed(bytes(value)))

    def _add_parts(self, value: Any) -> None:
        match value:
            case Mapping():
                self._add_mapping(value)
            case Sequence():
                self._add_sequence(value)
            case _ if is_dataclass(value):
                self._add_sequence([getattr(value, field.name) for field in fields(value)])
            case _ if hasattr(value, "to_dict"):  # a graph, a TensorDict
                self._add_mapping(value.to_dict())

    def _add_mapping(self, value: Mapping[Any, Any]) -> None:
        # Sort the keys: they may come from a set, whose order differs between processes.
        self._add_sequence([value[key] for key in sorted(value, key=str)])

    def _add_sequence(self, value: Sequence[Any]) -> None:
        if value and all(isinstance(each, float) for each in value):
            self._add_array(numpy.asarray(value))
            return
        self.whole.append(("length", len(value)))
        for each in value:
            self.add(each)

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        if plain.is_floating_point() and plain.dtype is not torch.float64:
            # Convert to float32, because numpy has no bfloat16 and no float8.
            plain = plain.float()
        self._add_array(plain.numpy())

    def _add_array(self, array: numpy.ndarray[Any, Any]) -> None:
        if array.dtype.kind not in "biufcmM":
            self.add(array.tolist())
        elif array.dtype.kind in "fc" or array.dtype == numpy.uint8:
            self.whole.append(array.shape)
            # Use averages, because floating-point numbers and the bytes of a decoded image differ
            # by rounding between nodes. All other numbers must be exactly the same.
            self._add_averages(array.reshape(-1))
        else:
            self.whole += [array.shape, str(array.dtype), hashed(array.tobytes())]

    def _add_averages(self, flat: numpy.ndarray[Any, Any]) -> None:
        if flat.dtype.kind == "c":
            flat = numpy.stack([flat.real, flat.imag], axis=1).reshape(-1)
        if not flat.size:
            return
        parts = numpy.array_split(flat, min(_PARTS, flat.size))
        # Data may contain NaN or infinity, for which numpy would warn.
        with numpy.errstate(all="ignore"):
            averages = [_finite(part.mean(dtype=numpy.float64)) for part in parts]
            magnitudes = [_finite(numpy.abs(part).mean(dtype=numpy.float64)) for part in parts]
        self.averages += averages
        self.allowed += [_TOLERANCE * sum(magnitudes) / len(parts)] * len(parts)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array in memory, a numpy scalar or a PIL image.

    An array in a file, such as one of HDF5, does not count, because it would be read completely.
    """
    kind = type(value)
    is_convertible = hasattr(kind, "__array_interface__") or hasattr(kind, "__array__")
    return is_convertible and hasattr(kind, "tobytes")


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0


def compare(world: World, own: Fingerprint | None, before: Fingerprint | None = None) -> Agreement:
    """Compare the ranks' fingerprints; a collective.

    Args:
        world: The ranks, all of which call this.
        own: This rank's fingerprint; None if it has none to compare.
        before: The fingerprint of the same samples in an earlier run; None if there is none.

    Returns:
        The result, the same on all ranks. It is ``UNKNOWN`` if any rank has no fingerprint, and
        ``CHANGED`` if ranks agree but differ from ``before``.
    """
    if own is None:
        row = [0, 0, 0, 0]
    else:
        row = [1, own.samples, own.whole, len(own.averages)]
    has_changed = bool(own and before and not own.is_like(before))
    rows = all_gather_ints(world, [*row, int(has_changed)])
    if any(not known for known, *_ in rows):
        return Agreement.UNKNOWN
    # Compare the numbers of averages first: the next collective, which compares the averages
    # themselves, needs equally many on all ranks.
    if own is None or any(each[:-1] != row for each in rows):
        return Agreement.DIFFERENT
    if not _averages_are_alike(world, own):
        return Agreement.DIFFERENT
    # Averages differ slightly between ranks, so one rank may see a change that another rank does
    # not see. All ranks must return the same, because the callers decide by it on further
    # collectives.
    if any(changed for *_, changed in rows):
        return Agreement.CHANGED
    return Agreement.ALIKE


def _averages_are_alike(world: World, own: Fingerprint) -> bool:
    """Return whether the averages of all ranks are close enough; a collective.

    All ranks must have the same number of averages.
    """
    count = len(own.averages)
    # Find maximum and minimum by one all-reduce: the minimum of numbers is the negative of the
    # maximum of their negatives.
    negative = [-average for average in own.averages]
    figures = all_reduce_max(world, *own.averages, *negative, *own.allowed)
    greatest = figures[:count]
    least = [-figure for figure in figures[count : 2 * count]]
    allowed = figures[2 * count :]
    return all(
        high - low <= limit for low, high, limit in zip(least, greatest, allowed, strict=True)
    )
