"""Turns samples into weighted batches, in the rank or in a worker, and starts
torch's DataLoader.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader

from srunddp.errors import ConfigError
from srunddp.train.data.sampler import MicroBatch
from srunddp.train.preemption.signals import iterate

Collate = Callable[[list[Any]], Any]
Weight: TypeAlias = Callable[[Any], float | Tensor]
"""``weight(batch)``: how much the mean loss of a batch counts. It gets the output of collate, on
the host.
"""


def start(
    loader: DataLoader[Any], signals: Sequence[str], sent: Mapping[str, Any]
) -> Iterator[MicroBatch]:
    """Begin to iterate over torch's loader; its workers start at once.

    Args:
        loader: torch's loader, whose items are micro-batches.
        signals: Names, without SIG, of signals that the workers must not get.
        sent: The objects, by name, that workers get by pickle if they are not forked.

    Raises:
        ConfigError: One of these objects cannot be pickled.
    """
    try:
        with warnings.catch_warnings():
            # Before torch raises the error of pickle, it warns. Hide the warning: the error of
            # _check_pickled() says what cannot be sent, and gives a hint.
            warnings.filterwarnings("ignore", "Got pickle error")
            return iterate(loader, signals)
    except Exception:
        # Find out which object cannot be pickled: the error of pickle says, for example, that a
        # lambda cannot be pickled, but not which argument it was. Other errors are raised again.
        context = loader.multiprocessing_context
        if context is not None and context.get_start_method() != "fork":
            _check_pickled(sent, context.get_start_method())
        raise


def _check_pickled(sent: Mapping[str, Any], method: str) -> None:
    for name, value in sent.items():
        try:
            ForkingPickler.dumps(value)
        except Exception as error:
            kind = getattr(value, "__qualname__", type(value).__qualname__)
            raise ConfigError(
                f"{name}, {kind}, cannot be sent to loader workers by pickle: {error}",
                expected=f"what pickle takes, as workers start by {method}",
                hint=(
                    "define it at the top level of a module, or set multiprocessing_context=fork or"
                    " num_workers=0"
                ),
            ) from error


def collated(part: MicroBatch, collate: Collate | None, weight: Weight | None) -> MicroBatch:
    """Collate the samples of a micro-batch, and set its weight.

    Args:
        part: A micro-batch with a list of samples; one without samples is returned as it is.
        collate: Makes a batch from the samples; None if they are a batch already.
        weight: Returns how much the batch counts; None for the number of samples.
    """
    # Do not collate a micro-batch that a resume skips, because that might take long.
    if part.samples is None:
        return part
    if collate:
        batch = collate(part.samples)
    else:
        batch = part.samples
    value: float | str = float(part.own)
    # If own is 0, the samples are stand-ins, which count on the rank that they belong to: keep
    # their weight 0.
    if weight is not None and part.own:
        value = _number(weight(batch))
    return part._replace(samples=batch, weight=value)


def _number(value: Any) -> float | str:
    """Return a weight as a number, or a text that says what was found instead.

    This may run in a worker, where an exception would reach the rank as a traceback.
    """
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        return float(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
