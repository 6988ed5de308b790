"""How samples become weighted batches, in the rank or in a worker, and how torch's DataLoader is
started.
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
"""``weight(batch)``: by how much the mean loss of a batch counts; of what collate made, on the
host.
"""


def start(
    loader: DataLoader[Any], signals: Sequence[str], sent: Mapping[str, Any]
) -> Iterator[MicroBatch]:
    """Begin to iterate over torch's loader; its workers start at once.

    Args:
        loader: Torch's, of micro-batches.
        signals: Names without SIG, which the workers do not get.
        sent: What workers that are not forked are sent by pickle, by its name.

    Raises:
        ConfigError: One of these cannot be sent.
    """
    try:
        with warnings.catch_warnings():
            # torch warns and then raises. What cannot be sent, and how to mend it, is said below.
            warnings.filterwarnings("ignore", "Got pickle error")
            return iterate(loader, signals)
    except Exception:
        # Pickle's error says that a lambda cannot be pickled, but not which argument it came from.
        # Other errors are raised as they are.
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
    """Return a micro-batch with a batch for its samples, and with its weight.

    Args:
        part: With a list of samples; without samples it is returned as it is.
        collate: Makes a batch of them; None where they are a batch already.
        weight: By how much the batch counts; None for the number of samples.
    """
    # A resume skips it: what was given out before must not be collated again, which may take long.
    if part.samples is None:
        return part
    if collate:
        batch = collate(part.samples)
    else:
        batch = part.samples
    value: float | str = float(part.own)
    # Samples that stand in for another rank's count there, and not here: their weight stays 0.
    if weight is not None and part.own:
        value = _number(weight(batch))
    return part._replace(samples=batch, weight=value)


def _number(value: Any) -> float | str:
    """Return a weight as a number, or as a text what was found instead.

    It may run in a worker: an error that is raised here would reach the rank as a traceback.
    """
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        return float(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
