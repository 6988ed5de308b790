"""The examples on one process, and what they and their page say."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from srunddp import read_config
from srunddp.errors import ConfigError
from tests.conftest import ROOT
from tests.examples import EXAMPLES, FOLDER, WANDB, Figures, figures, loaded
from tests.slurm.conftest import SRUNDDP, Outcome, outcome
from tests.support import worlds
from tests.test_coming_from import command_of

pytestmark = pytest.mark.slow

PAGE = FOLDER / "README.md"
NAMES = (*EXAMPLES, WANDB.file.removesuffix(".py"))
# Seconds, which only what is broken reaches: an example takes two minutes on a busy machine.
LIMIT = 540.0
SHORT = ("simple", "mnist", "imbalanced")
# Starts an example on one process by Python, and by srunddp: its figures, and the folder of the
# first.
StartedAlone = Callable[[str], tuple[Figures, Figures, Path]]


def run_alone(*words: str) -> Outcome:
    """One process from its start to its end."""
    variables = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VIRTUAL_ENV": sys.prefix,
    }
    return outcome(
        subprocess.run(words, env=variables, capture_output=True, text=True, timeout=LIMIT)
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> StartedAlone:
    shared = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run(name: str) -> tuple[Figures, Figures, Path]:
        plain = shared / f"{name}-python"
        ours = shared / f"{name}-srunddp"
        by_python = run_alone(sys.executable, *EXAMPLES[name].words(shared, plain))
        by_srunddp = run_alone(SRUNDDP, *EXAMPLES[name].words(shared, ours))
        return (
            figures(EXAMPLES[name], by_python, plain),
            figures(EXAMPLES[name], by_srunddp, ours),
            plain,
        )

    return run


def _when(name: str) -> pytest.MarkDecorator | tuple[()]:
    """The gate trains the shortest example, bin/test some more of them, --soak the others."""
    if name == SHORT[0]:
        return ()
    return pytest.mark.nightly if name in SHORT else pytest.mark.soak


@pytest.mark.parametrize("name", [pytest.param(name, marks=_when(name)) for name in EXAMPLES])
def test_an_example_gives_the_same_bits_by_python_and_by_srunddp(
    alone: StartedAlone, name: str
) -> None:
    plain, ours, _ = alone(name)
    assert plain == ours


@pytest.mark.nightly
def test_without_the_weights_rare_classes_are_found_less_often(alone: StartedAlone) -> None:
    without = run_alone(sys.executable, str(FOLDER / "imbalanced.py"), "--weighted=false")
    assert without.code == 0, without.errors
    outputs = (alone("imbalanced")[0].output, without.output)
    weighted, unweighted = (
        float(re.findall(r"of rare classes ([\d.]+) %", each)[0]) for each in outputs
    )
    assert weighted > unweighted + 20


@pytest.mark.nightly
def test_mnist_keeps_a_checkpoint_of_each_epoch(alone: StartedAlone) -> None:
    import torch

    plain, _, folder = alone("mnist")
    files = sorted((folder / "checkpoints").glob("step-*.pt"))
    assert [torch.load(file)["epoch"] for file in files] == [1, 2, 3]
    assert re.findall(
        r"^Epoch (\d) - loss [\d.]+, accuracy [\d.]+ %", plain.output, re.MULTILINE
    ) == ["1", "2", "3"]


# Of the last rank; the steps after the signal take long enough for the ranks to agree before the
# end.
SIGNAL = """
import srunddp
beats = 0
def heartbeat(**_):
    global beats
    beats += 1
    if beats == 12 and RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.05 * (beats >= 12))
srunddp.heartbeat = heartbeat
"""


def train_in_shards(folder: Path, output_dir: Path, before: str = "", code: int = 0) -> list[str]:
    """What two ranks of the loop with FSDP print."""
    folder.mkdir()
    words = [
        str(FOLDER / "fsdp_loop.py"),
        "--epochs=2",
        "--save-every=50",
        f"--output-dir={output_dir}",
    ]
    script = (
        f"{before}\nimport runpy\nsys.argv = {words}\nrunpy.run_path(sys.argv[0],"
        " run_name='__main__')\n"
    )
    ended = worlds.run(folder, script, size=2, variables={"OMP_NUM_THREADS": "1"})
    assert ended.codes == [code, code], ended.text
    return ended.printed[0].splitlines()


def test_a_stopped_loop_with_fsdp_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    """One of two ranks gets the signal amid an epoch; the newest checkpoint lacks its last file, as
    after a kill.
    """
    lines = train_in_shards(tmp_path / "first", tmp_path / "whole")
    assert [path.name for path in sorted((tmp_path / "whole").iterdir())] == [
        "step-00000050",
        "step-00000086",
    ]
    cut = tmp_path / "cut"
    before = train_in_shards(tmp_path / "second", cut, SIGNAL, code=75)
    assert 1 <= len(before) < len(lines) - 1
    shutil.copytree(
        max(cut.iterdir()), cut / "step-00000085", ignore=shutil.ignore_patterns(".metadata")
    )
    assert before + train_in_shards(tmp_path / "third", cut) == lines


SETTINGS = (
    "--precision=bf16 --gradient_accumulation_steps=2 --max_grad_norm=1 --schedule=cosine"
    " --warmup_steps=2"
)


def test_15_lines_are_enough_for_all_that_a_training_needs(tmp_path: Path) -> None:
    """README's script on two ranks: besides these settings validation, the best and the last
    checkpoint, a resume.
    """
    script = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert len([line for line in script.splitlines() if line]) <= 15
    for epochs in ("1", "2"):
        (tmp_path / epochs).mkdir()
        words = [
            f"--epochs={epochs}",
            f"--output-dir={tmp_path}",
            "--resume=auto",
            *SETTINGS.split(),
        ]
        ended = worlds.run(tmp_path / epochs, f"sys.argv[1:] = {words}\n{script}", size=2)
        assert ended.codes == [0, 0], ended.text
        assert re.fullmatch(
            rf"Epoch {epochs} - loss .*, val loss .*, val accuracy .*\n", ended.printed[0]
        )
    assert {"best.pt", "step-00000008.pt"} <= {
        path.name for path in (tmp_path / "checkpoints").iterdir()
    }


def parse(words: list[str]) -> None:
    """A command that starts srunddp or an example: its files are there, and its options are
    known.
    """
    tool = next(word for word in words if word in ("srunddp", "python"))
    rest = words[words.index(tool) + 1 :]
    if tool == "srunddp":
        command, rest = command_of(rest)
        given = command.make_context("srunddp", rest, help_option_names=["-h", "--help"]).params
        if given.get("script"):
            rest = [given["script"], *given["arguments"]]
        else:
            rest = []
    if rest:
        assert (ROOT / rest[0]).is_file(), rest[0]
        read_config(loaded(Path(rest[0]).stem).Settings, rest[1:])


def commands(text: str) -> list[str]:
    """Of a docstring's or page's lines and of its tables."""
    found = [*re.findall(r"^    (\S.*)$", text, re.MULTILINE), *re.findall(r"`([^`]+)`", text)]
    return [
        line
        for line in found
        if re.match(r"(srun .*srunddp|mpirun .*srunddp|srunddp|python) \S*\w", line)
    ]


def said(where: str) -> list[str]:
    """The commands of an example's docstring, or of the page."""
    if where == "README":
        # The page also has what others' guides start, and files of a user's own.
        text = PAGE.read_text().replace("`srun python", "`srun, python")
        return [command for command in commands(text) if "stage build" not in command]
    text = (FOLDER / f"{where}.py").read_text().split('"""')[1]
    return commands(text.replace(" \\\n", " "))


@pytest.mark.parametrize("where", [*NAMES, "README"])
def test_every_command_of_the_examples_names_existing_files(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for command in said(where):
        parse(shlex.split(command))


@pytest.mark.parametrize("name", NAMES)
def test_every_example_says_how_it_starts_everywhere(name: str) -> None:
    assert {"srun", "mpirun", "python"} <= {command.split()[0] for command in said(name)}
    assert f"({name}.py)" in PAGE.read_text()


def test_the_scaling_efficiency_leaves_the_first_epoch_out() -> None:
    throughput = loaded("single_to_multi").Throughput()
    throughput.speeds = [1.0, 100.0, 300.0]
    assert throughput.samples_per_second() == pytest.approx(2 / (1 / 100 + 1 / 300))
    throughput.speeds = [1.0]
    with pytest.raises(ConfigError, match="2 at least"):
        throughput.samples_per_second()


def test_a_baseline_of_other_conditions_gives_no_efficiency(tmp_path: Path) -> None:
    example = loaded("single_to_multi")
    here = {"samples_per_second": 300.0, "threads": 1, "batch_size": 64}
    file = tmp_path / "one.json"
    with pytest.raises(ConfigError, match=r"one\.json: No such file.*start one rank first"):
        example.read_baseline(file)
    example.write_baseline(file, {**here, "samples_per_second": 200.0})
    assert example.efficiency(here, example.read_baseline(file), 2) == 0.75
    example.write_baseline(file, {**here, "samples_per_second": 200.0, "threads": 2})
    with pytest.raises(ConfigError, match="one rank with threads 2; expected 1, as here"):
        example.efficiency(here, example.read_baseline(file), 2)
    file.write_text("300")
    with pytest.raises(ConfigError, match="no JSON object"):
        example.read_baseline(file)
