"""``srunddp sbatch --from``: the launch is replaced, and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.sbatch.convert import Carried, convert
from tests.conftest import ROOT
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
    said = " torchrun or accelerate as well; this line is left as it is"
    left = [
        number
        for number, line in enumerate(BODY.splitlines(), 1)
        if "torchrun" in line.partition("#")[0]
    ]
    others = [note for note in notes if not note.endswith("not once for each node")]
    assert [note.split(":")[1:] for note in others] == [
        [str(HEAD.count("\n") + number), said] for number in left
    ]


@pytest.mark.parametrize(
    "launch",
    [
        "srun nsys profile -o p_%q{SLURM_PROCID} torchrun t.py",
        "TRAIN=t.py; torchrun --nproc-per-node=2 $TRAIN $ARGS",
        'torchrun --nproc-per-node=2 $1 "$@"',
        "torchrun --nproc-per-node=2 $SCRIPT --lr 1",
        "env CUDA_VISIBLE_DEVICES=1,2 torchrun t.py",
        'torchrun --nproc-per-node=2 "$1" "${@:2}"',
        'torchrun "$SCRIPT" "${ARGS[@]}"',
        "torchrun $DIR/train.py --data x.py",
        'torchrun "$DIR/train.py" $ARGS',
        "srun --gpu-bind=none torchrun t.py",
        "srun -e err apptainer exec --nv -B /scratch/e:/e x.sif torchrun t.py",
        "export CUDA_VISIBLE_DEVICES=1,2; srun torchrun t.py",
    ],
)
def test_what_only_looks_like_an_obstacle_is_converted(launch: str, tmp_path: Path) -> None:
    made, _ = converted(tmp_path, f"{launch}\n")
    assert " srunddp " in made


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


def test_what_the_script_has_to_know_is_noted(tmp_path: Path) -> None:
    text = (
        'bash -c "\ntorchrun a.py\n"\n/usr/bin/srun -n1 -u apptainer exec x.sif torchrun'
        " --nnodes=1:4 --role=a --local-addr=h t.py\n"
    )
    made, notes = converted(tmp_path, text)
    assert made.splitlines()[3].startswith('/usr/bin/srun --nodes="$SLURM_NNODES" ')
    address, role, elastic, wrapper, other = notes
    assert tells(address, f"{tmp_path}/job.sh:4", "--local-addr", "--ifaces")
    assert tells(role, f"{tmp_path}/job.sh:4", "--role", "ROLE_NAME")
    assert tells(elastic, f"{tmp_path}/job.sh:4", "--nnodes=1:4", "ranks")
    assert tells(wrapper, f"{tmp_path}/job.sh:4", "apptainer", "each rank")
    assert tells(other, f"{tmp_path}/job.sh:2", "torchrun", "left as it is")


@pytest.mark.parametrize(
    ("launch", "program"),
    [
        ("/opt/x/bin/torchrun t.py", "/opt/x/bin/srunddp"),
        ('"$VENV/bin/python3" -u -m torch.distributed.run t.py', '"$VENV/bin/srunddp"'),
        ("$VENV/bin/accelerate launch --num_processes=1 t.py", "$VENV/bin/srunddp"),
        ("uv run torchrun t.py", "uv run srunddp"),
    ],
)
def test_srunddp_is_that_of_the_launchers_environment(
    launch: str, program: str, tmp_path: Path
) -> None:
    made, _ = converted(tmp_path, f"{launch}\n")
    assert made.endswith(f"--kill-on-bad-exit=1 {program} t.py\n")


@pytest.mark.parametrize(
    ("head", "gpus"),
    [
        ("--nodes=4\n#SBATCH --ntasks=4\n#SBATCH --gpus-per-task=8", "--gpus-per-node=8"),
        ("-N 4 -n 8 --gpus-per-task a100:2", "--gpus-per-node=a100:4"),
        ("--ntasks-per-node=2 --gpus-per-task=1", "--gpus-per-node=2"),
    ],
)
def test_gpus_of_a_task_become_gpus_of_a_node(head: str, gpus: str, tmp_path: Path) -> None:
    text = f"#!/bin/bash\n# --gpus-per-task=8\n#SBATCH {head}\nsrun torchrun t.py\n"
    made, notes = converted(tmp_path, text)
    assert f"\n# --gpus-per-task=8\n#SBATCH {head.partition('--gpus-per-task')[0]}{gpus}\n" in made
    assert " --gpu-bind=none srunddp t.py\n" in made
    line = text[: text.rindex("--gpus-per-task")].count("\n") + 1
    assert tells(notes[0], f"{tmp_path}/job.sh:{line}", "--gpus-per-task", gpus)


@pytest.mark.parametrize(
    ("before", "names"),
    [
        ("export LOCAL_RANK=0 WORLD_SIZE=$((SLURM_NNODES * 4))", ["LOCAL_RANK", "WORLD_SIZE"]),
        ("RANK=$SLURM_NODEID", ["RANK"]),
        ("export MASTER_ADDR=$HEAD MASTER_PORT=1 MY_RANK=0", []),
    ],
)
def test_ranks_do_not_get_the_scripts_own_ranks(
    before: str, names: list[str], tmp_path: Path
) -> None:
    env = "".join(f" \\\n    {each}" for each in ("env", *(f"-u {name}" for name in names)))
    made, _ = converted(tmp_path, f"{before}\nsrun torchrun {TWO} t.py\n")
    end = f"{env} \\\n    srunddp t.py\n" if names else " srunddp t.py\n"
    assert made == f"{before}\nsrun {ON_TWO.removesuffix(' --gpu-bind=none')}{end}"


@pytest.mark.parametrize(
    ("variable", "launch", "made"),
    [
        (
            "--nodes=2 --ntasks=2",
            "srun -l $OPTS -u torchrun",
            f"srun -l $OPTS {SIZE} {{}} -u srunddp",
        ),
        ("--label", "srun $OPTS -n2 torchrun", f"srun {SIZE} {{}} $OPTS srunddp"),
        (
            '-l"\nOPTS+=" -n 2',
            "srun $OPTS torchrun",
            f"srun $OPTS {SIZE} {{}} srunddp",
        ),
        ("wrapper", "srun $OPTS -n2 torchrun", f"srun {SIZE} {{}} $OPTS -n2 srunddp"),
    ],
)
def test_options_in_a_variable_do_not_undo_the_size(
    variable: str, launch: str, made: str, tmp_path: Path
) -> None:
    text, notes = converted(tmp_path, f'OPTS="{variable}"\n{launch} {TWO} t.py\n')
    assert text.endswith(f"\n{made.format('--kill-on-bad-exit=1')} t.py\n")
    assert bool(notes) == (variable == "wrapper")


def test_options_in_an_array_do_not_undo_the_size(tmp_path: Path) -> None:
    begin = "OPTS=(--label)\nOPTS+=(--nodes=2 --ntasks=2)\n"
    text, notes = converted(tmp_path, f'{begin}srun "${{OPTS[@]}}" torchrun {TWO} t.py\n')
    assert text == f'{begin}srun "${{OPTS[@]}}" {SIZE} --kill-on-bad-exit=1 srunddp t.py\n'
    assert notes == []


@pytest.mark.parametrize(
    ("launch", "made"),
    [
        (
            f"srun -N2 -l \\\n  x.sif bash -c 'torchrun {TWO} --rdzv-id=\\$J t.py --x \"a b\"'",
            f'srun {ON_TWO} -l x.sif srunddp t.py --x "a b"',
        ),
        (
            f'bash -c "torchrun {TWO} --node-rank \\$SLURM_PROCID -m pkg.train" 2>&1 | tee log',
            f"srun {ON_TWO} srunddp -m pkg.train 2>&1 | tee log",
        ),
        (
            "N=2\nsrun sh -c 'torchrun --nnodes=$N --nproc-per-node=4 t.py'",
            f"N=2\nsrun {ON_TWO} srunddp t.py".replace(
                "2 --ntasks=8", '"$N" --ntasks="$((N * 4))"'
            ),
        ),
        (
            "srun bash -c 'torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 t.py'",
            f"srun {ON_TWO} srunddp t.py".replace(
                "2 --ntasks=8", '"$SLURM_NNODES" --ntasks="$((SLURM_NNODES * 4))"'
            ),
        ),
    ],
)
def test_a_shell_for_the_launch_alone_is_left_out(launch: str, made: str, tmp_path: Path) -> None:
    text, notes = converted(tmp_path, f"{HEAD}{launch}\n")
    assert text == f"{HEAD}{made}\n"
    line = (HEAD + launch).count("\n") + 1
    assert tells(notes[-1], f"{tmp_path}/job.sh:{line}", " -c is left out")


@pytest.mark.parametrize(
    "launch",
    [
        f"srun bash -c 'cd x && torchrun {TWO} t.py'",
        f"srun bash -c 'torchrun {TWO} t.py > out'",
        f"srun bash -c 'torchrun {TWO} t.py &'",
        f"srun bash -c 'torchrun {TWO} t.py # all'",
        f"srun bash -c 'torchrun {TWO} t.py $SLURM_NODEID'",
        f"srun bash -c 'torchrun {TWO} t.py --name=\\$X'",
        f"srun bash -c 'torchrun {TWO} *.py'",
        f"srun bash -c 'A=1 torchrun {TWO} t.py'",
        f"srun bash -lc 'torchrun {TWO} t.py'",
        f"srun bash -c 'torchrun {TWO} t.py' name",
        "srun bash -c 'torchrun --nnodes=2 --nproc-per-node=$GPUS_OF_THE_IMAGE t.py'",
        "srun -N1 bash -c 'torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 t.py'",
        "O=\"-l -N1\"\nsrun $O bash -c 'torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 t.py'",
        f"ssh $H bash -c 'torchrun {TWO} t.py'",
        f"srun bash -c 'torchrun {TWO} --no-python t.sh'",
        f"srun bash -c 'torchrun {TWO} a.py'\nsrun bash -c 'torchrun {TWO} b.py'",
    ],
)
def test_a_shell_that_may_do_more_is_refused(launch: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torchrun in quotes"):
        converted(tmp_path, f"{HEAD}{launch}\n")


def test_the_name_of_the_script_is_no_second_launch(tmp_path: Path) -> None:
    _, notes = converted(
        tmp_path, "srun torchrun \\\n  --nproc-per-node=2 \\\n  my_torchrun.py 5\n"
    )
    assert notes == []


def test_options_of_site_and_user_are_carried(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(
        "srun --mpi=pmix accelerate launch --num_processes=2 --mixed_precision=bf16"
        " --max_restarts=1 -m pkg.train\n"
    )
    carried = Carried(
        srun=["--mpi=pmi2", "--label"],
        program="/opt/a b/srunddp",
        run=["--ifaces=/etc/ifaces.conf"],
        env=["NCCL_DEBUG=$WARN"],
    )
    made, notes = convert(str(tmp_path / "job.sh"), carried)
    step = '--nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task="$((SLURM_CPUS_ON_NODE / 2))"'
    assert made == (
        f"srun {step} --kill-on-bad-exit=1 --label --mpi=pmix \\\n    env \\\n"
        "    NCCL_DEBUG='$WARN' \\\n    ACCELERATE_MIXED_PRECISION=bf16 \\\n"
        "    '/opt/a b/srunddp' --restarts=1 --ifaces=/etc/ifaces.conf -m pkg.train\n"
    )
    assert tells(notes[0], "--mpi=pmi2", "left out", "--mpi")
    (tmp_path / "job.sh").write_text(
        'O="--mpi=pmix -n1"\nsrun $O torchrun --nproc-per-node=2 t.py\n'
    )
    made, notes = convert(str(tmp_path / "job.sh"), carried)
    assert f"\nsrun $O {step} --kill-on-bad-exit=1 --label \\\n" in made
    assert tells(notes[0], "--mpi=pmi2", "left out", "--mpi")


STEP = '--nodes={} --ntasks={} --ntasks-per-node={} --cpus-per-task="$((SLURM_CPUS_ON_NODE / {}))"'
LAUNCHER = """export LAUNCHER="python -u -m torch.distributed.run \\
    --nproc_per_node $GPUS --nnodes 2 \\
    --node_rank \\$SLURM_PROCID --tee 3"
"""
ON_ALL = STEP.format("2", '"$((2 * GPUS))"', '"$GPUS"', "GPUS") + " --kill-on-bad-exit=1"


@pytest.mark.parametrize(
    ("text", "found", "written"),
    [
        (
            f'{LAUNCHER}PROGRAM="train.py --lr 1"\nexport CMD="$LAUNCHER $PROGRAM"\necho $CMD\n'
            'srun $ARGS --jobid $J bash -c "$CMD" 2>&1 | tee log\n',
            "job.sh:1: python -u -m torch.distributed.run in the variable LAUNCHER",
            f"write in line 7: srun {ON_ALL} $ARGS --jobid $J srunddp --prefix $PROGRAM",
        ),
        (
            f'{LAUNCHER}srun bash -c "rm -rf /tmp/x && $LAUNCHER --role a: $CMD"\n',
            "in the variable LAUNCHER, with rm -rf /tmp/x",
            f"once a rank; write in line 4: srun {ON_ALL} srunddp --prefix $CMD",
        ),
        (
            f"{LAUNCHER}srun ${{LAUNCHER}} train.py --lr 1\n",
            "in the variable LAUNCHER",
            f"write in line 4: srun {ON_ALL} srunddp --prefix train.py --lr 1",
        ),
        (
            f'{LAUNCHER}if [ $R ]; then\n  LAUNCHER="${{LAUNCHER}} --max_restarts $R"\nfi\n'
            "srun $LAUNCHER train.py\n",
            "job.sh:1: python -u -m torch.distributed.run in the variable LAUNCHER",
            f'write in line 7: srun {ON_ALL} srunddp --restarts="$R" --prefix train.py',
        ),
        (
            f'{LAUNCHER}eval "$LAUNCHER train.py"\n',
            "in the variable LAUNCHER",
            f"write in line 4: srun {ON_ALL} srunddp --prefix train.py",
        ),
        (
            LAUNCHER,
            "in the variable LAUNCHER",
            f"write as a command: srun {ON_ALL} srunddp --prefix SCRIPT ARGUMENTS",
        ),
        (
            "#SBATCH --gres=gpu:8\nsrun singularity run $SIF bash -c 'A=1 torchrun"
            " --nproc_per_node=8 t.py'\n",
            "job.sh:2: torchrun in quotes; expected a command",
            f"in line 2: A=1 srun {STEP.format(1, 8, 8, 8)} --kill-on-bad-exit=1 --gpu-bind=none"
            " singularity run $SIF srunddp t.py",
        ),
        (
            'RUN="accelerate launch --config_file=c.yaml --num_processes 8 t.py"\n'
            'srun bash -c "$RUN"\n',
            "job.sh:1: accelerate launch in the variable RUN",
            'write in line 2, with these variables for VALUES: srun --nodes="$SLURM_NNODES"'
            ' --ntasks=8 --ntasks-per-node="$((8 / SLURM_NNODES))" --cpus-per-task="$(('
            '$SLURM_CPUS_ON_NODE / $((8 / SLURM_NNODES))))" --kill-on-bad-exit=1 env VALUES srunddp'
            " t.py",
        ),
        (
            "if a; then\n  torchrun a.py\nelse\n  torchrun --nproc-per-node=2 b.py > out 2>&1 &\n"
            "fi\n",
            "2 commands with",
            f"in line 4: srun {STEP.format(1, 2, 2, 2)} --kill-on-bad-exit=1 srunddp b.py > out"
            " 2>&1 &",
        ),
        (
            "if a; then torchrun a.py; else torchrun --nproc-per-node=2 b.py; fi\n",
            "2 commands with",
            f"in line 1: srun {STEP.format(1, 2, 2, 2)} --kill-on-bad-exit=1 srunddp b.py",
        ),
        (
            "srun -n8 python -u train.py --lr 1\n",
            "no commands with torchrun, accelerate or deepspeed",
            "in line 1: srun -n8 srunddp train.py --lr 1",
        ),
        (
            "srun python -c 'import torch' && srun -n 4 python -m pkg.train\n",
            "no commands with",
            "in line 1: srun -n 4 srunddp -m pkg.train",
        ),
        (
            "#SBATCH --nodes=2 --ntasks=2 --gpus-per-task=4\nsrun bash -c 'torchrun --nnodes=2"
            " --nproc-per-node=4 t.py $X'\n",
            "job.sh:2: torchrun in quotes",
            "write --gpus-per-node=4 for --gpus-per-task=4 in line 1; write in line 2: srun ",
        ),
        (
            "D=$SLURM_GPUS_PER_TASK\nsrun bash -c 'torchrun --nproc-per-node=$D t.py'\n",
            "job.sh:2: torchrun in quotes",
            "write the number for SLURM_GPUS_PER_TASK; write in line 2: srun ",
        ),
        (
            "#SBATCH --gpus-per-task=4\nsrun bash -c 'torchrun t.py'\n",
            "job.sh:2: torchrun in quotes",
            "write --gpus-per-node for --gpus-per-task; write in line 2: srun ",
        ),
        (
            "ssh $H 'exec torchrun --nproc-per-node=2 t.py'\n",
            "job.sh:1: torchrun in quotes",
            f"not ssh; write in line 1: srun {STEP.format(1, 2, 2, 2)} --kill-on-bad-exit=1"
            " srunddp t.py",
        ),
        (
            "srun python $(which torchrun) --nproc-per-node=2 t.py\n",
            "no commands with",
            "write one task for each GPU, and srunddp for the launcher: ",
        ),
        (
            "#SBATCH --gres=gpu:8\nsrun hostname\n",
            "no commands with",
            "srun --ntasks-per-node=GPUS",
        ),
        (
            'F=f.yaml\nL="accelerate launch --config_file $F --machine_rank \\$SLURM_NODEID"\n'
            'srun bash -c "$L t.py" >out 2>&1\n',
            "job.sh:2: accelerate launch in the variable L",
            'for VALUES: srun --nodes="$SLURM_NNODES" --ntasks="$((SLURM_NNODES *'
            ' SLURM_GPUS_ON_NODE))" --ntasks-per-node="$SLURM_GPUS_ON_NODE" --cpus-per-task="$(('
            'SLURM_CPUS_ON_NODE / SLURM_GPUS_ON_NODE))" --kill-on-bad-exit=1 env VALUES srunddp'
            " t.py >out 2>&1",
        ),
        (
            'CLEAN="rm -rf /tmp/own && "\nL="torchrun --nproc-per-node=2"\n'
            'CMD="$CLEAN $L t.py"\nsrun -l bash -c "$CMD" 2>&1 | tee log  # both\n',
            "in the variable L, with rm -rf /tmp/own; ",
            f"in line 4: srun {STEP.format(1, 2, 2, 2)} --kill-on-bad-exit=1 -l srunddp t.py 2>&1 |"
            " tee log",
        ),
        (
            'OPTS=" --wait=9 --nodes=2 \\\n --ntasks=2"\nL="torchrun --nnodes=2 --nproc-per-node=4"'
            '\nsrun $OPTS -l bash -c "$L t.py"\n',
            "in the variable L",
            f"in line 4: srun $OPTS {STEP.format(2, 8, 4, 4)} --kill-on-bad-exit=1 -l srunddp t.py",
        ),
        (
            "srun --gpu-bind=closest bash -c 'cd x; torchrun t.py'\n",
            "torchrun in quotes, with cd x",
            "; --gpu-bind=closest, with which a rank does not see all GPUs of its node: remove it",
        ),
        (
            "A=1\nsrun -n8 apptainer exec x.sif bash -c 'export RANK=$SLURM_PROCID; python -u t.py"
            " --lr 1' >out\n",
            "no commands with",
            "takes the place of python; write in line 2: srun -n8 apptainer exec x.sif srunddp t.py"
            " --lr 1 >out",
        ),
        (
            'RUN="python -u"\nCMD="cd x && $RUN t.py"\n'
            'srun $OPTS bash -c "RANK=\\$SLURM_PROCID $CMD"',
            "no commands with",
            "once a rank; srunddp takes the place of python; write in line 3: srun $OPTS srunddp"
            " t.py",
        ),
        (
            'CMD="sbatch --parsable -N2 --time 9 \\\n --array=0-3 -W jobs/one.slurm a"\n'
            "ID=$($CMD)\n",
            "no commands with",
            "line 1 submits another job script: convert jobs/one.slurm by --from",
        ),
        (
            "for i in 1 2; do\n  X=$i sbatch --requeue -p gpu one.sh $i\ndone\n",
            "no commands with",
            "line 2 submits another job script: convert one.sh by --from",
        ),
        (
            "ID=$(sbatch --parsable one.sh)\n",
            "no commands with",
            "line 1 submits another job script: convert one.sh by --from",
        ),
        (
            "sbatch -N 2 <<END\ntorchrun t.py\nEND\n",
            "no commands with",
            "line 1 submits another job: write its script to a file, and convert that by --from",
        ),
        (
            'L="torchrun --nproc-per-node=2"\nL+=" --max-restarts=3"\nsrun $L t.py\n',
            "job.sh:1: torchrun in the variable L",
            "--kill-on-bad-exit=1 srunddp --restarts=3 t.py",
        ),
        (
            'mpirun python t.py\nsbatch --dependency=afterok:$SLURM_JOB_ID "$0"\n',
            "no commands with",
            "write one task for each GPU, and srunddp for the launcher: ",
        ),
    ],
)
def test_a_refusal_has_the_line_to_write(
    text: str, found: str, written: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, text)
    assert found in str(error.value)
    assert error.value.hint.endswith(written) or written in error.value.hint


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no commands with torchrun, accelerate or deepspeed; expected one such command -> "),
        ("python train.py\n", "no commands"),
        ('srun bash -c "\ntorchrun t.py\n"\n', "job.sh:1: torchrun in quotes; "),
        (
            "# torchrun\nA=(torchrun t.py)\ncat <<E\ntorchrun t.py\nE\n",
            "job.sh:2: torchrun in the variable A; ",
        ),
        (
            "torchrun a.py\ntorchrun b.py\n",
            "2 commands with torchrun, accelerate or deepspeed, line 1, line 2; ",
        ),
        ("for i in 1 2; do\n  torchrun t.py &\ndone\n", "job.sh:2: a launch in a loop"),
        (
            "if a; then for i in 1; do b; done; fi\nfor i in 1; do torchrun t.py; done\n",
            "job.sh:2: a launch in a loop",
        ),
        ('torchrun "${ARGS[@]}" t.py\n', "${ARGS[@]} before the script may hold options"),
        ('torchrun "$@"\n', "$@ before the script may hold options"),
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
        (
            "#SBATCH --nodes=1 --ntasks=1 --gpus-per-task=4\n"
            "torchrun --nproc-per-node=$SLURM_GPUS_PER_TASK t.py\n",
            "job.sh:2: SLURM_GPUS_PER_TASK, which Slurm sets for --gpus-per-task only; ",
        ),
        (
            "CUDA_VISIBLE_DEVICES=1,2 torchrun t.py\n",
            "job.sh:1: CUDA_VISIBLE_DEVICES=1,2 before torchrun, which srun sets anew; ",
        ),
        (
            "export CUDA_VISIBLE_DEVICES=1,2\n\ntorchrun t.py\n",
            "job.sh:3: CUDA_VISIBLE_DEVICES=1,2 in line 1, which srun sets anew; ",
        ),
        ("$SRUN torchrun t.py\n", "job.sh:1: $SRUN before torchrun; "),
        ("time ssh n1 torchrun t.py\n", "job.sh:1: ssh before torchrun; "),
        ("accelerate launch t.py\n", "job.sh:1: accelerate launch without --num_processes; "),
        (
            "torchrun --nproc-per-node=2 $A $B\n",
            "job.sh:1: $A before the script may hold options",
        ),
        (
            "A='--tee 3'\ntorchrun --nproc-per-node=2 $A t\n",
            "job.sh:2: $A before the script, set to options in line 1",
        ),
        ("export PET_NNODES=2\ntorchrun t.py\n", "job.sh:2: PET_NNODES, which torchrun takes"),
        ("srun nsys profile -o a torchrun t.py\n", "job.sh:1: nsys, whose file all ranks"),
        (
            "srun --cpu-bind=mask_cpu:0x1 torchrun t.py\n",
            "job.sh:1: --cpu-bind=mask_cpu:0x1, written for one task",
        ),
        (
            "srun --gpu-bind=closest torchrun t.py\n",
            "job.sh:1: --gpu-bind=closest, with which a rank does not see all GPUs",
        ),
        ("srun --gpu-bind map_gpu:0 torchrun t.py\n", "job.sh:1: --gpu-bind map_gpu:0, with"),
        ("pip install deepspeed\npython t.py --deepspeed d.json\n", "no commands with"),
    ],
)
def test_what_is_not_one_launch_is_refused(text: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, text)
    assert found in str(error.value)
    assert error.value.hint


@pytest.mark.parametrize(
    "option",
    [
        "--nproc_per_node=$(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l)",
        "--nproc-per-node $(python -c 'import torch; print(torch.cuda.device_count())')",
        '--nproc-per-node="$(nvidia-smi -L | grep -c "GPU ")"',
        "--nproc-per-node=\"`grep -c 'GPU' list`\"",
        "--tee=3 --log-dir ~/logs",
        "--tee=3 --log-dir /x/my\\ logs",
        "--tee=3 --log-dir='$HOME/logs'",
        '--tee=3 --log-dir="it\'s"',
    ],
)
def test_a_value_that_needs_its_quotes_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="with quotes, a backslash or ~ in its value") as error:
        converted(tmp_path, f"torchrun {option} t.py\n")
    assert option.removeprefix("--tee=3 ") in error.value.found
    assert error.value.hint.startswith("set a variable")


@pytest.mark.parametrize(
    ("option", "made"),
    [
        ('--rdzv-endpoint="$(scontrol show hostnames "$L" | awk "{print $1}")":1', ""),
        ("--rdzv-endpoint $(f | awk '{print $1}'):1", ""),
        ("--tee=3 --log-dir='my logs'", "--log-dir='my logs' --show-ranks=all --prefix "),
        ('--tee=3 --log-dir "$D/${E:-x}/$(f $(g))"', '--log-dir="$D/${E:-x}/$(f $(g))" '),
    ],
)
def test_a_value_that_is_clear_or_left_out_is_converted(
    option: str, made: str, tmp_path: Path
) -> None:
    text, _ = converted(tmp_path, f"torchrun {option} t.py\n")
    assert f"--kill-on-bad-exit=1 srunddp {made}" in text
    assert text.endswith(" t.py\n")


@pytest.mark.parametrize(
    "before",
    [
        "singularity exec --cleanenv",
        "singularity exec --nv -e",
        "apptainer exec -C",
        "/opt/bin/apptainer exec -ce",
        "env -i",
        "/usr/bin/env -",
        "env --ignore-environment",
    ],
)
def test_an_option_that_removes_the_variables_of_srun_is_refused(
    before: str, tmp_path: Path
) -> None:
    program, *_, option = before.split()
    found = f"{option} of {program}, which removes the variables of srun"
    with pytest.raises(ConfigError, match=re.escape(found)) as error:
        converted(tmp_path, f"srun -l {before} PATH=$PATH torchrun t.py\n")
    assert error.value.hint.startswith("remove it")


@pytest.mark.parametrize(
    "text",
    [
        "export HF_HOME={0}/huggingface\n{1}",
        "export XDG_CACHE_HOME='{0}'\n{1}",
        "HF_HOME={0}/huggingface {1}",
        "unused=1\nsrun env HF_HOME={0}/huggingface {1}",
    ],
)
def test_the_default_config_is_that_of_the_job(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    default = tmp_path / "huggingface" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.touch()
    launch = "accelerate launch --num_processes=2 t.py\n"
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, text.format(tmp_path, launch))
    assert tells(error.value.found, str(default), "accelerate launch reads")


def test_a_default_config_behind_a_variable_is_noted(tmp_path: Path) -> None:
    launch = "accelerate launch --num_processes=2 t.py\n"
    _, notes = converted(tmp_path, f"export HF_HOME=$SCRATCH/hf\n{launch}")
    assert tells(notes[0], "$SCRATCH/hf/accelerate/default_config.yaml", "not read", "options")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ConfigError, match="expected a job script -> correct --from"):
            convert(str(path))
    (tmp_path / "job.sh").write_bytes(b"torchrun \xff")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        convert(str(tmp_path / "job.sh"))


def test_a_variable_that_doubles_itself_does_not_take_for_ever(tmp_path: Path) -> None:
    doubling = 'A="torchrun $A ${A} t.py"\n' * 40
    with pytest.raises(ConfigError, match="torchrun in the variable A"):
        converted(tmp_path, f'{doubling}srun bash -c "$A"\n')


PAGE = (ROOT / "docs" / "coming-from" / "torchrun.md").read_text()
SECTION = PAGE.split("\n## A job script\n")[1].split("\n## ")[0]
BLOCKS = re.findall(r"^```bash\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("before", "after"), [*zip(BLOCKS[::2], BLOCKS[1::2], strict=True)])
def test_the_examples_of_the_page_are_what_is_written(
    before: str, after: str, tmp_path: Path
) -> None:
    if "LAUNCHER=" not in before:
        assert converted(tmp_path, before)[0] == after
        return
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, before)
    assert tells(error.value.found, "job.sh:2", "LAUNCHER", after.splitlines()[1])
    assert error.value.hint.endswith(f"write in line 3: {after.splitlines()[-1]}")


def test_the_page_has_an_example_of_each_form() -> None:
    assert len(BLOCKS) == 2 * 6
