"""Each option of a launcher is carried over, refused, or without effect: none is lost."""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.sbatch import launcher_options
from srunddp.sbatch.convert import convert
from srunddp.sbatch.launcher_options import (
    ACCELERATE,
    DEEPSPEED,
    LAUNCH,
    TORCHRUN,
    Exported,
    Given,
    Module,
    NoEffect,
    Option,
    Output,
    Refused,
    RunOption,
    Size,
)
from tests.support.facts import tells

TABLES = {
    "torchrun": TORCHRUN,
    "python -m torch.distributed.launch --use-env": LAUNCH,
    "accelerate launch --num_processes 1": ACCELERATE,
    "deepspeed --no_local_rank": DEEPSPEED,
}
EVERY = [(launcher, option) for launcher, table in TABLES.items() for option in table]
# With these accelerate launch takes the options that need one of them.
SWITCHES = {"use-fsdp": "--use_fsdp", "use-deepspeed": "--use_deepspeed"}
SWITCHES |= {"dynamo-backend": "--dynamo_backend=inductor"}


def converted(folder: Path, launch: str) -> tuple[str, list[str]]:
    (folder / "job.sh").write_text(f"{launch}\n")
    text, notes = convert(str(folder / "job.sh"))
    return text, notes


@pytest.fixture(autouse=True)
def _no_default_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("launcher", "option"), EVERY, ids=[f"{first}-{each.name}" for first, each in EVERY]
)
def test_an_option_is_carried_or_refused_or_says_why_nothing_is_lost(
    launcher: str, option: Option, tmp_path: Path
) -> None:
    """The same launch with and without the option: what is different says what became of it."""
    values = {"rdzv-conf": "timeout=3", "numa-binding": "exclusive", "num-machines": "1"}
    given = f"--{option.name}" + ("" if option.flag else f"={values.get(option.name, '3')}")
    meaning = option.meaning
    switch = ""
    if isinstance(meaning, Exported):
        switch = SWITCHES.get(meaning.when, "")
    before = f"{launcher} {switch}"
    if option.name == "redirects":
        before += " --log-dir=logs"
    without, _ = converted(tmp_path, f"{before} train.py")
    line = f"{before} {given} train.py"
    if isinstance(meaning, Refused):
        with pytest.raises(ConfigError, match=re.escape(option.name)) as error:
            converted(tmp_path, line)
        assert (error.value.hint, error.value.exit_code) == (meaning.hint, 78)
        return
    made, notes = converted(tmp_path, line)
    assert made.endswith(" train.py\n")
    match meaning:
        case Size():
            sizes = {"hostfile": '--nodes="$SLURM_NNODES" ', "num-machines": "--nodes=1 "}
            assert re.search(
                sizes.get(option.name, "--(nodes|ntasks)=3 ").replace("$", "[$]"), made
            )
        case Module():
            assert "srunddp -m train.py" in made
        case RunOption(option=template):
            assert f"srunddp {template.format('3')} " in made
        case Output():
            kept = {"log-dir": "", "redirects": "--show-ranks=none", "tee": "--prefix"}
            assert kept[option.name] in made
        case Exported(variable=variable):
            assert made != without
            assert f"\n    {variable}=" in made
        case NoEffect(why=why, noted=noted):
            assert made == without
            assert any(why in note for note in notes) is noted
            assert why


def names(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """The options of a parser, as the table has them, and whether they are flags."""
    found = {}
    for action in parser._actions:
        for name in action.option_strings:
            found[name.lstrip("-").replace("_", "-")] = action.nargs == 0
    del found["h"], found["help"]
    return found


def in_table(table: Sequence[Option]) -> dict[str, bool]:
    return {name: each.flag for each in table for name in (each.name, *each.letters)}


@pytest.mark.slow
def test_torchruns_options_are_those_of_torch() -> None:
    # Not at the top: each process that collects tests would import torch.
    from torch.distributed.run import get_args_parser

    assert in_table(TORCHRUN) == names(get_args_parser())


@pytest.mark.slow
def test_accelerates_options_are_those_of_accelerate() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    assert in_table(ACCELERATE) == names(launch.launch_command_parser())


FSDP = (
    "--use_fsdp --fsdp_sharding_strategy=SHARD_GRAD_OP --fsdp_offload_params=True"
    " --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap=Block"
    " --fsdp_use_orig_params=False --fsdp_state_dict_type=SHARDED_STATE_DICT"
)
DEEPSPEED_OPTIONS = (
    "--use_deepspeed --zero_stage 3 --gradient_accumulation_steps=4 --gradient_clipping=0.5"
    " --offload_optimizer_device CPU --zero3_init_flag=True --deepspeed_config_file ds.json"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--multi_gpu",
        "--multi_gpu --mixed_precision bf16 --fsdp_version=2 --zero_stage=3",
        "--multi_gpu --mixed_precision no --dynamo_backend=no",
        "--multi_gpu --dynamo_backend inductor --dynamo_use_dynamic",
        "--multi_gpu --enable_cpu_affinity --debug --num_cpu_threads_per_process=4",
        "--use_fsdp",
        "--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward=False",
        FSDP,
        f"{FSDP} --mixed_precision=fp16",
        "--use_deepspeed",
        DEEPSPEED_OPTIONS,
    ],
)
def test_the_variables_are_those_that_accelerate_exports(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the converted command get the values that ``accelerate launch`` gives them."""
    launch = pytest.importorskip("accelerate.commands.launch")
    prepare = pytest.importorskip("accelerate.utils.launch")
    monkeypatch.setattr(prepare, "is_port_in_use", lambda _: False)
    for name in ("OMP_NUM_THREADS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    words = f"--num_processes=2 --num_machines=1 {options} t.py".split()
    arguments, _, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(words)
    )
    arguments.deepspeed_fields_from_accelerate_config = ""
    if arguments.use_deepspeed:
        _, theirs = prepare.prepare_deepspeed_cmd_env(arguments)
    else:
        theirs = prepare.prepare_multi_gpu_env(arguments)
    text, _ = converted(tmp_path, f"accelerate launch {' '.join(words)}")
    ours = exported(text)
    wanted = {name: value for name, value in theirs.items() if is_accelerates(name)}
    # accelerate always exports these; absent they mean the same.
    usual = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "ACCELERATE_CONFIG_DS_FIELDS": "",
    }
    if "num_cpu_threads" not in options:
        wanted.pop("OMP_NUM_THREADS", None)  # srunddp shares the CPUs out
    for name, value in usual.items():
        if name not in ours and wanted.get(name) == value:
            del wanted[name]
    assert {name: value.lower() for name, value in ours.items()} == {
        name: value.lower() for name, value in wanted.items()
    }


def is_accelerates(name: str) -> bool:
    return name.startswith(("ACCELERATE_", "FSDP_")) or name in ("OMP_NUM_THREADS", "PYTHONPATH")


def exported(text: str) -> dict[str, str]:
    """What the ranks of a converted command get by env: bash runs it with a program for srun."""
    step = 'srun() { while [ "$1" != env ]; do shift; done; "$@"; }; '
    text = step + re.sub(r"(\s)srunddp .*", r"\1env -0", text)
    done = subprocess.run(
        ["bash", "-c", text if "env" in text else "true"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
        text=True,
    )
    pairs = (each.partition("=") for each in done.stdout.split("\0") if "=" in each)
    return {name: value for name, _, value in pairs if is_accelerates(name)}


def test_an_option_may_be_cut_short_as_in_argparse(tmp_path: Path) -> None:
    made, _ = converted(tmp_path, "torchrun --nnode=2 --nproc_per 4 t.py")
    assert "--nodes=2 --ntasks=8 " in made
    with pytest.raises(ConfigError, match=r"job\.sh:1: --rd=1; expected"):
        converted(tmp_path, "torchrun --rd=1 t.py")


def test_a_letter_with_its_value_takes_no_other_word(tmp_path: Path) -> None:
    made, _ = converted(tmp_path, "torchrun -t3 --nproc-per-node=2 t.py")
    assert made.endswith(" srunddp --prefix t.py\n")


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("--max-restarts=3", "--restarts=3"),
        ('--max-restarts="$N"', '--restarts="$N"'),
        ("--max-restarts=0", ""),
        ("--tee 3", "--prefix"),
        ("--tee 0 --redirects=0", ""),
        ("--log-dir=x --tee=3", "--log-dir=x --show-ranks=all --prefix"),
        ("--log-dir='a b' -r 3", "--log-dir='a b' --show-ranks=none"),
        ("--log-dir=x", ""),
        ("--rdzv-conf=a=1,timeout=900", "--timeout=900"),
        ("--rdzv-conf=is_host=1", ""),
        ("--shutdown-timeout=5", "--grace=5"),
        ("--numa-binding exclusive", "--bind=auto"),
        ("-m", "-m"),
    ],
)
def test_options_of_torchrun_become_options_of_run(options: str, kept: str, tmp_path: Path) -> None:
    made, notes = converted(tmp_path, f"torchrun {options} t.py")
    assert made.partition(" srunddp ")[2].split() == [*kept.split(), "t.py"]
    assert notes == []


@pytest.mark.parametrize(
    ("launch", "found", "hint"),
    [
        ("torchrun --nproc-per-nodes=2 t.py", "--nproc-per-nodes=2", "correct it"),
        ("torchrun --numa-binding=node t.py", "--numa-binding=node", "--cpu-bind"),
        ("torchrun --redirects=3 t.py", "--redirects=3", "--log-dir=logs"),
        ("torchrun --tee=0:3 t.py", "--tee=0:3", "3"),
        (
            "accelerate launch --num_processes=2 --config_file=f.yaml t.py",
            "--config-file=f.yaml",
            "--mixed_precision=bf16",
        ),
        (
            "accelerate launch --num_processes=2 --mixed_precision=fp8 t.py",
            "--mixed-precision=fp8",
            "Accelerator",
        ),
        (
            "accelerate launch --num_processes=2 --cpu t.py",
            "--cpu",
            "--num_processes=1",
        ),
        (
            "python -m torch.distributed.launch --nproc_per_node=2 t.py",
            "--local-rank",
            "--use-env",
        ),
        (
            "accelerate launch --num_processes=7 --num_machines=2 t.py",
            "--num_processes=7",
            "--num_processes=8",
        ),
        ("deepspeed --num_gpus=2 t.py", "--local-rank", "--no_local_rank"),
    ],
)
def test_what_no_option_replaces_is_refused(
    launch: str, found: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, launch)
    assert tells(error.value.found, "job.sh:1", found)
    assert tells(error.value.hint, hint)


def test_the_file_that_accelerate_reads_by_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("mixed_precision: bf16\n")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        converted(tmp_path, "accelerate launch --num_processes=2 t.py")


def test_no_name_is_in_a_table_twice() -> None:
    for table in TABLES.values():
        found = [name for each in table for name in (each.name, *each.letters)]
        assert len(found) == len({*found})


def test_what_does_nothing_is_no_reason_to_refuse() -> None:
    for table, option in itertools.chain(*([(t, o) for o in t] for t in TABLES.values())):
        for value in option.neutral:
            assert launcher_options.refused(Given(table, {option.name: value})) is None
