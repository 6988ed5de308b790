"""What happens on a node while folders are staged, and until the job ends."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from srunddp.stage.archive import pack
from srunddp.stage.messages import (
    Answer,
    Clean,
    Cleaned,
    CopyLookedFor,
    Finish,
    Look,
    Looked,
    LookForCopy,
    MarkedPlace,
    StagedPlace,
    Unpack,
    Unpacked,
)
from srunddp.stage.paths import VARIABLE, lock, read
from srunddp.stage.slurm import first_line
from srunddp.util.filesystem import mark, same
from tests.support.staging_nodes import NODE, Node, node

LIMIT = 20.0
OTHER = 65534


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "shared" / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "data" / "one").write_text("1")
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "sdd-0-17"


def stage(on: Node, project: Path, name: str = "project-1", role: str = "project") -> Path:
    """Send a folder as the job's first copy; where it is then."""
    packed = pack(str(project), f"{on.folder}/{name}.tar")
    on.ask(Unpack(name, packed.sha256, packed.links), Unpacked)
    place = StagedPlace(role, str(project), name, (NODE,))
    start = ("/bin/echo", str(project / "train.py"))
    on.ask(Finish((place,), cwd="/", start=start), Answer)
    return on.folder / name


@contextlib.contextmanager
def kept(job: Path, project: Path) -> Iterator[tuple[Node, Path]]:
    """A node that has staged a folder and keeps it, and the copy."""
    with node(job) as here:
        here.look(project)
        copy = stage(here, project)
        here.leave_alone()
        yield here, copy


def cleaned(job: Path) -> int | None:
    """By a `stage clean` on this node: how many files stay."""
    with node(job) as cleaner:
        return cleaner.ask(Clean(), Cleaned).kept


def test_folder_is_seen_by_what_is_in_it(tmp_path: Path, project: Path, job: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with node(job) as here:
        paths = (project, other, tmp_path / "none")
        places = tuple(MarkedPlace(str(path), mark(str(project))) for path in paths)
        answer = here.ask(Look(places, python="/no/python"), Looked)
    assert (answer.sees, answer.python) == ("100", False)


def test_same_folder_by_identity_or_all_entries(project: Path, tmp_path: Path) -> None:
    here = mark(str(project))
    (project / "slurm-17.out").write_text("a line\n")
    assert same(mark(str(project)), here)  # one file system, as on nodes that share it
    elsewhere = tmp_path / "copy"
    shutil.copytree(project, elsewhere, copy_function=shutil.copy2)
    os.utime(elsewhere, (0, 0))
    assert same(mark(str(elsewhere)), mark(str(project)))
    os.utime(elsewhere / "train.py", (0, 0))
    assert not same(mark(str(elsewhere)), mark(str(project)))
    assert not same(mark(str(tmp_path / "none")), mark(str(tmp_path / "none")))


def test_copy_is_for_its_user_alone(project: Path, job: Path) -> None:
    with node(job) as here:
        here.look(project)
        copy = stage(here, project)
        assert (copy / "train.py").read_text() == (project / "train.py").read_text()
        (place,) = read({VARIABLE: str(job)}).places
        assert (place.path, place.here) == (str(project), str(copy))
        shown = subprocess.run([job / "srunddp", "--version"], capture_output=True, text=True)
        assert shown.stdout == f"{copy}/train.py --version\n"
        open_to_others = [
            path for path in (job, *job.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077
        ]
    assert not open_to_others
    assert not (job / "project-1.tar").exists()


def test_launcher_starts_staged_environment(tmp_path: Path, job: Path) -> None:
    env = tmp_path / "env"
    (env / "bin").mkdir(parents=True)
    (env / "pyvenv.cfg").touch()
    (env / "bin" / "python").symlink_to("/usr/bin/env")
    (env / "bin" / "srunddp").write_text(
        '#!/bin/sh\necho "$VIRTUAL_ENV $SRUNDDP_STAGED $@"\ncommand -v srunddp\n'
    )
    (env / "bin" / "srunddp").chmod(0o755)
    with node(job) as here:
        here.look(env)
        copy = stage(here, env, "env-1", role="env")
        shown = subprocess.run([job / "srunddp", "run"], capture_output=True, text=True)
    assert shown.stdout == f"{copy} {job} run\n{copy}/bin/srunddp\n"


def for_everybody(job: Path) -> None:
    job.mkdir()
    job.chmod(0o777)


def for_another_user(job: Path) -> None:
    job.mkdir(0o700)
    os.chown(job, OTHER, OTHER)


PLANTED: dict[str, Callable[[Path], object]] = {
    "link": lambda job: job.symlink_to(job.parent / "victim"),
    "file": Path.touch,
    "mode": for_everybody,
    "owner": for_another_user,
    "base": lambda job: job.parent.chmod(0o777),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_folder_planted_by_another_user_is_refused(
    tmp_path: Path, project: Path, kind: str
) -> None:
    if kind == "owner" and os.geteuid():
        pytest.skip("only root can give a folder away")
    (tmp_path / "base" / "victim").mkdir(parents=True, mode=0o700)
    PLANTED[kind](tmp_path / "base" / "sdd-0-17")
    with node(tmp_path / "base" / "sdd-0-17") as here:
        error = here.refuses(project)
    assert error.found.startswith(
        f"{tmp_path}/base"
        + ("/sdd-0-17 exists, with owner" if kind != "base" else " may be changed")
    )
    assert "--dir" in error.hint
    assert not list((tmp_path / "base" / "victim").iterdir())


def test_end_of_job_removes_folder(project: Path, job: Path) -> None:
    """Also in the middle of a push; and once no rank uses it."""
    with node(job) as here:
        here.look(project)
        here.process.terminate()
        assert here.process.wait(LIMIT) == 0
    assert not job.exists()
    with kept(job, project) as (here, copy):
        rank = lock(str(job))
        with pytest.raises(subprocess.TimeoutExpired):
            here.process.wait(0.5)
        here.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            here.process.wait(0.5)
        assert (copy / "train.py").exists()
        os.close(rank)
        assert here.process.wait(LIMIT) == 0
    assert not job.exists()


def test_written_files_stay_however_often_cleaned(project: Path, job: Path) -> None:
    """Also when the job is started again and stages there again, and when a later job stages on the
    node.
    """
    with kept(job, project) as (_, copy):
        (copy / "runs" / "first").mkdir(parents=True)
        (copy / "runs" / "first" / "loss.txt").write_text("0.5")
        (copy / "latest").symlink_to("runs/first")
        (copy / "data" / "one").write_text("2")
        shutil.copy2(project / "train.py", copy / "old.py")
        os.utime(copy / "old.py", (1, 1))
        (copy / "train.pyc").write_text("compiled")
        assert cleaned(job) == 4
        assert cleaned(job) == 4
    with kept(job, project) as (again, copy):
        assert again.process.poll() is None
        assert (copy / "train.py").exists()
        (copy / "result").touch()
        assert cleaned(job) == 5
    os.utime(job, (0, 0))
    with node(job.with_name("sdd-0-18")) as later:
        later.look(project)
    for number, written in (
        (1, {"runs/first/loss.txt", "latest", "data/one", "old.py"}),
        (2, {"result"}),
    ):
        aside = job / f"project-1.kept-{number}"
        left = {
            str(path.relative_to(aside))
            for path in aside.rglob("*")
            if path.is_file() or path.is_symlink()
        }
        assert left == written


def test_only_one_push_of_a_job_at_a_time(project: Path, job: Path) -> None:
    with node(job) as first, node(job) as second:
        first.look(project)
        assert "another push" in second.refuses(project).found
        second.leave_alone()
        assert second.process.wait(LIMIT) == 0
        copy = stage(first, project)
        assert (copy / "train.py").exists()


def test_warning_signal_does_not_end_keeper(project: Path, job: Path) -> None:
    """Such as Slurm sends to all steps."""
    with node(job) as here:
        here.look(project)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
            here.process.send_signal(number)
            assert here.ask(LookForCopy(""), CopyLookedFor).free > 0
        here.process.terminate()
        assert here.process.wait(LIMIT) == 0
    assert not job.exists()


def test_clean_waits_for_end_of_keeper(project: Path, job: Path) -> None:
    with kept(job, project) as (keeper, _), node(job) as cleaner:
        keeper.process.send_signal(signal.SIGSTOP)
        cleaner.send(Clean())
        assert cleaner.process.stdout is not None
        assert not select.select([cleaner.process.stdout], [], [], 1.0)[0]
        keeper.process.send_signal(signal.SIGCONT)
        assert cleaner.answer(Cleaned).kept == 0
        assert keeper.process.wait(LIMIT) == 0
        cleaner.leave_alone()
        assert cleaner.process.wait(LIMIT) == 0
    assert not job.exists()


def test_folders_of_ended_jobs_are_removed(tmp_path: Path, project: Path, job: Path) -> None:
    for name in ("sdd-0-3", "sdd-0-4", "sdd-0-5", "sdd-0-6", "sdd-1-3", "sdd-0-x", "sdd-0"):
        (tmp_path / name).mkdir(mode=0o700)
    with (
        (tmp_path / "sdd-0-5" / "lock").open("w") as rank,
        (tmp_path / "sdd-0-6" / "keeper").open("w") as keeper,
    ):
        fcntl.flock(rank, fcntl.LOCK_SH)
        fcntl.flock(keeper, fcntl.LOCK_EX)
        for folder in tmp_path.glob("sdd-*"):
            os.utime(folder, (0, 0))
        (tmp_path / "sdd-0-4").touch()  # of a job that begins
        with node(job) as here:
            here.look(project)
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {
        "sdd-0-4",
        "sdd-0-5",
        "sdd-0-6",
        "sdd-1-3",
        "sdd-0-x",
        "sdd-0",
        "sdd-0-17",
        "shared",
    }


def test_what_is_sent_imports_standard_library_only() -> None:
    sent: set[str] = set()
    for name, source in json.loads(first_line(""))[0]:
        for each in ast.walk(ast.parse(source)):
            if isinstance(each, ast.ImportFrom):
                names = [each.module or ""]
            else:
                names = []
            if isinstance(each, ast.Import):
                names += [alias.name for alias in each.names]
            assert all(
                one in sent or one.partition(".")[0] in sys.stdlib_module_names for one in names
            ), (name, names)
        sent.add(name)
