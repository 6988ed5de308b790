"""With --staged a rank works in the copies of its node, where that does not see the shared paths, and holds them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.stage.enter import VARIABLE, read
from srunddp.stage.enter import lock as lock_copy
from tests.conftest import ROOT
from tests.support.starting import LONG, NODE, SRUNDDP, bare, python, read_line, slurm, started, until, write

UNSEEN = "/shared-that-no-node-sees"
PROJECT, DATA, HOME = f"{UNSEEN}/project", f"{UNSEEN}/data", f"{UNSEEN}/home"


@dataclass(frozen=True)
class Copies:
    """A staged folder as `srunddp stage push` leaves it."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        return {VARIABLE: str(self.folder)}

    def of(self, path: str) -> Path:
        return self.folder / f"{Path(path).name}-1a2b"

    def has_let_go(self) -> bool:
        with open(self.folder / "lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    made = Copies(tmp_path / "staged")
    roles = {PROJECT: "project", DATA: "data", HOME: "data"}
    places = [{"role": role, "path": path, "here": str(made.of(path))} for path, role in roles.items()]
    write_places(made.folder, places)
    write(made.folder / "lock", "").chmod(0o600)
    for path in roles:
        made.of(path).mkdir()
    made.folder.chmod(0o700)
    return made


def write_places(folder: Path, places: list[dict[str, str]], cwd: str = "/") -> None:
    write(folder / "places.json", json.dumps({"places": places, "cwd": cwd})).chmod(0o600)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda folder: (folder / "places.json").unlink(), "places.json cannot be read: No such file"),
    "no folder": (lambda folder: folder.rename(folder.with_name("x")), "staged cannot be read: No such file"),
    "not JSON": (lambda folder: (folder / "places.json").write_text("{"), "places.json is broken"),
    "no places": (lambda folder: (folder / "places.json").write_text("[]"), "places.json is broken"),
    "half a place": (lambda folder: write_places(folder, [{"role": "env"}]), "places.json is broken"),
    "others' folder": (lambda folder: folder.chmod(0o722), "staged may be changed by others"),
    "owner": (lambda folder: os.chown(folder, 4242, -1), "staged belongs to user id 4242"),
    "a link": (
        lambda folder: folder.rename(folder.with_name("x")).parent.joinpath("staged").symlink_to("x"),
        "staged is not a folder",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_folder_not_ours_alone_is_refused(copies: Copies, how: str) -> None:
    if how == "owner" and os.geteuid():
        pytest.skip("only root gives files away")
    spoil, found = SPOILT[how]
    assert len(read(copies.variables).places) == 3
    spoil(copies.folder)
    with pytest.raises(ConfigError, match=f"{found}.* -> run `srunddp stage push` again"):
        read(copies.variables)


@pytest.mark.parametrize(("environ", "found"), [({}, "is not set"), ({VARIABLE: "a/b"}, "is 'a/b'")])
def test_ranks_of_plain_srunddp_are_told_how_to_start(environ: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE} {found}; expected .* -> start the ranks by the path"):
        read(environ)


def test_folder_that_is_being_removed_is_refused(copies: Copies) -> None:
    with open(copies.folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="staged is being removed"):
            lock_copy(str(copies.folder))
    os.close(lock_copy(str(copies.folder)))


def test_folder_removed_while_it_is_locked_is_refused(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *how: ((copies.folder / "lock").unlink(), flock(*how)))
    with pytest.raises(ConfigError, match="staged is being removed"):
        lock_copy(str(copies.folder))


def test_lock_takes_no_standard_stream(copies: Copies) -> None:
    code = (
        f"import os\nos.closerange(0, 3)\nfrom srunddp.stage import enter\nos._exit(enter.lock({str(copies.folder)!r}))"
    )
    done = python("-c", code, folder=ROOT)
    assert done.returncode > 2, done.stderr


def start(
    copies: Copies, *words: str, rank: int = 0, size: int = 1, folder: str = "/tmp", **variables: str
) -> subprocess.Popen[str]:
    """One rank, left in a folder as by a launcher that could not enter the project."""
    environ = (
        (slurm(rank, size, SLURM_JOB_ID=str(os.getpid())) if size > 1 else {}) | copies.variables | {"PWD": PROJECT}
    )
    pipe = subprocess.PIPE
    command = [*SRUNDDP, "--staged", "--quiet", "--timeout", str(LONG), *words]
    return subprocess.Popen(command, cwd=folder, env=bare(environ | variables), text=True, stdout=pipe, stderr=pipe)


def run(copies: Copies, *words: str, **how: str) -> tuple[int, str, str]:
    process = start(copies, *words, **how)  # type: ignore[arg-type]
    out, errors = process.communicate(timeout=LONG)
    return process.returncode, out, errors


SHOW = """
import json, os, sys
import neighbour
names = ("PWD", "PYTHONPATH", "HF_HOME", "HF_DATASETS_CACHE", "DATA")
shown = {"argv": sys.argv, "file": __file__, "cwd": os.getcwd(), "neighbour": neighbour.__file__}
print(json.dumps(shown | {name: os.environ.get(name) for name in names}))
"""
NOTE = f"srunddp: this node does not see {PROJECT}: what the script writes with relative paths goes into the copy "


@pytest.mark.parametrize("name", ["train.py", f"{PROJECT}/train.py"])
def test_all_ranks_run_the_copy_of_a_project(copies: Copies, name: str) -> None:
    project, data = copies.of(PROJECT), copies.of(DATA)
    write(project / "train.py", SHOW)
    write(data / "lib" / "neighbour.py", "")
    variables = {"PYTHONPATH": f"{DATA}/lib", "HF_HOME": HOME, "DATA": DATA}
    ranks = [start(copies, name, f"--data={DATA}/x", rank=rank, size=2, **variables) for rank in (0, 1)]
    ended = [rank.communicate(timeout=LONG) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    shown = {
        "argv": [name if name == "train.py" else str(project / "train.py"), f"--data={data}/x"],
        "file": str(project / "train.py"),
        "cwd": str(project),
        "neighbour": str(data / "lib" / "neighbour.py"),
        "PWD": str(project),
        "PYTHONPATH": f"{data}/lib",
        "HF_HOME": str(copies.of(HOME)),
        "HF_DATASETS_CACHE": None,
        "DATA": DATA,
    }
    assert [json.loads(out) for out, _ in ended] == [shown, shown]
    assert [errors for _, errors in ended] == [f"{NOTE}{project}, and is not brought back\n", ""]


def test_module_and_relative_libraries_are_found(copies: Copies) -> None:
    project = copies.of(PROJECT)
    write(project / "package" / "__main__.py", SHOW)
    write(project / "lib" / "neighbour.py", "")
    code, out, errors = run(copies, "-m", "package", PYTHONPATH="lib")
    assert code == 0, errors
    assert json.loads(out)["neighbour"] == str(project / "lib" / "neighbour.py")


def test_file_of_interfaces_is_found_in_its_copy(copies: Copies) -> None:
    write(copies.of(PROJECT) / "train.py", "")
    ifaces = write(copies.of(DATA) / "ifaces.conf", "- {nodes: '*', interface: lo, env: {X: 1}")
    for how in ({"SRUNDDP_IFACES": f"{DATA}/ifaces.conf"}, {}):
        options = [] if how else ["--ifaces", f"{DATA}/ifaces.conf"]
        code, _, errors = run(copies, *options, "train.py", **how)
        assert code == 78
        assert f"{ifaces}:" in errors


@pytest.mark.parametrize("log_dir", ["logs", f"{PROJECT}/logs"])
def test_no_log_is_written_into_a_copy(copies: Copies, log_dir: str) -> None:
    write(copies.of(PROJECT) / "train.py", "")
    code, _, errors = run(copies, "--log-dir", log_dir, "train.py")
    found = (
        f"srunddp: error: --log-dir leads to {PROJECT}/logs/run/{NODE}.rank0.log, which this node has as a copy alone"
    )
    assert (code, errors.partition(";")[0]) == (78, found)
    assert not (copies.of(PROJECT) / "logs").exists()
    assert not Path(UNSEEN).exists()


def test_rank_without_copies_ends_all_with_one_message(copies: Copies, tmp_path: Path) -> None:
    write(copies.of(PROJECT) / "train.py", "")
    other = Copies(tmp_path / "elsewhere")
    ranks = [start(where, "train.py", rank=rank, size=2) for rank, where in enumerate((copies, other))]
    errors = "".join(rank.communicate(timeout=LONG)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [78, 78], errors
    assert errors.count(f"{other.folder} cannot be read: No such file or directory") == 1, errors


def test_copy_is_locked_until_all_processes_have_ended(copies: Copies) -> None:
    """Such as loader workers; this one has a session of its own."""
    write(
        copies.of(PROJECT) / "train.py",
        "import os, signal, time\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.setsid()\n"
        "    os.close(1), os.close(2)\n"
        "    signal.pause()\n"
        "print(child, flush=True)\n"
        "input()\n",
    )
    with started("--staged", "--quiet", "train.py", folder=Path("/tmp"), PWD=PROJECT, **copies.variables) as process:
        child = int(read_line(process))
        assert not copies.has_let_go()
        held = [os.readlink(file) for file in Path(f"/proc/{child}/fd").iterdir()]
        assert str(copies.folder / "lock") in held
        process.kill()
        until(copies.has_let_go)


def test_explain_says_what_is_a_copy_here(copies: Copies) -> None:
    command = [*SRUNDDP, "explain", "--staged"]
    environ = bare(copies.variables | {"PWD": PROJECT, "SRUNDDP_IFACES": f"{DATA}/ifaces.conf"})
    write(copies.of(DATA) / "ifaces.conf", "- {nodes: '*', interface: lo}\n")
    done = subprocess.run(command, cwd="/tmp", env=environ, capture_output=True, text=True, timeout=LONG)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"[rank 0] staged {copies.folder} {VARIABLE}={copies.folder}" in lines, done
    assert f"[rank 0] staged project {copies.of(PROJECT)} {PROJECT}: a copy, as this node does not see it" in lines
    ifaces = copies.of(DATA) / "ifaces.conf"
    assert f"[rank 0] ifaces.conf {ifaces} SRUNDDP_IFACES" in lines
