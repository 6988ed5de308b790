"""The limits of a partition, from what Slurm prints."""

from __future__ import annotations

from typing import Any

import pytest

from srunddp.errors import ConfigError
from srunddp.sbatch import partition, validate
from srunddp.sbatch.partition import Partition
from srunddp.sbatch.spec import SlurmJob

# As Slurm 22.05 and 24.11 print it, shortened in the middle.
SCONTROL = """\
PartitionName=gpu AllowGroups=ALL Default=YES QoS=N/A DefaultTime=01:00:00 MaxNodes=8 MaxTime=2-00:00:00 State=UP \
TotalNodes=12 DefMemPerCPU=4000 MaxMemPerNode=UNLIMITED
PartitionName=cpu Default=NO DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP DefMemPerNode=NONE
PartitionName=old AllowGroups=ALL Default=NO DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED State=DRAIN
"""
SINFO = """\
gpu|4|64|512000|gpu:a100:4(S:0-1)
gpu|8|128|1024000|gpu:h100:8(S:0-1),shard:8
cpu|20|32|128000|(null)
broken line
"""


def known(scontrol: str = SCONTROL, sinfo: str = SINFO) -> tuple[Partition, ...]:
    answers = {"scontrol": scontrol, "sinfo": sinfo}
    return partition.partitions({}, lambda command, _: answers[command[0]])


def judged(**fields: Any) -> None:
    job = SlurmJob(**{"script": "train.py", **fields})
    partition.check_limits(job, partition.chosen(job, known()))


def test_what_scontrol_and_sinfo_print_is_understood() -> None:
    gpu, cpu, old = known()
    assert (gpu.name, gpu.default, gpu.max_time, gpu.default_time, gpu.max_nodes) == (
        "gpu", True, "2-00:00:00", "01:00:00", 8,
    )  # fmt: skip
    assert [(kind.count, kind.cpus, kind.memory, dict(kind.gpus)) for kind in gpu.kinds] == [
        (4, 64, 512000, {"a100": 4}),
        (8, 128, 1024000, {"h100": 8}),
    ]
    assert (cpu.max_time, cpu.max_nodes, old.state) == ("", float("inf"), "DRAIN")


@pytest.mark.parametrize("printed", ["", "slurm_load_partitions: Unable to contact slurm controller\n", "\x00\xff|||"])
def test_where_slurm_says_nothing_nothing_is_judged(printed: str) -> None:
    assert known(printed, printed) == ()
    job = SlurmJob(script="train.py")
    assert "no --time: the partition's default" in list(partition.defaults(job, []))


def test_a_machine_without_slurm_has_no_partitions() -> None:
    assert partition.partitions({"PATH": "/nowhere"}) == ()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gpus_per_node": "8", "nodes": 8},
        {"gpus_per_node": "a100:4", "nodes": 4, "time": "48:00:00", "cpus_per_task": 16},
        {"gres": "gpu:h100:8", "nodes": 8, "mem": "1000G"},
        {"partition": "cpu", "nodes": 20, "cpus_per_task": 32, "time": "30-0"},
        {"partition": "cpu,gpu", "time": "30-0"},
        {"mem": "0"},
    ],
    ids=str,
)
def test_what_is_within_the_limits_passes(fields: dict[str, Any]) -> None:
    judged(**fields)


def test_a_least_value_is_no_limit() -> None:
    """As sinfo shows it of nodes that differ."""
    job = SlurmJob(script="train.py", cpus_per_task=100, mem="2T")
    partition.check_limits(job, partition.chosen(job, known(sinfo="gpu|4|64+|512000+|gpu:a100:4\n")))


@pytest.mark.parametrize("kind", ["2080ti", "1g.5gb", "3090", "a100-sxm4"])
def test_gpus_may_be_of_a_type_that_begins_with_a_digit(kind: str) -> None:
    partitions = known(sinfo=f"gpu|4|64|512000|gpu:{kind}:4(S:0-1)\n")
    for fields in ({"gpus_per_node": "4"}, {"gpus_per_node": f"{kind}:4"}, {"gres": f"gpu:{kind}:4,lscratch:100g"}):
        job = SlurmJob(script="train.py", **fields)  # type: ignore[arg-type]
        validate.check(job)
        partition.check_limits(job, partition.chosen(job, partitions))
        assert job.tasks == 4


def test_jobs_may_wait_in_a_partition_that_is_down_and_a_qos_has_limits_of_its_own() -> None:
    down = known(scontrol=SCONTROL.replace("State=UP", "State=DOWN"))
    for fields in ({}, {"qos": "long", "time": "9-0", "nodes": 9}):
        job = SlurmJob(script="train.py", **fields)  # type: ignore[arg-type]
        partition.check_limits(job, partition.chosen(job, down))


def test_the_partition_that_the_shell_exports_is_the_one_that_is_judged() -> None:
    job = SlurmJob(script="train.py", partition="gpu")
    assert partition.wished(job, {"SBATCH_PARTITION": "cpu"}, interactive=False).partition == "cpu"
    assert partition.wished(job, {"SALLOC_PARTITION": "cpu"}, interactive=True).partition == "gpu"
    assert partition.wished(SlurmJob(script="x"), {"SALLOC_PARTITION": "cpu"}, interactive=True).partition == "cpu"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"partition": "gpus"}, "--partition 'gpus'; expected one of cpu, gpu, old -> did you mean gpu?"),
        ({"partition": "old"}, "partition old is DRAIN; expected one that is up"),
        ({"time": "2-00:00:01"}, "--time 2-00:00:01; expected at most 2-00:00:00 in partition gpu -> say --time=2-00"),
        ({"time": "UNLIMITED"}, "--time UNLIMITED; expected at most 2-00:00:00"),
        ({"nodes": 9}, "--nodes 9; expected at most 8 for a job in partition gpu"),
        ({"cpus_per_task": 129}, "--cpus-per-task 129 for 1 on each node is 129 CPUs; expected at most 128"),
        ({"gpus_per_node": "9"}, "--gpus-per-node 9; expected what a node of partition gpu has: 4 a100, 8 h100"),
        ({"gpus_per_node": "a100:8"}, "--gpus-per-node a100:8; expected what a node"),
        ({"gres": "gpu:v100:1"}, "--gres gpu:v100:1; expected what a node"),
        (
            {"partition": "cpu", "gpus_per_node": "1"},
            "--gpus-per-node 1; expected what a node of partition cpu has: none",
        ),
        ({"mem": "2T"}, "--mem 2T; expected at most 1024000M on a node of partition gpu"),
        ({"gpus_per_node": "a100:4", "nodes": 5}, "--nodes 5, but 4 of partition gpu have what is asked of each"),
    ],
    ids=str,
)
def test_what_is_beyond_them_is_refused_with_the_limit(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        judged(**fields)
    assert str(error.value).startswith(said)
    assert error.value.hint


def test_what_the_site_decides_is_said_with_its_value() -> None:
    said = list(partition.defaults(SlurmJob(script="train.py"), [known()[0]]))
    assert said[:3] == [
        "no --partition: the site's default, gpu",
        "no --time: the partition's default, 01:00:00",
        "no --mem: the site's default, DefMemPerCPU=4000",
    ]
    full = SlurmJob(script="train.py", partition="gpu", time="1", mem="1G", cpus_per_task=1)
    assert list(partition.defaults(full, [])) == []
