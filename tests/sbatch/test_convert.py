"""``srunddp sbatch --from``: the launch is replaced, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.sbatch.convert import convert
from tests.support.facts import tells

HEAD = (
    "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n#SBATCH --cpus-per-task=32\n#SBATCH"
    " --gres=gpu:4\n"
)
BODY = """# torchrun is only named here
echo "it's torchrun train.py" && which torchrun
cat <<END >ranks
it's torchrun train.py
END
export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # it's a comment\t
"""
SIZE = '--nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task="$((SLURM_CPUS_ON_NODE / 4))"'
ON_TWO = f"{SIZE} --kill-on-bad-exit=1 --gpu-bind=none"
TWO = "--nnodes=2 --nproc-per-node=4"


def converted(folder: Path, text: str) -> tuple[str, list[str]]:
    (folder / "job.sh").write_bytes(text.encode())
    return convert(str(folder / "job.sh"))


@pytest.mark.parametrize(
    ("launch", "made"),
    [
        (f"srun torchrun {TWO} \\\n  --rdzv-endpoint=$H:29500 t.py", f"srun {ON_TWO} srunddp t.py"),
        ("srun torchrun --nnodes 2 --nproc_per_node 4 t.py", f"srun {ON_TWO} srunddp t.py"),
        (
            f"srun -l -N 2 --ntasks-per-node=1 \\\n torchrun {TWO} t.py",
            f"srun {ON_TWO} -l srunddp t.py",
        ),
        (
            f"A='x y' exec python3 -u -m torch.distributed.run {TWO} -m pkg.train",
            f"A='x y' exec srun {ON_TWO} srunddp -m pkg.train",
        ),
        (
            f"srun apptainer exec --nv $SIF torchrun {TWO} t.py",
            f"srun {ON_TWO} apptainer exec --nv $SIF srunddp t.py",
        ),
        (
            (
                f"if ! srun -n$N --tasks-per-node 1 -u conda run -n train torchrun {TWO} --run-path"
                " t.py"
            ),
            f"if ! srun {ON_TWO} -u conda run -n train srunddp t.py",
        ),
        (f"if torchrun {TWO} t.py", f"if srun {ON_TWO} srunddp t.py"),
        (
            (
                "accelerate launch --multi_gpu --num_machines 2 --num_processes=8 --machine_rank $R"
                " train.py"
            ),
            f"srun {ON_TWO} srunddp train.py",
        ),
    ],
)
def test_the_launch_is_replaced_and_every_other_byte_stays(
    launch: str, made: str, tmp_path: Path
) -> None:
    rest = " --lr 1e-3 \\\n  --name \"a b\"  # it's done\r\necho 'end'"
    text, notes = converted(tmp_path, HEAD + BODY + launch + rest)
    assert text == HEAD + BODY + made + rest
    said = " torchrun or accelerate, too; this line is left as it is"
    left = [
        number
        for number, line in enumerate(BODY.splitlines(), 1)
        if "torchrun" in line.partition("#")[0]
    ]
    assert [note.split(":")[1:] for note in notes] == [
        [str(HEAD.count("\n") + number), said] for number in left
    ]


@pytest.mark.parametrize(
    ("launch", "size"),
    [
        (
            "torchrun --standalone --nproc-per-node=gpu t.py",
            '--nodes=1 --ntasks="$((1 * SLURM_GPUS_ON_NODE))" ',
        ),
        (
            'torchrun --nnodes="$N" --nproc_per_node=${G:-2} t.py',
            '--nodes="$N" --ntasks="$((N * ${G:-2}))" ',
        ),
        ("torchrun --nproc_per_node=$(f $G) t.py", '--nodes=1 --ntasks="$((1 * $(f $G)))" '),
        (
            "torchrun --nnodes=1:4 --nproc-per-node=2 t.py",
            '--nodes="$SLURM_NNODES" --ntasks="$((SLURM_NNODES * 2))" ',
        ),
        ("torchrun --nproc-per-node=cpu t.py", '--nodes=1 --ntasks="$((1 * SLURM_CPUS_ON_NODE))" '),
        (
            "torchrun --nproc-per-node `f x` t.py",
            '--nodes=1 --ntasks="$((1 * `f x`))" --ntasks-per-node="`f x`" ',
        ),
        (
            "torchrun t.py",
            (
                '--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task="$((SLURM_CPUS_ON_NODE /'
                ' 1))" '
            ),
        ),
        (
            "#SBATCH --ntasks=4\n#SBATCH --cpus-per-task=8\ntorchrun --nproc-per-node=2 t.py",
            (
                '--nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task="$((SLURM_CPUS_ON_NODE /'
                ' 2))" '
            ),
        ),
    ],
)
def test_sizes_of_variables_are_left_to_bash(launch: str, size: str, tmp_path: Path) -> None:
    text, _ = converted(tmp_path, f"#!/bin/bash\n{launch}\n")
    assert f"\nsrun {size}" in text
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_option_that_gets_lost_is_noted(tmp_path: Path) -> None:
    launch = "torchrun -t 3 --nproc-per-node=2 --max_restarts=0 --log_dir=x --rdzv-id=1 t.py\n"
    tee, log_dir = converted(tmp_path, launch)[1]
    options = ("--log-dir logs", "--show-ranks all", "--prefix")
    assert tells(tee, f"{tmp_path}/job.sh:1", "--tee", "left out", *options)
    assert tells(log_dir, f"{tmp_path}/job.sh:1", "--log-dir", "left out")


def test_what_the_script_has_to_know_is_noted(tmp_path: Path) -> None:
    text = (
        'bash -c "\ntorchrun a.py\n"\n/usr/bin/srun -n1 python -m torch.distributed.launch'
        " --nproc_per_node=2 t.py\n"
    )
    made, notes = converted(tmp_path, text)
    assert made.splitlines()[3].startswith("/usr/bin/srun --nodes=1 --ntasks=2 ")
    no_option, other = notes
    assert tells(no_option, f"{tmp_path}/job.sh:4", "--local-rank", "LOCAL_RANK")
    assert tells(other, f"{tmp_path}/job.sh:2", "torchrun", "left as it is")


@pytest.mark.slow
def test_the_options_without_a_value_are_those_of_torchrun(tmp_path: Path) -> None:
    # Not at the top: each process that collects tests would import torch.
    from torch.distributed.run import get_args_parser

    options = {
        name: each.nargs == 0 for each in get_args_parser()._actions for name in each.option_strings
    }
    assert len(options) > 50
    # With these, torchrun starts no Python script.
    for name in ("-h", "--help", "--no-python", "--no_python"):
        assert options.pop(name)
    wrong = []
    for name, is_flag in options.items():
        made, _ = converted(tmp_path, f"torchrun {name} 2 train.py\n")
        if made.endswith(" 2 train.py\n") is not is_flag:
            wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no commands with torchrun or accelerate; expected one such command -> "),
        ("python train.py\n", "no commands"),
        (
            'srun bash -c "\ntorchrun t.py\n"\n',
            "no commands with torchrun or accelerate, but in quotes or the like, line 2",
        ),
        (
            "# torchrun\nA=(torchrun t.py)\ncat <<E\ntorchrun t.py\nE\n",
            "but in quotes or the like, line 2, line 4; ",
        ),
        (
            "torchrun a.py\ntorchrun b.py\n",
            "2 commands with torchrun or accelerate, line 1, line 2; ",
        ),
        ("for i in 1 2; do\n  torchrun t.py &\ndone\n", "job.sh:2: a launch in a loop"),
        (
            "if a; then for i in 1; do b; done; fi\nfor i in 1; do torchrun t.py; done\n",
            "job.sh:2: a launch in a loop",
        ),
        ('torchrun "${ARGS[@]}" t.py\n', "${ARGS[@]} before the script may hold options"),
        ('torchrun "${ARGS[@]}" "$@"\n', "${ARGS[@]} before the script may hold options"),
        (
            "torchrun --nproc-per-node 4 `# all` --nnodes 2 t.py\n",
            "`# all` before the script may hold options",
        ),
        ("cat <<\\E-F\ntorchrun t.py\nE-F\n", "but in quotes or the like, line 2; "),
        ("srun docker run image torchrun t.py\n", "job.sh:1: docker before torchrun; "),
        ("torchrun --no-python t.sh\n", "--no-python"),
        ("#SBATCH --gpus-per-task=4\ntorchrun t.py\n", "job.sh:2: --gpus-per-task"),
        ("srun --gpus-per-task=4 torchrun t.py\n", "job.sh:1: --gpus-per-task"),
        ("#SBATCH --tres-per-task=gres/gpu:4\ntorchrun t.py\n", "job.sh:2: --gpus-per-task"),
        ("$SRUN torchrun t.py\n", "job.sh:1: $SRUN before torchrun; "),
        ("time ssh n1 torchrun t.py\n", "job.sh:1: ssh before torchrun; "),
        (
            "accelerate launch --config_file=c t.py\n",
            "job.sh:1: accelerate launch without --num_processes; ",
        ),
    ],
)
def test_what_is_not_one_launch_is_refused(text: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, text)
    assert found in str(error.value)
    assert error.value.hint


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ConfigError, match="expected a job script -> correct --from"):
            convert(str(path))
    (tmp_path / "job.sh").write_bytes(b"torchrun \xff")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        convert(str(tmp_path / "job.sh"))
