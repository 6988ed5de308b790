"""Any number of ranks trains as one does, and goes on from what another number has left."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.train.conftest import results_of
from tests.train.exactness import PART

# The figures are about 1: sums in another order differ by some last digits, of 53 and of 24 bits.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}
SPLITS = [(4, 16, 1), (1, 16, 4), (4, 4, 4)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return results_of("exactness.py", tmp_path_factory.mktemp("exactness"), timeout=300)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("split", SPLITS)
def test_four_ranks_with_accumulation_train_as_one_rank(
    results: Any, dtype: torch.dtype, split: tuple[int, int, int]
) -> None:
    """Losses and weights after 50 steps."""
    ((serial, weights, losses, _),) = results["equality"][dtype, 1, 64, 1]
    assert len(losses) == 50
    for (record,), state, *_ in results["equality"][(dtype, *split)]:
        assert record.train["loss"] == pytest.approx(serial[0].train["loss"], rel=0, abs=BOUNDS[dtype])
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_step_s_loss_is_that_of_one_rank(results: Any, dtype: torch.dtype) -> None:
    ((_, _, alone, _),) = results["equality"][dtype, 1, 64, 1]
    by_rank = [losses for _, _, losses, _ in results["equality"][dtype, 4, 16, 1]]
    for step, losses in enumerate(zip(alone, *by_rank, strict=True)):
        if step > 0:
            assert sum(losses[1:]) / 4 == pytest.approx(losses[0], rel=0, abs=BOUNDS[dtype])


@pytest.mark.parametrize("kind", ["resumed", "streams"])
@pytest.mark.parametrize("ranks", [2, 6])
def test_another_number_of_ranks_sees_the_rest_of_the_epoch_once(results: Any, kind: str, ranks: int) -> None:
    before, after = results[kind][ranks]
    seen = list(itertools.chain(*(samples[step] for samples in before for step in (1, 2, 3))))
    rest = list(itertools.chain(*(step for samples in after for step in samples.values())))
    assert len(seen) == 3 * 4 * 2, "the checkpoint was in the middle of the epoch"
    assert [min(samples) for samples in after] == [4] * ranks
    assert sorted(seen + rest) == list(range(PART))
