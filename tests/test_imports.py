"""What everybody waits for imports nothing heavy: torch costs seconds, and mpi4py may start MPI."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.made_up_run import MadeUp
from tests.support.starting import ended, python, read_line, slurm, started, write

HEAVY = {"torch", "mpi4py", "numpy", "jinja2"}
BIN = ROOT / "bin" / "srunddp"
SCRIPT = """\
import ctypes, importlib.util, os, pathlib
torch = pathlib.Path(importlib.util.find_spec('torch').origin).parent
ctypes.CDLL(str(torch / 'lib' / 'libc10.so'))
print(os.getpid())
input()
"""


def imported(import_times: str) -> set[str]:
    """The packages in the output of ``python -X importtime``."""
    names = re.findall(r"^import time:.*\| +([\w.]+)$", import_times, re.MULTILINE)
    assert "os" in names
    return {name.partition(".")[0] for name in names}


def test_import_srunddp_imports_neither_torch_nor_mpi4py(tmp_path: Path) -> None:
    """Nor does a script's call of a heartbeat."""
    program = "import srunddp; srunddp.heartbeat()"
    done = python("-X", "importtime", "-c", program, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0
    assert "srunddp" in imported(done.stderr)
    assert not imported(done.stderr) & (HEAVY | {"click", "psutil", "yaml"})


def test_every_name_of_the_package_is_there(tmp_path: Path) -> None:
    import srunddp

    public = "Callback Config Trainer World __version__ heartbeat init read_config restart_count"
    assert set(srunddp.__all__) == set(public.split())
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        _ = srunddp.no_such


def test_private_names_of_other_packages_are_few() -> None:
    """A minor release of them may change each: none is added."""
    known = "_Loss _checkpoint _foreach_copy_ _get_default_store _reductions _schedulers"
    private = re.compile(r'(?:(?<!self)(?<!os)\.|import |getattr\(\w+, ")(_[A-Za-z]\w*)')
    texts = [path.read_text() for path in (ROOT / "srunddp" / "train").rglob("*.py")]
    used = {name for text in texts for name in private.findall(text) if f"self.{name}" not in text}
    assert used - {"_make", "_replace"} == {
        *known.split(),
        "_get_sequence_number_for_group",
        "_step_supports_amp_scaling",
        "_update_count",
    }


@pytest.mark.slow
def test_every_module_can_be_imported(tmp_path: Path) -> None:
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "srunddp").rglob("*.py")]
    names = sorted(
        ".".join(file.parts) for file in files if file.stem not in ("__init__", "__main__")
    )
    program = f"import importlib; [importlib.import_module(name) for name in {names}]"
    done = python("-c", program, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "--explain",
        "explain",
        "explain --env env",
        "sbatch train.py",
        "triage log",
        "report --text logs",
    ],
)
def test_before_and_after_a_run_nothing_heavy_is_imported(tmp_path: Path, arguments: str) -> None:
    write(tmp_path / "env", "".join(f"{name}={value}\n" for name, value in slurm(1).items()))
    write(tmp_path / "log", "step 1\n")
    MadeUp(nodes=1, seconds=60).write(tmp_path / "logs")
    done = python("-X", "importtime", BIN, *arguments.split(), folder=tmp_path)
    assert done.returncode == 0
    assert {"srunddp", "click"} <= imported(done.stderr)
    assert not imported(done.stderr) & HEAVY


def test_neither_supervisor_nor_worker_imports_torch_too_early(tmp_path: Path) -> None:
    """Both write to this output."""
    write(tmp_path / "train.py", "import sys; print(sorted({'torch', 'mpi4py'} & {*sys.modules}))")
    done = python("-X", "importtime", BIN, "train.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "runpy" in imported(done.stderr)
    assert not imported(done.stderr) & (HEAVY | {"tqdm"})
    assert not re.search(r"srunddp\.monitor\.sampler", done.stderr)  # those of --monitor


def test_a_run_without_spare_nodes_imports_nothing_of_them(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "print('over')")
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(
                    "train.py",
                    folder=tmp_path,
                    PYTHONPROFILEIMPORTTIME="1",
                    **slurm(rank, 2),
                )
            )
            for rank in range(2)
        ]
        for rank in ranks:
            code, _, errors = ended(rank)
            assert code == 0
            assert "srunddp.supervisor.supervisor" in errors
            assert "srunddp.spare_nodes" not in errors


def maps(process: int) -> str:
    return Path(f"/proc/{process}/maps").read_text()


@pytest.mark.parametrize("world_size", [1, 2])
def test_supervisors_of_running_scripts_have_no_torch_in_memory(
    tmp_path: Path, world_size: int
) -> None:
    """The script loads one of torch's libraries, so that the look is known to find it."""
    write(tmp_path / "train.py", SCRIPT)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started("--quiet", "train.py", folder=tmp_path, **slurm(rank, world_size))
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            worker = int(read_line(rank))
            assert "/torch/lib/libc10.so" in maps(worker)
            assert Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1] == str(
                rank.pid
            )
            assert not re.search(
                r"torch|libmpi|mpi4py|numpy", maps(rank.pid).replace(sys.prefix, "")
            )
        for rank in ranks:
            print(file=rank.stdin, flush=True)
        assert [ended(rank)[0] for rank in ranks] == [0] * world_size
