"""The referee's programs: what the plain loop is told, and what the Trainer is told beside that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs
from torch.utils.data import Dataset, TensorDataset

from srunddp.train import Config, DDPConfig, Order, Weighted, accuracy
from tests.train.referee.materials import (
    CLASS_WEIGHTS,
    CLASSES,
    IGNORED,
    SAMPLES,
    STEPS,
    VALIDATION,
    Augmented,
    Complex,
    Counting,
    Distilled,
    DropoutByIndex,
    HeadBySample,
    LanguageModel,
    Named,
    Recurrent,
    ReturnsLoss,
    Rotated,
    Sentences,
    SparseVectors,
    Stream,
    Tempered,
    balanced,
    blocks,
    drawn,
    half_frozen,
    indexed,
    labelled,
    measured,
    network,
    normalised,
    padded,
    partly_labelled,
    regression,
    rotated,
    three_words,
    with_frozen_statistics,
    with_spectral_norm,
)
from tests.train.referee.plain import Figure, Moment, Problem, Schedule, samples_in


@dataclass(frozen=True, kw_only=True)
class Program:
    """A problem, and how the Trainer is told of it.

    What both have under one name is passed on: the number of epochs, the norm of gradients, the
    decay of the average, the schedulers, the changes by callbacks and so on.

    Attributes:
        problem: As the plain loop solves it.
        config: The Trainer's settings that the problem does not say.
        step: The Trainer's; with it there is no loss function.
        returns_loss: The model does, and there is neither a step nor a loss function.
        weight: The Trainer's.
        metrics: The Trainer's, under the names of the problem's figures.
        val_metrics: The same of evaluations alone.
        data: Makes the training data; None for the problem's.
        order: The Trainer's.
        workers: Of each rank, which read its samples.
        cut_by_max_steps: The ranks that begin end regularly, by max_steps, and not by an error.
    """

    problem: Problem
    config: Config = field(default_factory=Config)
    step: Callable[[nn.Module, Any], Any] | None = None
    returns_loss: bool = False
    weight: Callable[[Any], Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    val_metrics: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Dataset[Any]] | None = None
    order: Order | None = None
    workers: int = 0
    cut_by_max_steps: bool = False

    @property
    def schedules(self) -> Sequence[Schedule]:
        """The schedulers that the Trainer is given: none where its settings say the schedule."""
        if self.config.schedule != "constant" or self.config.warmup_steps:
            return ()
        return self.problem.schedules


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(name: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Note what makes the program of this name."""

    def note(make: Callable[[], Program]) -> Callable[[], Program]:
        PROGRAMS[name] = make
        return make

    return note


# Optimizers.


def sgd(model: nn.Module, loss_function: Any) -> list[Optimizer]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [torch.optim.SGD(trained, lr=0.1, momentum=0.9)]


def adamw(model: nn.Module, loss_function: Any) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)]


def of_class(kind: type[Optimizer], **settings: Any) -> Callable[..., list[Optimizer]]:
    """An optimizer of all parameters."""
    return lambda model, _: [kind(model.parameters(), **settings)]


def body_and_head(model: Any, loss_function: Any) -> list[Optimizer]:
    """Two optimizers."""
    return [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.AdamW(model[2].parameters(), lr=0.02),
    ]


# Figures.

RIGHT = Figure(lambda outputs, batch: (outputs.argmax(1) == batch[1]).sum(), samples_in)


def error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each sample."""
    return (outputs - targets).abs().squeeze(1)


ERROR = Figure(lambda outputs, batch: (outputs - batch[1]).abs().sum(), samples_in)


def tokens(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def right_words(scores: Tensor, labels: Tensor) -> Tensor:
    """How many, as a count."""
    return (scores.argmax(dim=2) == labels).sum()


RIGHT_WORDS = Figure(
    lambda scores, batch: (scores.argmax(2) == batch["labels"]).sum(), lambda batch: tokens(batch)
)


# Programs.

CLASSIFIER = Problem(
    model=network,
    train=labelled(1, SAMPLES),
    val=labelled(2, VALIDATION),
    optimizers=sgd,
    figures={"accuracy": RIGHT},
)
REGRESSION = Problem(
    model=regression,
    train=measured(1, SAMPLES),
    val=measured(2, VALIDATION),
    optimizers=sgd,
    loss_function=nn.MSELoss,
    figures={"mae": ERROR},
)


def classifier(config: Config | None = None, **changes: Any) -> Program:
    """The classifier with these changes of its problem."""
    return Program(
        problem=replace(CLASSIFIER, **changes),
        metrics={"accuracy": accuracy},
        config=config or Config(),
    )


@program("classifier by CrossEntropyLoss")
def _() -> Program:
    return classifier()


@program("regression with an uneven last step")
def _() -> Program:
    adam = of_class(torch.optim.Adam, lr=0.02)
    problem = replace(REGRESSION, train=measured(1, 37), optimizers=adam)
    return Program(problem=problem, metrics={"mae": error})


@program("no validation data")
def _() -> Program:
    return Program(problem=replace(REGRESSION, val=None), metrics={"mae": error})


@program("accumulation longer than the epoch")
def _() -> Program:
    config = Config(gradient_accumulation_steps=6)
    return classifier(config, train=labelled(1, 20), step_samples=36, epochs=5)


@program("accumulation with a static graph")
def _() -> Program:
    config = Config(gradient_accumulation_steps=2, ddp=DDPConfig(static_graph=True))
    return classifier(config)


@program("gradients clipped, accumulated")
def _() -> Program:
    config = Config(gradient_accumulation_steps=2)
    return classifier(config, max_grad_norm=0.05, optimizers=of_class(torch.optim.SGD, lr=1.0))


@program("gradients changed by a callback, then clipped")
def _() -> Program:
    def add_noise(model: nn.Module, optimizers: Sequence[Optimizer], step: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.1 * drawn(step, *parameter.shape)

    return classifier(before_step=add_noise, max_grad_norm=0.3)


@program("AMSGrad")
def _() -> Program:
    return classifier(optimizers=of_class(torch.optim.Adam, lr=0.02, amsgrad=True))


@program("AdamW")
def _() -> Program:
    return classifier(optimizers=adamw)


@program("RMSprop, centered, with momentum")
def _() -> Program:
    rmsprop = of_class(torch.optim.RMSprop, lr=0.005, centered=True, momentum=0.5)
    return classifier(optimizers=rmsprop)


@program("Adagrad with a decaying rate")
def _() -> Program:
    return classifier(optimizers=of_class(torch.optim.Adagrad, lr=0.1, lr_decay=0.05))


@program("two optimizers, each with a scheduler")
def _() -> Program:
    schedules = [
        Schedule(Moment.STEP, lambda optimizer: lrs.ExponentialLR(optimizer, 0.9)),
        Schedule(Moment.STEP, lambda optimizer: lrs.StepLR(optimizer, 4, gamma=0.3)),
    ]
    return classifier(optimizers=body_and_head, schedules=schedules)


@program("two groups, one with weight decay")
def _() -> Program:
    def grouped(model: nn.Module, loss_function: Any) -> list[Optimizer]:
        groups: list[dict[str, Any]] = [
            {"params": [each for each in model.parameters() if each.dim() > 1]},
            {"params": [each for each in model.parameters() if each.dim() == 1], "lr": 0.05},
        ]
        groups[0]["weight_decay"] = 0.2
        return [torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)]

    return classifier(optimizers=grouped)


def language_model(*, tied: bool) -> Program:
    def next_word(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = model(batch["words"])
        return cross_entropy(scores.transpose(1, 2), batch["labels"], ignore_index=IGNORED), scores

    problem = Problem(
        model=lambda: LanguageModel(tied=tied),
        train=Sentences(1, SAMPLES),
        val=Sentences(2, VALIDATION),
        optimizers=adamw,
        mean=lambda model, _, batch: next_word(model, batch),
        collate=padded,
        over=tokens,
        figures={"accuracy": RIGHT_WORDS},
    )
    return Program(
        problem=problem, step=next_word, weight=tokens, metrics={"accuracy": right_words}
    )


@program("language model: the mean is over tokens")
def _() -> Program:
    return language_model(tied=False)


@program("language model with tied weights, accumulated")
def _() -> Program:
    return replace(language_model(tied=True), config=Config(gradient_accumulation_steps=2))


@program("sparse embedding by SparseAdam")
def _() -> Program:
    def optimizers(model: Any, loss_function: Any) -> list[Optimizer]:
        return [
            torch.optim.SparseAdam(model.vectors.parameters(), lr=0.05),
            torch.optim.SGD(model.scores.parameters(), lr=0.1),
        ]

    return classifier(
        Config(gradient_accumulation_steps=2),
        model=SparseVectors,
        train=three_words(1, SAMPLES),
        val=three_words(2, VALIDATION),
        optimizers=optimizers,
    )


@program("class weights")
def _() -> Program:
    def weight(batch: Any) -> Tensor:
        return CLASS_WEIGHTS[batch[1]].sum()

    weighted = classifier(
        loss_function=lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), over=weight
    )
    return replace(weighted, weight=weight)


def ignored_labels(config: Config, step_samples: int) -> Program:
    def labels(batch: Any) -> Tensor:
        count: Tensor = (batch[1] != IGNORED).sum()
        return count

    # All labels of a step may be ignored: then the mean is 0 / 0, and the step has no gradient.
    def mean(model: nn.Module, loss_function: Any, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        total = cross_entropy(outputs, batch[1], ignore_index=IGNORED, reduction="sum")
        return total / labels(batch).clamp(min=1), outputs

    partly = classifier(
        config,
        train=partly_labelled(1, SAMPLES),
        val=partly_labelled(2, VALIDATION),
        mean=mean,
        over=labels,
        step_samples=step_samples,
    )
    return replace(partly, weight=labels)


@program("ignored labels")
def _() -> Program:
    return ignored_labels(Config(), 6)


@program("ignored labels, accumulated")
def _() -> Program:
    return ignored_labels(Config(gradient_accumulation_steps=2), 12)


@program("a weight for each sample")
def _() -> Program:
    def importance(batch: Any) -> Tensor:
        squares: Tensor = batch[0][:, 0].square()
        return squares

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        losses = cross_entropy(outputs, batch[1], reduction="none")
        weights = importance(batch)
        return (losses * weights).sum() / weights.sum(), outputs

    weighted = classifier(
        mean=lambda model, _, batch: step(model, batch),
        over=lambda batch: importance(batch).sum(),
    )
    return replace(weighted, step=step, weight=lambda batch: importance(batch).sum())


@program("a gradient in the loss")
def _() -> Program:
    def step(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            inputs = batch[0].clone().requires_grad_()
            outputs = model(inputs)
            (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        penalty = slopes.square().sum(dim=1).mean()
        return cross_entropy(outputs, batch[1]) + 0.1 * penalty, outputs

    smooth = classifier(mean=lambda model, _, batch: step(model, batch))
    return replace(smooth, step=step)


@program("distillation from a frozen teacher")
def _() -> Program:
    def step(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        student, teacher = model(batch[0])
        return cross_entropy(student, teacher.softmax(dim=1)), student

    distilled = classifier(model=Distilled, mean=lambda model, _, batch: step(model, batch))
    return replace(distilled, step=step)


@program("a step of one's own, which calls the model twice")
def _() -> Program:
    def step(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch["inputs"])
        mirrored = model(-batch["inputs"])
        return cross_entropy(outputs, batch["labels"]) + mse_loss(outputs, -mirrored), outputs

    problem = Problem(
        model=network,
        train=Named(1, SAMPLES),
        val=Named(2, VALIDATION),
        optimizers=adamw,
        mean=lambda model, _, batch: step(model, batch),
    )
    return Program(problem=problem, step=step)


@program("the model returns its loss")
def _() -> Program:
    def mean(model: nn.Module, loss_function: Any, batch: Any) -> tuple[Tensor, Tensor]:
        found = model(**batch)
        return found["loss"], found["logits"]

    right = Figure(lambda logits, batch: (logits.argmax(1) == batch["labels"]).sum(), samples_in)
    problem = Problem(
        model=ReturnsLoss,
        train=Named(1, SAMPLES),
        val=Named(2, VALIDATION),
        optimizers=adamw,
        mean=mean,
        figures={"accuracy": right},
    )
    return Program(problem=problem, returns_loss=True, metrics={"accuracy": accuracy})


@program("an average of the weights is evaluated")
def _() -> Program:
    return classifier(ema_decay=0.8, evaluate_every_steps=2)


@program("cosine with a warm-up")
def _() -> Program:
    epochs = 3
    warmup = 4

    def factor(step: int) -> float:
        """By the share of all samples that have been seen, counted in steps."""
        whole, rest = divmod(step, STEPS)
        seen = whole * SAMPLES + rest * CLASSIFIER.step_samples
        done = seen / SAMPLES * STEPS
        if done < warmup:
            return (done + 1) / (warmup + 1)
        share = (done - warmup) / (epochs * STEPS - warmup)
        return (1 + math.cos(math.pi * share)) / 2

    return classifier(
        Config(schedule="cosine", warmup_steps=warmup),
        epochs=epochs,
        schedules=[Schedule(Moment.STEP, lambda optimizer: lrs.LambdaLR(optimizer, factor))],
    )


@program("OneCycleLR, which moves momentum too")
def _() -> Program:
    def one_cycle(optimizer: Optimizer) -> Any:
        return lrs.OneCycleLR(optimizer, max_lr=0.2, total_steps=3 * STEPS)

    return classifier(schedules=[Schedule(Moment.STEP, one_cycle)])


@program("ReduceLROnPlateau by accuracy")
def _() -> Program:
    def plateau(optimizer: Optimizer) -> Any:
        return lrs.ReduceLROnPlateau(optimizer, mode="max", factor=0.3, patience=0)

    return classifier(
        schedules=[Schedule(Moment.EVALUATION, plateau)],
        monitor="accuracy",
        greater_is_better=True,
        evaluate_every_steps=3,
    )


@program("a scheduler by epochs, and a scaled rate")
def _() -> Program:
    def milestones(optimizer: Optimizer) -> Any:
        return lrs.MultiStepLR(optimizer, [1, 3], gamma=0.3)

    return classifier(
        Config(scale_lr="linear", base_batch_size=8, scheduler_interval="epoch"),
        lr_factor=12 / 8,
        epochs=4,
        schedules=[Schedule(Moment.EPOCH, milestones)],
    )


@program("cosine and max_steps amid an epoch")
def _() -> Program:
    steps = 12

    def factor(step: int) -> float:
        if step < 3:
            return (step + 1) / 4
        return (1 + math.cos(math.pi * (step - 3) / (steps - 3))) / 2

    return classifier(
        Config(schedule="cosine", warmup_steps=3),
        max_steps=steps,
        schedules=[Schedule(Moment.STEP, lambda optimizer: lrs.LambdaLR(optimizer, factor))],
    )


@program("a scheduler made of others")
def _() -> Program:
    def sequential(optimizer: Optimizer) -> Any:
        parts = [
            lrs.LinearLR(optimizer, 0.2, total_iters=3),
            lrs.CosineAnnealingWarmRestarts(optimizer, 4),
            lrs.PolynomialLR(optimizer, total_iters=6, power=2),
        ]
        return lrs.SequentialLR(optimizer, parts, [3, 9])

    return classifier(schedules=[Schedule(Moment.STEP, sequential)])


@program("a rate that is a tensor, in cycles")
def _() -> Program:
    def optimizers(model: nn.Module, loss_function: Any) -> list[Optimizer]:
        rate = torch.tensor(0.02, dtype=torch.float64)
        return [torch.optim.AdamW(model.parameters(), lr=rate)]

    def cyclic(optimizer: Optimizer) -> Any:
        return lrs.CyclicLR(optimizer, 0.002, 0.03, step_size_up=4, cycle_momentum=False)

    return classifier(optimizers=optimizers, schedules=[Schedule(Moment.STEP, cyclic)])


@program("patience ends the training")
def _() -> Program:
    inputs, labels = labelled(2, VALIDATION).tensors
    others = TensorDataset(inputs, (labels + 1) % CLASSES)
    return classifier(val=others, epochs=9, patience=2)


@program("classes drawn equally often")
def _() -> Program:
    data = labelled(1, SAMPLES)
    labels = data.tensors[1].tolist()
    drawn_equally = classifier(train=data, order=lambda epoch: balanced(labels, epoch))
    return replace(drawn_equally, order=Weighted.balanced(labels))


@program("fewer samples, drawn without replacement")
def _() -> Program:
    weights = [1.0 + index % 5 for index in range(SAMPLES)]

    def order(epoch: int) -> list[int]:
        """By times that are exponential with the weights as rates."""
        generator = torch.Generator().manual_seed(epoch)
        uniform = torch.rand(SAMPLES, dtype=torch.float64, generator=generator).tolist()
        times = [-math.log1p(-u) / rate for u, rate in zip(uniform, weights, strict=True)]
        return sorted(range(SAMPLES), key=times.__getitem__)[:31]

    return replace(
        classifier(order=order), order=Weighted(weights, num_samples=31, replacement=False)
    )


@program("an order of one's own")
def _() -> Program:
    return replace(classifier(order=rotated), order=Rotated())


@program("a stream that all ranks read")
def _() -> Program:
    return replace(classifier(order=rotated), data=Stream)


@program("a stream that two workers of each rank read")
def _() -> Program:
    return replace(classifier(order=rotated, epochs=2), data=Stream, workers=2)


@program("augmentation by epoch and index, in workers")
def _() -> Program:
    return replace(classifier(train=Augmented()), workers=1)


@program("dropout by index")
def _() -> Program:
    return classifier(model=DropoutByIndex, train=indexed(1, SAMPLES), val=indexed(2, VALIDATION))


@program("heads that some steps do not use")
def _() -> Program:
    config = Config(ddp=DDPConfig(find_unused_parameters=True), gradient_accumulation_steps=2)
    return classifier(config, model=HeadBySample, optimizers=adamw)


@program("a layer is unfrozen, in a group of its own")
def _() -> Program:
    def unfreeze(model: Any, optimizers: Sequence[Optimizer], epoch: int) -> None:
        if epoch == 2:
            model[0].requires_grad_(True)
            optimizers[0].add_param_group({"params": list(model[0].parameters()), "lr": 0.03})

    return classifier(model=half_frozen, after_epoch=unfreeze, epochs=4)


@program("a layer is unfrozen amid an epoch, and averaged")
def _() -> Program:
    def unfreeze(model: Any, optimizers: Sequence[Optimizer], step: int) -> None:
        if step == 7:
            model[0].requires_grad_(True)
            optimizers[0].add_param_group({"params": list(model[0].parameters())})

    return classifier(model=half_frozen, after_step=unfreeze, ema_decay=0.8)


@program("a layer is frozen and thawed again")
def _() -> Program:
    def change(model: Any, optimizers: Sequence[Optimizer], epoch: int) -> None:
        model[0].requires_grad_(epoch != 2)

    return classifier(after_epoch=change, epochs=4, optimizers=adamw)


@program("weight decay changed by a callback")
def _() -> Program:
    def change(model: nn.Module, optimizers: Sequence[Optimizer], epoch: int) -> None:
        for group in optimizers[0].param_groups:
            group["weight_decay"] = 0.3 * epoch

    return classifier(after_epoch=change, optimizers=adamw)


@program("GroupNorm, activations computed again")
def _() -> Program:
    return classifier(Config(activation_checkpointing=("Block",)), model=blocks, optimizers=adamw)


@program("GRU with a padding index")
def _() -> Program:
    return classifier(
        model=Recurrent,
        train=three_words(1, SAMPLES),
        val=three_words(2, VALIDATION),
        optimizers=adamw,
    )


@program("spectral norm and weight norm, averaged")
def _() -> Program:
    return classifier(model=with_spectral_norm, ema_decay=0.8)


@program("a buffer that counts steps")
def _() -> Program:
    return classifier(model=Counting, ema_decay=0.8)


@program("complex weights")
def _() -> Program:
    return classifier(model=Complex, optimizers=of_class(torch.optim.Adam, lr=0.02))


@program("frozen statistics of BatchNorm")
def _() -> Program:
    return classifier(model=with_frozen_statistics)


@program("a loss function with a parameter")
def _() -> Program:
    def optimizers(model: nn.Module, loss_function: Any) -> list[Optimizer]:
        return [torch.optim.AdamW([*model.parameters(), *loss_function.parameters()], lr=0.02)]

    return classifier(loss_function=Tempered, optimizers=optimizers, max_grad_norm=0.2)


@program("soft targets, and accuracy of evaluations alone")
def _() -> Program:
    data = labelled(1, SAMPLES)
    soft = TensorDataset(data.tensors[0], drawn(3, SAMPLES, CLASSES).softmax(dim=1))
    problem = replace(CLASSIFIER, train=soft, figures={}, val_figures={"accuracy": RIGHT})
    return Program(problem=problem, val_metrics={"accuracy": accuracy})


@program("max_steps amid an epoch, then more of them")
def _() -> Program:
    return replace(classifier(max_steps=13, evaluate_every_steps=4), cut_by_max_steps=True)


@program("much at once")
def _() -> Program:
    def change(model: Any, optimizers: Sequence[Optimizer], epoch: int) -> None:
        model[0].requires_grad_(epoch != 1)

    def weight(batch: Any) -> Tensor:
        return CLASS_WEIGHTS[batch[1]].sum()

    schedules = [
        Schedule(Moment.EPOCH, lambda optimizer: lrs.ExponentialLR(optimizer, 0.7)),
        Schedule(
            Moment.EVALUATION,
            lambda optimizer: lrs.ReduceLROnPlateau(optimizer, mode="max", patience=2),
        ),
    ]
    config = Config(
        gradient_accumulation_steps=2,
        scheduler_interval="epoch",
        scale_lr="sqrt",
        base_batch_size=3,
    )
    everything = classifier(
        config,
        loss_function=lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        over=weight,
        optimizers=body_and_head,
        schedules=schedules,
        lr_factor=2.0,
        max_grad_norm=0.3,
        ema_decay=0.7,
        evaluate_every_steps=2,
        monitor="accuracy",
        greater_is_better=True,
        after_epoch=change,
        epochs=4,
    )
    return replace(everything, weight=weight)


# Programs whose result depends on the ranks, and how.


@program("BatchNorm")
def _() -> Program:
    return classifier(
        model=normalised,
        drop_last=True,
        by_rank="its statistics are of a rank's samples in a step, and rank 0's are kept",
    )


@program("contrastive loss")
def _() -> Program:
    def contrast(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        views = normalize(model(batch[0]), dim=1)
        others = normalize(model(batch[0] + 0.1), dim=1)
        scores = 3 * views @ others.T
        return cross_entropy(scores, torch.arange(len(scores))), views

    problem = replace(
        CLASSIFIER,
        mean=lambda model, _, batch: contrast(model, batch),
        figures={},
        by_rank="a sample is told from the other samples of its rank in the step",
    )
    return Program(problem=problem, step=contrast)
