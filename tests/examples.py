"""The examples: how tests start each, and the figure that it has to reach."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.slurm.conftest import Outcome

FOLDER = ROOT / "docs" / "examples"


@dataclass(frozen=True)
class Example:
    """One of them.

    Attributes:
        file: in docs/examples.
        arguments: short ones, beside the output_dir; ``{shared}`` is a folder that all nodes see.
        channel: with that of the cluster, or with that mpirun, several ranks train it in every run
            of the tests; with the others upon ``--soak``.
        figure: its last line, with the figure as a group.
        least, most: between which that has to be.
        has_history: it writes metrics.jsonl.
    """

    file: str
    arguments: tuple[str, ...]
    channel: str
    figure: str
    least: float
    most: float = 100
    has_history: bool = True

    def words(self, shared: Path, output_dir: Path) -> list[str]:
        """The file and what follows it."""
        given = [argument.format(shared=shared) for argument in self.arguments]
        return [str(FOLDER / self.file), *given, f"--output-dir={output_dir}"]


ACCURACY = r"val accuracy ([\d.]+) %"
VISION = (
    "--model=shufflenet_v2_x0_5",
    "--lr=0.01",
    "--epochs=3",
    "--batch-size=16",
    "--data-dir={shared}/images",
)
MNIST = ("--epochs=3", "--checkpoint.keep_last=3", "--data-dir={shared}/digits")
BERT = ("--subset=1000", "--epochs=3")
OF_BERT = ACCURACY + r", loss [\d.]+, on made data"
OF_GAN = r"12 of 12 sectors, ([\d.]+) % of the points on the ring"
OF_LANGUAGE = r"val perplexity ([\d.]+), accuracy [\d.]+ %"
EXAMPLES = {
    example.file.removesuffix(".py"): example
    for example in (
        Example("simple.py", ("--epochs=10",), "slurm", r"val loss [\d.]+, " + ACCURACY, 90),
        Example("mnist.py", MNIST, "pmi", ACCURACY, 90),
        Example("vision.py", VISION, "mpich", ACCURACY + r", top 5 [\d.]+ %", 50),
        Example("tiny_bert.py", BERT, "mpich", OF_BERT, 80, has_history=False),
        Example(
            "imbalanced.py", (), "openmpi5", r"recall [\d.]+ %, of rare classes ([\d.]+) %", 70
        ),
        Example("fsdp_loop.py", ("--epochs=6",), "mpich", ACCURACY, 85, has_history=False),
        Example(
            "own_loop.py", (), "openmpi5", r"step \d+: loss ([\d.]+)", 0, 0.6, has_history=False
        ),
        Example("gan.py", (), "mpi", OF_GAN, 90, has_history=False),
        Example("language_model.py", (), "openmpi5", OF_LANGUAGE, 1, 8),
        Example("stream.py", (), "openmpi5", ACCURACY, 85),
        Example("frozen_backbone.py", (), "mpich", ACCURACY, 75),
        Example("single_to_multi.py", ("--epochs=3", "--channels=16"), "mpi", ACCURACY, 90),
    )
}
# It needs a package that only the environment of bin/test --interop has.
WANDB = Example("wandb_callback.py", (), "openmpi5", ACCURACY, 80)


def over(channels: Iterable[str]) -> list[Any]:
    """Each example over each channel, of which one is not left to the long campaigns; and each
    channel has one such.
    """
    assert {*channels} <= {example.channel for example in EXAMPLES.values()}
    pairs = itertools.product(EXAMPLES, channels)
    marks = {True: (), False: (pytest.mark.soak,)}
    return [
        pytest.param(name, channel, marks=marks[EXAMPLES[name].channel == channel])
        for name, channel in pairs
    ]


def loaded(name: str) -> ModuleType:
    """An example as a module that is called so."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for its annotations' names
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Figures:
    """What an example came to.

    Attributes:
        last: its last line.
        epochs: the loss and the metrics of each, to the last bit.
        output: all of it.
    """

    last: str
    epochs: tuple[str, ...]
    output: str = field(compare=False)


def figures(example: Example, done: Outcome, output_dir: Path) -> Figures:
    """Of a run that ended well and reached the example's figure."""
    assert done.code == 0, done.errors
    last = done.output.splitlines()[-1]
    found = re.fullmatch(example.figure, last)
    assert found, done.output
    assert example.least <= float(found[1]) <= example.most, last
    if example.has_history:
        history = (output_dir / "metrics.jsonl").read_text()
    else:
        history = ""
    lines = [json.loads(line) for line in history.splitlines()]
    epochs = tuple(str({**line, "time": ""}) for line in lines if line["kind"] == "epoch")
    assert bool(epochs) == example.has_history
    return Figures(last, epochs, done.output)
