"""What is asked of a job is looked at before a script is written of it, and every refusal names its hint."""

from __future__ import annotations

from typing import Any

import pytest

from srunddp.errors import ConfigError
from srunddp.sbatch import validate
from srunddp.sbatch.formats import seconds
from srunddp.sbatch.spec import MpirunJob, SlurmJob, gpu_types


def refusal(interactive: bool = False, kind: type[Any] = SlurmJob, /, **fields: Any) -> str:
    with pytest.raises(ConfigError) as error:
        validate.check(kind(**{"script": "train.py", **fields}), interactive=interactive)
    assert error.value.expected
    assert error.value.hint
    return str(error.value)


def notes(kind: type[Any] = SlurmJob, **fields: Any) -> str:
    job = kind(**{"script": "train.py", **fields})
    validate.check(job)
    return "\n".join(validate.notes(job))


@pytest.mark.parametrize(
    ("time", "value"),
    [
        ("30", 1800), ("30:15", 1815), ("4:30:15", 16215), ("2-3", 183600), ("2-3:30", 185400), ("2-3:30:15", 185415),
        ("UNLIMITED", float("inf")), ("INFINITE", float("inf")), ("0-04:00:00", 14400),
    ],
)  # fmt: skip
def test_every_way_in_which_slurm_takes_a_time_is_taken_and_understood(time: str, value: float) -> None:
    validate.check(SlurmJob(script="train.py", time=time))
    assert seconds(time) == value


@pytest.mark.parametrize("time", ["4h", "1:2:3:4", "", "-1", "1-", "1-2:3:4:5", "1.5", "4 hours", "tomorrow"])
def test_a_time_that_slurm_would_not_take_is_refused(time: str) -> None:
    assert "--time" in refusal(time=time)


@pytest.mark.parametrize("mem", ["64G", "64000", "0", "1T", "512mb"])
def test_a_size_is_taken(mem: str) -> None:
    validate.check(SlurmJob(script="train.py", mem=mem))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mem": "64 gigabytes"}, "--mem '64 gigabytes'; expected a number with K, M, G or T -> write such as 64G"),
        ({"gpus_per_node": "all"}, "--gpus-per-node 'all'; expected a number, or TYPE:NUMBER"),
        ({"gres": "gpu:"}, "--gres 'gpu:'; expected NAME:NUMBER or NAME:TYPE:NUMBER -> write such as gpu:4"),
        ({"gres": "gpu:4", "gpus_per_node": "4"}, "--gres and --gpus-per-node; expected one of them"),
        ({"array": "0..7"}, "--array '0..7'; expected numbers and ranges"),
        ({"dependency": "4711"}, "--dependency '4711'; expected TYPE:JOB or singleton -> write such as afterok:4711"),
        ({"signal": "USR9@60"}, "--signal 'USR9@60'; expected a signal's name or number"),
        ({"signal": "B:USR2@60"}, "expected a signal for the ranks, not the batch shell -> write USR2@60"),
        ({"nodes": 0}, "--nodes 0; expected 1 or more"),
        ({"monitor": 0}, "--monitor 0; expected 1 or more"),
        ({"nodelist": "node[01-05]", "nodes": 2}, "--nodelist has 5 nodes, --nodes 2; expected at most as many"),
        ({"nodelist": "node[01-"}, "--nodelist"),
        ({"job_name": "a/b"}, "--job-name 'a/b'; expected no slash"),
        ({"log_dir": "a\\b"}, "--log-dir"),
        ({"backend": "nccl"}, "--backend nccl without GPUs; expected a GPU for each rank -> add --gpus-per-node=N"),
        (
            {"backend": "nccl", "gpus_per_node": "4", "ntasks_per_node": 8},
            "8 ranks for 4 GPUs on each node; expected at most one rank for each GPU",
        ),
        ({"venv": "a", "conda": "b"}, "--venv and --conda; expected one environment"),
        ({"venv": "a", "container": "b.sif"}, "--venv and --container; expected one environment"),
        ({"stage": True}, "--stage without a virtual environment"),
        (
            {"stage": True, "venv": "a", "monitor": 5},
            "--monitor with --stage; expected a log folder that",
        ),
        ({"data": ("d",)}, "--data without --stage"),
        ({"container_mounts": ("a:b",)}, "--container-mounts without --container-image"),
        ({"env": ("A",)}, "--env 'A'; expected NAME=VALUE"),
        ({"env": ("A B=1",)}, "--env 'A B=1'; expected NAME=VALUE"),
        ({"env": ("MASTER_ADDR=n1",)}, "--env MASTER_ADDR; expected no variable that is set by srunddp, for each rank"),
        ({"env": ("RANK=0",)}, "--env RANK; expected no variable that is set by srunddp, for each rank"),
        ({"env": ("SLURM_NTASKS=4",)}, "--env SLURM_NTASKS; expected no variable that is set by Slurm"),
        ({"modules": ("CUDA,NCCL",)}, "--modules 'CUDA,NCCL'; expected one module"),
        (
            {"run_options": ("verbose",)},
            "--run-options 'verbose'; expected an option of srunddp run -> write",
        ),
        ({"script": None}, "no script; expected a training script"),
        ({"account": "x" * 5000}, "--account has 5000 letters; expected at most 4000"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_with_its_hint(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(**fields)


@pytest.mark.parametrize("fields", [{"requeue": True}, {"array": "0-3"}], ids=str)
def test_what_salloc_does_not_know_is_refused(fields: dict[str, Any]) -> None:
    validate.check(SlurmJob(script="train.py", **fields))
    assert "--salloc with --" in refusal(True, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hosts": "a:2,b;c:2"}, "--hosts 'b;c:2'; expected HOST or HOST:RANKS"),
        ({"hosts": "a", "hostfile": "f"}, "--hosts and --hostfile; expected one of them"),
        ({"nodes": 2}, "--nodes 2 without hosts"),
        (
            {"hosts": "a:8", "backend": "nccl", "gpus_per_node": "4", "ntasks_per_node": 4},
            "--hosts: a has 8 ranks; expected at most 4 ranks on a host, one for each GPU",
        ),
    ],
    ids=str,
)
def test_hosts_that_mpirun_cannot_use_are_refused(fields: dict[str, Any], said: str) -> None:
    assert refusal(False, MpirunJob, **fields).startswith(said)


@pytest.mark.parametrize(
    "dependency", ["afterok:1", "afterany:1:2+30,singleton", "after:3?afternotok:4", "afterok:1_2"]
)
def test_dependencies_of_every_kind_are_taken(dependency: str) -> None:
    validate.check(SlurmJob(script="train.py", dependency=dependency))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"env": ("NCCL_IB_ENABLE=1",)},
         "--env: NCCL_IB_ENABLE is no variable that NCCL is known to read; did you mean NCCL_IB_DISABLE?"),
        ({"env": ("NCCL_DEBUGG=INFO",)}, "did you mean NCCL_DEBUG?"),
        ({"env": ("NCCL_SOCKET_IFNAME=ib0",)}, "NCCL_SOCKET_IFNAME=ib0 is for every node, and wins over ifaces.conf"),
        ({"gpus_per_node": "4", "ntasks_per_node": 8}, "8 ranks share 4 GPUs on each node"),
        ({"gres": "gpu:4", "ntasks_per_node": 1}, "1 rank for 4 GPUs on each node"),
        ({"requeue": True}, "no argument such as --resume=auto"),
    ],
    ids=str,
)  # fmt: skip
def test_what_may_be_meant_otherwise_is_said(fields: dict[str, Any], said: str) -> None:
    assert said in notes(**fields)


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_NET_GDR_LEVEL", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "OMP_X"])
def test_nothing_is_said_of_variables_that_are_known(name: str) -> None:
    assert notes(env=(f"{name}=1",)) == ""


@pytest.mark.parametrize(
    ("gpus_per_node", "gres", "types"),
    [
        ("4", None, {"": 4}),
        ("a100:4", None, {"a100": 4}),
        ("a100:2,v100:1", None, {"a100": 2, "v100": 1}),
        (None, "gpu:4", {"": 4}),
        (None, "gpu:a100:4,tmpfs:100G", {"a100": 4}),
        (None, "gpu", {"": 1}),
        (None, "gpu:a100", {"a100": 1}),
        (None, "shard:8", {}),
        (None, None, {}),
    ],
)
def test_gpus_are_counted_in_slurms_words(gpus_per_node: str | None, gres: str | None, types: dict[str, int]) -> None:
    assert gpu_types(gpus_per_node, gres) == types


def test_there_is_one_rank_for_each_gpu_unless_said_otherwise() -> None:
    assert SlurmJob(gres="gpu:a100:4").tasks == 4
    assert SlurmJob(gpus_per_node="8", ntasks_per_node=2).tasks == 2
    assert SlurmJob().tasks == 1
    assert MpirunJob(hosts="a:2,b", gpus_per_node="4").slots == {"a": 2, "b": 4}
