"""When torch may be imported before the script does it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from srunddp.run.script import Script
from srunddp.run.torch_import import modules_before
from tests.support.starting import ended, slurm, started, until, workers_of, write


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("import torch\n", []),
        (
            (
                '"""A script."""\nimport sys, time\n\nimport numpy as np\nfrom torch.nn import'
                " Linear\n"
            ),
            ["numpy"],
        ),
        ("import srunddp\nimport torch.distributed as dist\n", []),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n", None),
        ("import os\nos.putenv('A', '1')\nimport torch\n", None),
        ("import os\nos.sched_setaffinity(0, {0})\nimport torch\n", None),
        ("import sys\nsys.path.insert(0, 'mine')\nimport torch\n", None),
        ("import transformers\nimport torch\n", None),
        ("import settings\nimport torch\n", None),
        ("from sys import path\npath.insert(0, 'mine')\nimport torch\n", None),
        ("try:\n    import settings\nexcept ImportError:\n    pass\nimport torch\n", None),
        ("if True:\n    import torch\n", None),
        ("print('no torch')\n", None),
        ("import torch\nthis is no Python\n", None),
    ],
)
def test_only_where_nothing_in_the_text_matters_to_it(
    text: str, before: list[str] | None, tmp_path: Path
) -> None:
    (tmp_path / "settings.py").touch()
    script = tmp_path / "script.py"
    script.write_text(text)
    found = modules_before(Script(str(script)))
    assert (found is None) == (before is None)
    assert {*(found or ())} <= {*(before or ())}  # without those that are imported already
    assert modules_before(Script(str(script), module=True)) is None


def test_a_module_beside_the_script_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import tkinter\nimport torch\n")
    assert modules_before(Script(str(tmp_path / "script.py"))) == ["tkinter"]
    (tmp_path / "tkinter.py").touch()
    assert modules_before(Script(str(tmp_path / "script.py"))) is None
    assert modules_before(Script(str(tmp_path / "none.py"))) is None


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import torch\n", "import time\ntime.sleep(0)\nimport torch\n"])
def test_a_rank_imports_torch_while_it_waits_if_its_script_does_so_first(
    tmp_path: Path, first: str
) -> None:
    """And only then: a script may choose its torch, or use none."""
    write(tmp_path / "train.py", f"{first}print(torch.tensor([1, 2]).sum().item())\n")
    command = ("--quiet", "train.py")
    with started(*command, folder=tmp_path, **slurm(0)) as early:
        (worker,) = until(lambda: workers_of(early.pid))
        if first.startswith("import torch"):
            until(lambda: has_torch(worker))
        else:
            time.sleep(2.0)
            assert not has_torch(worker)
        with started(*command, folder=tmp_path, **slurm(1)) as late:
            code, printed, said = ended(early)
            assert (code, printed) == (0, "3\n")
            # All that rank 0 says, as the script makes no process group.
            (note,) = filter(None, said.splitlines())
            assert "none of the 2 ranks has made a process group" in note
            assert ended(late) == (0, "3\n", "")


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
