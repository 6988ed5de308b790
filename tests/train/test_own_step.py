"""A step of one's own, on batches of any structure and weight, trains as one process does on all of
them at once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from srunddp.errors import ConfigError
from srunddp.train import Callback, Trainer, accuracy
from srunddp.train.data.order import Sequential
from srunddp.train.validate import check_batch_norm
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import OnStep, classes, message, settings, trainer_of

IGNORED = -100
WORDS = 11
BOUND = 1e-12

pytestmark = pytest.mark.usefixtures("one_thread")


class Sentences(torch.utils.data.Dataset[Tensor]):
    """Lists of words, of 2 and of 2001 words in turn: of two ranks the one has a thousand times the
    other's targets.
    """

    def __init__(self, count: int = 12, long: int = 2001) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = itertools.cycle((long, 2))
        self.sentences = [
            torch.randint(WORDS, (next(lengths),), generator=generator) for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> Tensor:
        return self.sentences[index]


def padded(sentences: list[Tensor]) -> dict[str, Tensor]:
    """``words`` and ``labels`` of shape (sentences, words - 1)."""
    whole = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=IGNORED)
    return {"words": whole[:, :-1].clamp(min=0), "labels": whole[:, 1:]}


def masked(sentences: list[Tensor]) -> dict[str, Tensor]:
    """The same without labels of the short ones."""
    batch = padded(sentences)
    if batch["labels"].shape[1] > 1:
        return batch
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}


def tokens(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def next_word(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    scores = model(batch["words"]).transpose(1, 2)
    return nn.functional.cross_entropy(scores, batch["labels"], ignore_index=IGNORED), scores


def right_words(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.argmax(1) == labels).sum()


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)).double()


def train_by_tokens(world: LocalWorld, collate: Any, accumulation: int) -> Any:
    model = language_model()
    config = settings(epochs=2, batch_size=1, gradient_accumulation_steps=accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    metrics = {"right": right_words}
    trainer = Trainer(
        model, optimizer, None, config, world=world, step=next_word, weight=tokens, metrics=metrics
    )
    data = Sentences()
    records = trainer.fit(
        data, data, order=Sequential(len(data)), collate=collate, val_collate=collate
    )
    return model.state_dict(), [(record.train, record.val) for record in records]


def train_at_once(collate: Any, sentences: int) -> Any:
    """Alone, each step on all its sentences at once: the mean that the loss itself takes."""
    model = language_model()
    data = Sentences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _, start in itertools.product(range(2), range(0, len(data), sentences)):
        optimizer.zero_grad()
        batches = [collate([data[index]]) for index in range(start, start + sentences)]
        sums = [next_word(model, batch)[0] * tokens(batch) for batch in batches if tokens(batch)]
        loss = sum(sums) / sum(map(tokens, batches))
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        batches = [collate([data[index]]) for index in range(len(data))]
        kept = [batch for batch in batches if tokens(batch)]
        mean = sum(next_word(model, batch)[0] * tokens(batch) for batch in kept) / sum(
            map(tokens, kept)
        )
    return model.state_dict(), float(mean)


@pytest.mark.parametrize("collate", [padded, masked])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 1), (2, 2), (3, 1)])
def test_means_are_over_all_weights(
    collate: Any, ranks: int, accumulation: int, tmp_path: Path
) -> None:
    """Weights of 1 to 2000, or 0, between ranks: gradients and figures are those of one process,
    none is NaN.
    """
    weights, loss = train_at_once(collate, ranks * accumulation)
    for state, figures in run_ranks(ranks, tmp_path, train_by_tokens, collate, accumulation):
        for name, expected in weights.items():
            torch.testing.assert_close(state[name], expected, rtol=BOUND, atol=BOUND)
        assert figures[-1][1]["loss"] == pytest.approx(loss, rel=BOUND)
        assert all(value == value for each in figures for part in each for value in part.values())
        assert 0.0 < figures[-1][1]["right"] < 1.0


class OwnLoss(nn.Module):
    """Returns its loss, as a model of Hugging Face does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layer(inputs)
        return {"logits": logits} | (
            {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        )


def named(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    inputs, labels = torch.utils.data.default_collate(samples)
    return {"inputs": inputs, "labels": labels}


def test_a_model_that_returns_its_loss_needs_no_wrapper() -> None:
    figures = []
    for loss_function, model, collate in (
        (None, OwnLoss(), named),
        (nn.CrossEntropyLoss(), nn.Linear(8, 4), None),
    ):
        layer: Any = getattr(model, "layer", model)
        with torch.no_grad():
            layer.weight.fill_(0.1)
            layer.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(
            model,
            optimizer,
            loss_function,
            settings(),
            world=LocalWorld(),
            metrics={"accuracy": accuracy},
        )
        (record,) = trainer.fit(classes(20), classes(12), collate=collate, val_collate=collate)
        figures.append((record.train, record.val, trainer.evaluate(classes(12), collate=collate)))
    assert figures[0] == figures[1]
    assert figures[0][1] == figures[0][2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a batch that is a list of 2 parts, and no loss function and no step"),
        (
            {"step": lambda model, batch: model(batch[0])},
            "the loss is a Tensor of shape .4, 4.; expected a tensor of no",
        ),
        ({"step": lambda model, batch: 1.0}, "the loss is a float; expected"),
        (
            {"loss_function": nn.CrossEntropyLoss(), "step": lambda model, batch: None},
            "a loss function and a step",
        ),
        ({"loss_function": nn.MSELoss(reduction="sum")}, "reduction='sum'"),
        ({"loss_function": partial(nn.functional.mse_loss, reduction="sum")}, "reduction='sum'"),
    ],
)
def test_a_step_without_a_mean_loss_is_refused(options: dict[str, Any], words: str) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"({words}).* -> "):
        Trainer(model, optimizer, config=settings(), world=LocalWorld(), **options).fit(classes(8))


def test_losses_that_are_means_by_another_name_are_taken() -> None:
    """KLDivLoss's mean over samples; and any loss's own attribute of that name."""
    own: Any = nn.Linear(4, 4)
    own.reduction = "none"
    for loss in (nn.KLDivLoss(reduction="batchmean"), lambda outputs, targets: own(outputs).mean()):
        trainer_of(loss_function=loss)


def test_several_optimizers_step_with_their_own_schedulers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    matrix, *others = model.parameters()  # Muon is for matrices
    optimizers = [torch.optim.Muon([matrix], lr=0.1), torch.optim.AdamW(others, lr=0.2)]
    schedulers = [
        lambda optimizer, size=size: StepLR(optimizer, size, gamma=0.5) for size in (1, 2)
    ]
    before = [parameter.clone() for parameter in model.parameters()]
    trainer_of(model=model, optimizer=optimizers, scheduler=schedulers).fit(classes(12))
    assert not any(map(torch.equal, before, model.parameters()))
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.1 / 8, 0.2 / 2]


def refusals() -> dict[str, Any]:
    model = nn.Linear(8, 4)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    frozen = nn.Linear(8, 4).requires_grad_(False)
    wrapped = nn.parallel.DistributedDataParallel
    return {
        "a parameter in two optimizers": (
            model,
            [own, torch.optim.SGD(model.parameters(), lr=0.1)],
            {},
        ),
        "2 schedulers for 1 optimizers": (
            model,
            own,
            {"scheduler": [lambda each: StepLR(each, 1)] * 2},
        ),
        "no parameter requires a gradient": (
            frozen,
            torch.optim.SGD(frozen.parameters(), lr=0.1),
            {},
        ),
        "a list for an optimizer": (model, [[own]], {}),
        "the optimizer LBFGS; expected": (model, torch.optim.LBFGS(model.parameters()), {}),
        "a model in DistributedDataParallel": (wrapped.__new__(wrapped), own, {}),
    }


@pytest.mark.parametrize("words", refusals())
def test_what_cannot_be_trained_is_refused_at_once(words: str) -> None:
    model, optimizer, options = refusals()[words]
    assert words in message(lambda: trainer_of(model=model, optimizer=optimizer, **options))


@pytest.mark.parametrize(("steps", "epochs"), [(5, 3), (4, 2), (1, 1)])
def test_max_steps_ends_the_run_whatever_epochs_says(steps: int, epochs: int) -> None:
    made: list[int] = []
    trainer = trainer_of(OnStep(lambda _, step: made.append(step)), max_steps=steps, epochs=1)
    records = trainer.fit(classes(8))
    assert made == list(range(1, steps + 1))
    assert [record.epoch for record in records] == list(range(1, epochs + 1))
    assert trainer.total_steps == steps


class Centre(nn.Module):
    """A loss with a state that no gradient reaches, as a running centre has."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets)


class Counter(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_losses_and_callbacks_keep_their_state(tmp_path: Path) -> None:
    for epochs in (1, 2):
        counter = Counter()
        loss = Centre()
        options: dict[str, Any] = {
            "epochs": epochs,
            "output_dir": str(tmp_path),
            "resume": "auto",
        }
        trainer_of(counter, loss_function=loss, **options).fit(classes(8))
        assert (counter.steps, int(loss.calls)) == (2 * epochs, 2 * epochs)


def test_frozen_modules_stay_in_evaluation_mode() -> None:
    """A backbone's running statistics do not move; a model that is in that mode as a whole is
    trained.
    """
    backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    model = nn.Sequential(backbone, nn.Linear(8, 4), nn.Dropout(0.5))
    trainer_of(model=model, epochs=2).fit(classes(8), classes(8))
    assert not backbone[1].training
    assert model[2].training
    assert torch.equal(backbone.get_buffer("1.running_mean"), torch.zeros(8))
    whole = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval()
    trainer_of(model=whole).fit(classes(8))
    assert not torch.equal(whole.get_buffer("1.running_mean"), torch.zeros(4))


def test_a_checkpoints_learning_rate_goes_before_the_scripts(tmp_path: Path, capsys: Any) -> None:
    for epochs, lr in ((1, 0.1), (2, 0.001)):
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        trainer_of(
            model=model, optimizer=optimizer, epochs=epochs, output_dir=str(tmp_path), resume="auto"
        ).fit(classes(8))
    assert optimizer.param_groups[0]["lr"] == 0.1
    words = "lr of SGD: the checkpoint's 0.1 is used, not the script's 0.001"
    assert words in capsys.readouterr().err


def test_what_trainer_logs_is_in_metrics_jsonl(tmp_path: Path) -> None:
    class OnStart(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            trainer.log({"norm": 0.0})

    callback = OnStep(lambda trainer, step: trainer.log({"norm": float(step)}))
    trainer_of(OnStart(), callback, output_dir=str(tmp_path)).fit(classes(8))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["norm"] for line in lines if line["kind"] == "log"] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("samples", "changes", "words"),
    [
        (20, {}, "the length of the training data was 16 samples and is 20"),
        (16, {"seed": 7}, "the order of the"),
    ],
)
def test_changed_data_are_refused_unless_wanted(
    samples: int, changes: Any, words: str, tmp_path: Path
) -> None:
    trainer_of(output_dir=str(tmp_path)).fit(classes(16))
    options = {"output_dir": str(tmp_path), "resume": "auto", "epochs": 2, **changes}
    with pytest.raises(ConfigError, match=f"{words}.* -> .*resume_changed_data=true"):
        trainer_of(**options).fit(classes(samples))
    assert len(trainer_of(**options, resume_changed_data=True).fit(classes(samples))) == 2


def test_collate_is_not_taken_for_the_evaluation_in_silence() -> None:
    """It may mix samples, as MixUp does."""
    mixed: list[int] = []
    plain = torch.utils.data.default_collate

    def mix(samples: list[Any]) -> Any:
        mixed.append(len(samples))
        return plain(samples)

    with pytest.raises(
        ConfigError,
        match=r"collate and val_data, without val_collate; .* -> pass val_collate=collate",
    ):
        trainer_of().fit(classes(8), classes(12), collate=mix)
    trainer_of().fit(classes(8), classes(12), collate=mix, val_collate=plain)
    assert sum(mixed) == 8


def test_batchnorm_of_one_sample_is_refused_at_the_start() -> None:
    """At the end of the first epoch torch would raise an error."""
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    with pytest.raises(
        ConfigError,
        match=r"a rank one sample: 9 samples, 1 ranks, batch_size 4; .* -> set dataloader",
    ):
        trainer_of(model=model).fit(classes(9))
    for samples in (9, 10, 11):  # 2 ranks: the last step has 1, 2 or 3 samples
        with pytest.raises(ConfigError, match=f"{samples} samples, 2 ranks"):
            check_batch_norm(model, samples, LocalWorld(world_size=2), settings())
    check_batch_norm(model, 12, LocalWorld(world_size=2), settings())
    positions = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 8, padding=1), nn.BatchNorm1d(4), nn.Flatten()
    )
    trainer_of(model=positions).fit(classes(9))
