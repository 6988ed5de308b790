"""What torchrun tells its ranks, ours are told; how many threads each takes; and what imports are
told.

Accelerate, and what stands on it, takes ranks without a GPU for one world, as below its own
launcher. A name server that does not answer is not asked, and so delays nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from srunddp.bootstrap.environment.cpus import threads
from tests.conftest import PROGRAMS, ROOT, missing, tool
from tests.support.starting import LONG, bare, python, slurm, srunddp, write
from tests.support.worlds import run, world

TELL = """
import json, os
from pathlib import Path
Path(f"told.{os.environ['RANK']}").write_text(json.dumps(dict(os.environ)))
"""
# The store's place, and what is torchrun's own way of doing things; docs/coming-from/torchrun.md
# has them.
OTHERS = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
}
OTHERS |= {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


@pytest.mark.slow
def test_each_rank_is_told_what_torchrun_tells_it(tmp_path: Path) -> None:
    write(tmp_path / "tell.py", TELL)
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "tell.py",
    )
    subprocess.run(
        torchrun, cwd=tmp_path, env=bare(), check=True, capture_output=True, timeout=LONG
    )
    theirs = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2)]
    with world(tmp_path, TELL, size=2, variables={"SLURM_RESTART_COUNT": "3"}) as it:
        assert it.wait().codes == [0, 0]
    for rank in range(2):
        ours = json.loads((tmp_path / f"told.{rank}").read_text())
        expected_values = {
            name: value for name, value in theirs[rank].items() if name not in OTHERS | {*bare()}
        }
        assert {"ROLE_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"} <= {*expected_values}
        expected_values["TORCHELASTIC_RESTART_COUNT"] = "3"  # Slurm's
        assert {name: ours.get(name) for name in expected_values} == expected_values


def test_a_rank_that_has_its_node_alone_leaves_threads_to_torch(tmp_path: Path) -> None:
    write(tmp_path / "tell.py", TELL)
    assert srunddp("tell.py", folder=tmp_path).returncode == 0
    assert "OMP_NUM_THREADS" not in json.loads((tmp_path / "told.0").read_text())


@pytest.mark.parametrize(
    ("variables", "sharers", "expected"),
    [
        ({"OMP_NUM_THREADS": "7"}, 2, {}),
        ({"MKL_NUM_THREADS": "7"}, 2, {}),  # torch looks at OMP_NUM_THREADS first
        ({"SLURM_CPUS_PER_TASK": "1"}, 1, {"OMP_NUM_THREADS": "1"}),
    ],
)
def test_threads_are_the_users_or_of_slurm(
    variables: dict[str, str], sharers: int, expected: dict[str, str]
) -> None:
    assert threads(variables, sharers) == expected


@pytest.mark.parametrize(
    ("script", "option", "code"),
    [("", "--log-dir=logs", 0), ("sys.exit(3)", "--quiet", 3), ("", "--ifaces=absent", 78)],
)
def test_pythons_development_mode_has_nothing_to_say(
    tmp_path: Path, script: str, option: str, code: int
) -> None:
    """Not where the ranks do not come to meet, either."""
    with world(tmp_path, script, option, size=2, variables={"PYTHONDEVMODE": "1"}) as it:
        ended = it.wait()
    assert (ended.codes, "Warning" in ended.text) == ([code, code], False), ended.text


# Accelerate.

# Stand-ins for what takes seconds to import: srunddp asks torch about GPUs, and accelerate reads a
# variable. Of torch's two answers, is_available's costs the processes that are forked later their
# GPUs.
TORCH = (
    "import os\nclass accelerator:\n    device_count = staticmethod(lambda:"
    ' int(os.environ["GPUS"]))\n'
)
READS = 'import os\nfound = os.environ.get("ACCELERATE_USE_CPU", "unset")\n'
IMPORTS = 'import accelerate; say("found", accelerate.found)'


@pytest.mark.parametrize(
    ("size", "variables", "expected"),
    [
        (2, {"GPUS": "0"}, "true"),
        (2, {"GPUS": "2"}, "unset"),
        (2, {"GPUS": "0", "ACCELERATE_USE_CPU": "false"}, "false"),  # the user's stays
        (1, {"GPUS": "0"}, "unset"),  # a world of one is left to accelerate
    ],
)
def test_accelerate_is_told_of_no_gpu(
    tmp_path: Path, size: int, variables: dict[str, str], expected: str
) -> None:
    write(tmp_path / "torch.py", TORCH)
    write(tmp_path / "accelerate.py", READS)
    ended = run(tmp_path, IMPORTS, size=size, variables={"PYTHONPATH": str(tmp_path), **variables})
    assert ended.codes == [0] * size, ended.text
    assert {(tmp_path / f"found.{rank}").read_text() for rank in range(size)} == {expected}


def test_accelerate_imported_before_the_meeting_is_told(tmp_path: Path) -> None:
    """As in a script that calls srunddp.init() after its imports, without the srunddp command."""
    write(tmp_path / "torch.py", TORCH)
    write(tmp_path / "accelerate.py", "")
    joins = """
import accelerate, contextlib, os, srunddp
with contextlib.suppress(ImportError):  # of torch.distributed, after the ranks have met
    srunddp.init()
print(os.environ["ACCELERATE_USE_CPU"], flush=True)
os._exit(0)
"""
    script = write(tmp_path / "train.py", joins)
    path = f"{tmp_path}:{ROOT}"
    with ThreadPoolExecutor() as ranks:
        place = partial(python, script, folder=tmp_path, PYTHONPATH=path, GPUS="0")
        runs = [
            ranks.submit(place, **slurm(rank, SLURM_JOB_ID=str(os.getpid()))) for rank in (0, 1)
        ]
    assert [run.result().stdout for run in runs] == ["true\n"] * 2, [
        run.result().stderr for run in runs
    ]


# Reverse look-ups of names.

FILES = {
    # Short limits: the stock store waits for them.
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
    # Some machines have services that would answer in the name server's place.
    "nsswitch.conf": "hosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n",
}


@pytest.fixture
def behind_a_mute_name_server(tmp_path: Path) -> list[str]:
    """How a command line begins that runs in a network of its own, with these files in /etc."""
    apart = [tool("unshare"), "--net", "--mount"]
    if (
        os.geteuid() != 0
        or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode
    ):
        missing("namespaces need root")
    mounts = [
        f"mount --bind '{write(tmp_path / name, text)}' /etc/{name}" for name, text in FILES.items()
    ]
    return [
        *apart,
        "sh",
        "-ec",
        "\n".join((f"{tool('ip')} link set lo up", *mounts, 'exec "$@"')),
        "sh",
    ]


@pytest.mark.slow
def test_the_store_is_joined_without_a_query_to_the_name_server(
    behind_a_mute_name_server: list[str],
) -> None:
    command = [*behind_a_mute_name_server, sys.executable, str(PROGRAMS / "name_lookups.py")]
    variables = bare({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)
    assert (sent["server"], sent["quiet"]) == (0, 0), done.stderr
    # Torch alone does ask: the name server is there, and is counted right.
    assert sent["stock"] >= 1, done.stderr


# Open files.


@pytest.mark.slow
def test_rank_0_may_open_as_many_files_as_the_store_of_all_ranks_needs(tmp_path: Path) -> None:
    """Whatever limit the shell has set: torch's store needs a file for each of its connections."""
    script = """\
    import resource
    import torch.distributed as dist
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    dist.init_process_group("gloo")
    print(f"{dist.get_rank()}: {resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard}.")
    """
    with world(tmp_path, textwrap.dedent(script), size=2) as it:
        ended = it.wait()
    assert ended.codes == [0, 0], ended.text
    assert ended.printed == ["0: True.\n", "1: False.\n"]
