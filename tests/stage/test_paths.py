"""Which path is a copy on this node, and what of a run follows it there; with --offline no rank
asks a server.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.errors import ConfigError
from srunddp.stage.offline import caches, contradictions, offline
from srunddp.stage.paths import VARIABLE, PathMapping, StagedPaths, read
from srunddp.stage.paths import lock as lock_copy
from tests.conftest import ROOT
from tests.support.facts import tells
from tests.support.starting import (
    LONG,
    NODE,
    SRUNDDP,
    bare,
    python,
    read_line,
    slurm,
    srunddp,
    started,
    until,
    write,
)
from tests.support.worlds import world

SEEN = StagedPaths(
    "/f",
    (
        PathMapping("project", "/shared/project", "/shared/project"),
        PathMapping("data", "/d", "/tmp/f/d"),
    ),
)

names = st.text("ab.-", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
paths = st.lists(names, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


@given(places=st.dictionaries(paths, paths, min_size=1, max_size=4), path=paths)
def test_path_is_below_the_longest_place_above_it(places: dict[str, str], path: str) -> None:
    staged = StagedPaths(
        "/f", tuple(PathMapping("data", shared, here) for shared, here in places.items())
    )
    above = [shared for shared in places if Path(path).is_relative_to(shared)]
    longest = max(above, key=len, default=None)
    expected = str(Path(places[longest], Path(path).relative_to(longest))) if longest else path
    assert staged.here(path) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("/d", "/tmp/f/d"),
        ("/d/", "/tmp/f/d/"),
        ("//d//x", "/tmp/f/d/x"),
        ("/d/./x", "/tmp/f/d/x"),
        ("/d/../e", "/d/../e"),
        ("/e/../d/x", "/tmp/f/d/x"),
        ("/shared/project//x/", "/shared/project//x/"),
        ("d", "d"),
        ("", ""),
        ("/", "/"),
    ],
)
def test_path_is_found_however_it_is_written(written: str, expected: str) -> None:
    assert SEEN.here(written) == expected
    assert SEEN.note == ""  # this node sees the project


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/d/x", "/tmp/f/d/x"),
        ("--data=/d/x", "--data=/tmp/f/d/x"),
        ("data=/d", "data=/tmp/f/d"),
        ("--a=b=/d", "--a=b=/d"),
        ("/d/a=b", "/tmp/f/d/a=b"),
        ("--data", "--data"),
        ("s3://d", "s3://d"),
        ("x/d", "x/d"),
        ("=", "="),
    ],
)
def test_argument_is_a_path_or_has_one_after_equals(word: str, expected: str) -> None:
    assert SEEN.argument(word) == expected


def test_variables_that_name_places_change() -> None:
    """Also those of caches in their usual place."""
    given = {
        "PATH": "/usr/bin::/d/bin",
        "HF_HOME": "/d/hf",
        "VIRTUAL_ENV": "/other",
        "DATA": "/d",
        "HOME": "/h",
    }
    assert SEEN.variables(given) == {"PATH": "/usr/bin::/tmp/f/d/bin", "HF_HOME": "/tmp/f/d/hf"}
    caches = {"HF_HOME": "/tmp/f/d/.cache/huggingface", "TORCH_HOME": "/tmp/f/d/.cache/torch"}
    assert SEEN.variables({"HOME": "/d"}) == caches


@pytest.mark.parametrize(
    ("folder", "environ", "expected"),
    [
        ("/tmp", {"PWD": "/d/x"}, "/d/x"),
        ("/tmp", {"PWD": "/tmp", "SLURM_SUBMIT_DIR": "/d"}, "/d"),  # as a shell corrects it
        ("/home/u", {"HOME": "/home/u", "PWD": "/d"}, "/d"),
        ("/scratch", {"PWD": "/d"}, "/scratch"),  # srun --chdir leaves PWD as it was
        ("/tmp", {"PWD": "/shared/project"}, "/tmp"),
        ("/tmp", {}, "/tmp"),
    ],
)
def test_working_directory_is_the_intended_one(
    folder: str, environ: dict[str, str], expected: str
) -> None:
    assert SEEN.intended_cwd(environ, folder) == expected
    # By a push in that folder, which counts where a shell has corrected PWD.
    pushed = replace(SEEN, cwd="/d/y")
    assert pushed.intended_cwd({"PWD": "/tmp", "SLURM_SUBMIT_DIR": "/d"}, "/tmp") == "/d/y"
    assert pushed.intended_cwd(environ, "/") == "/d/y"


SWITCHES = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
HOME = {"HOME": "/home/u"}


def test_bare_environment_gets_switches_and_caches() -> None:
    assert offline(HOME) == SWITCHES | {
        "HF_HOME": "/home/u/.cache/huggingface",
        "TORCH_HOME": "/home/u/.cache/torch",
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.mark.parametrize("name", [*offline(HOME)])
@pytest.mark.parametrize("value", ["0", ""])
def test_exported_variable_stays(name: str, value: str) -> None:
    assert set(offline(HOME | {name: value})) == {*offline(HOME)} - {name}


@pytest.mark.parametrize(
    ("xdg", "folder"), [("/cache", "/cache"), ("~/c", "/home/u/c"), ("", "/home/u/.cache")]
)
def test_caches_are_where_libraries_look(xdg: str, folder: str) -> None:
    found = caches(HOME | {"XDG_CACHE_HOME": xdg})
    assert found == {"HF_HOME": f"{folder}/huggingface", "TORCH_HOME": f"{folder}/torch"}
    assert all(os.path.isabs(path) for path in caches({}).values())


def test_contradiction_is_said_once_by_rank_0(tmp_path: Path) -> None:
    variables = {"HF_HUB_OFFLINE": "0"}
    script = 'say("seen", os.environ["HF_HUB_OFFLINE"] + os.environ["TRANSFORMERS_OFFLINE"])'
    with world(tmp_path, script, "--offline", size=2, variables=variables) as it:
        ended = it.wait()
    said = (
        "srunddp: HF_HUB_OFFLINE=0 is exported, which wins; expected 1 with --offline -> unset it\n"
    )
    assert (ended.codes, ended.errors) == ([0, 0], [said, ""])
    assert [(tmp_path / f"seen.{rank}").read_text() for rank in (0, 1)] == ["01", "01"]
    assert contradictions(dict(zip(SWITCHES, ("on", "YES", "True"), strict=True))) == []


def test_without_the_option_nothing_is_exported(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import json, os; print(json.dumps(dict(os.environ)))")
    assert not {*offline({})} & {*json.loads(srunddp("train.py", folder=tmp_path).stdout)}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(("own", "options"), [(False, ("--offline",)), (True, ())])
def test_ranks_divide_the_cpus_that_they_share(
    tmp_path: Path, own: bool, options: tuple[str, ...]
) -> None:
    """One rank has all CPUs, the other the same, or only one: then nobody has its mask."""
    cpus = len(os.sched_getaffinity(0))
    if own:
        below = {1: ["taskset", "-c", str(min(os.sched_getaffinity(0)))]}
    else:
        below = {}
    script = 'say("threads", os.environ["OMP_NUM_THREADS"])'
    with world(tmp_path, script, *options, size=2, below=below) as it:
        assert it.wait().codes == [0, 0]
    threads = [int((tmp_path / f"threads.{rank}").read_text()) for rank in (0, 1)]
    assert threads == ([cpus, 1] if own else [cpus // 2] * 2)


def test_explain_says_what_offline_exports(tmp_path: Path) -> None:
    rows = srunddp(
        "explain", "--offline", folder=tmp_path, HF_DATASETS_OFFLINE="off", HOME="/home/u"
    ).stdout
    table = {line.split()[2]: " ".join(line.split()[3:]) for line in rows.splitlines()}
    assert table["HF_HUB_OFFLINE"] == "1 --offline"
    assert table["HF_HOME"] == "/home/u/.cache/huggingface --offline"
    assert table["HF_DATASETS_OFFLINE"] == "off exported"
    assert tells(rows, "note: ", "HF_DATASETS_OFFLINE=off")


UNSEEN = "/shared-that-no-node-sees"
PROJECT = f"{UNSEEN}/project"
DATA = f"{UNSEEN}/data"
CACHE = f"{UNSEEN}/home"


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
    roles = {PROJECT: "project", DATA: "data", CACHE: "data"}
    places = [
        {"role": role, "path": path, "here": str(made.of(path))} for path, role in roles.items()
    ]
    write_places(made.folder, places)
    write(made.folder / "lock", "").chmod(0o600)
    for path in roles:
        made.of(path).mkdir()
    made.folder.chmod(0o700)
    return made


def write_places(folder: Path, places: list[dict[str, str]], cwd: str = "/") -> None:
    write(folder / "places.json", json.dumps({"places": places, "cwd": cwd})).chmod(0o600)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (
        lambda folder: (folder / "places.json").unlink(),
        "places.json cannot be read: No such file",
    ),
    "no folder": (
        lambda folder: folder.rename(folder.with_name("x")),
        "staged cannot be read: No such file",
    ),
    "not JSON": (lambda folder: (folder / "places.json").write_text("{"), "places.json is broken"),
    "no places": (
        lambda folder: (folder / "places.json").write_text("[]"),
        "places.json is broken",
    ),
    "half a place": (
        lambda folder: write_places(folder, [{"role": "env"}]),
        "places.json is broken",
    ),
    "others' folder": (lambda folder: folder.chmod(0o722), "staged may be changed by others"),
    "owner": (lambda folder: os.chown(folder, 4242, -1), "staged belongs to user id 4242"),
    "a link": (
        lambda folder: (
            folder.rename(folder.with_name("x")).parent.joinpath("staged").symlink_to("x")
        ),
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


@pytest.mark.parametrize(
    ("environ", "found"), [({}, "is not set"), ({VARIABLE: "a/b"}, "is 'a/b'")]
)
def test_ranks_of_plain_srunddp_are_told_how_to_start(environ: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE} {found}; expected .* -> "):
        read(environ)


def test_folder_that_is_being_removed_is_refused(copies: Copies) -> None:
    with open(copies.folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="staged is being removed"):
            lock_copy(str(copies.folder))
    os.close(lock_copy(str(copies.folder)))


def test_folder_removed_while_it_is_locked_is_refused(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def lock_too_late(file: int, how: int) -> None:
        (copies.folder / "lock").unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    with pytest.raises(ConfigError, match="staged is being removed"):
        lock_copy(str(copies.folder))


def test_lock_takes_no_standard_stream(copies: Copies) -> None:
    code = (
        "import os\nos.closerange(0, 3)\nfrom srunddp.stage import"
        f" paths\nos._exit(paths.lock({str(copies.folder)!r}))"
    )
    done = python("-c", code, folder=ROOT)
    assert done.returncode > 2, done.stderr


def start(
    copies: Copies,
    *words: str,
    rank: int = 0,
    size: int = 1,
    folder: str = "/tmp",
    **variables: str,
) -> subprocess.Popen[str]:
    """One rank, left in a folder as by a launcher that could not enter the project."""
    environ = (
        (slurm(rank, size, SLURM_JOB_ID=str(os.getpid())) if size > 1 else {})
        | copies.variables
        | {"PWD": PROJECT}
    )
    pipe = subprocess.PIPE
    command = [*SRUNDDP, "--staged", "--quiet", "--timeout", str(LONG), *words]
    return subprocess.Popen(
        command, cwd=folder, env=bare(environ | variables), text=True, stdout=pipe, stderr=pipe
    )


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


@pytest.mark.parametrize("name", ["train.py", f"{PROJECT}/train.py"])
def test_all_ranks_run_the_copy_of_a_project(copies: Copies, name: str) -> None:
    project = copies.of(PROJECT)
    data = copies.of(DATA)
    write(project / "train.py", SHOW)
    write(data / "lib" / "neighbour.py", "")
    variables = {"PYTHONPATH": f"{DATA}/lib", "HF_HOME": CACHE, "DATA": DATA}
    ranks = [
        start(copies, name, f"--data={DATA}/x", rank=rank, size=2, **variables) for rank in (0, 1)
    ]
    ended = [rank.communicate(timeout=LONG) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    shown = {
        "argv": [name if name == "train.py" else str(project / "train.py"), f"--data={data}/x"],
        "file": str(project / "train.py"),
        "cwd": str(project),
        "neighbour": str(data / "lib" / "neighbour.py"),
        "PWD": str(project),
        "PYTHONPATH": f"{data}/lib",
        "HF_HOME": str(copies.of(CACHE)),
        "HF_DATASETS_CACHE": None,
        "DATA": DATA,
    }
    assert [json.loads(out) for out, _ in ended] == [shown, shown]
    told, silent = [errors for _, errors in ended]
    assert silent == ""
    assert told.count("\n") == 1
    assert tells(told, PROJECT, project)


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
        if how:
            options = []
        else:
            options = ["--ifaces", f"{DATA}/ifaces.conf"]
        code, _, errors = run(copies, *options, "train.py", **how)
        assert code == 78
        assert f"{ifaces}:" in errors


@pytest.mark.parametrize("log_dir", ["logs", f"{PROJECT}/logs"])
def test_no_log_is_written_into_a_copy(copies: Copies, log_dir: str) -> None:
    write(copies.of(PROJECT) / "train.py", "")
    code, _, errors = run(copies, "--log-dir", log_dir, "train.py")
    found = (
        f"srunddp: error: --log-dir leads to {PROJECT}/logs/run/{NODE}.rank0.log, of which"
        " this node has only a copy"
    )
    assert (code, errors.partition(";")[0]) == (78, found)
    assert not (copies.of(PROJECT) / "logs").exists()
    assert not Path(UNSEEN).exists()


def test_rank_without_copies_ends_all_with_one_message(copies: Copies, tmp_path: Path) -> None:
    write(copies.of(PROJECT) / "train.py", "")
    other = Copies(tmp_path / "elsewhere")
    ranks = [
        start(where, "train.py", rank=rank, size=2) for rank, where in enumerate((copies, other))
    ]
    errors = "".join(rank.communicate(timeout=LONG)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [78, 78], errors
    assert errors.count(str(other.folder)) == 1, errors
    assert tells(errors, other.folder, "No such file")


def test_rank_whose_log_leads_into_a_copy_tells_rank_0_by_the_copy_of_ifaces_conf(
    copies: Copies,
) -> None:
    """Rank 0 listens where that file says: by another one it would not be found."""
    write(copies.of(PROJECT) / "train.py", "")
    entry = "- {nodes: '*', interface: lo, address: 127.0.0.1, ports: 21450-21459}"
    write(copies.of(DATA) / "ifaces.conf", entry)
    options = ("--ifaces", f"{DATA}/ifaces.conf")
    ranks = [
        start(copies, *options, "train.py", size=2),
        start(copies, *options, "--log-dir", f"{PROJECT}/logs", "train.py", rank=1, size=2),
    ]
    errors = "".join(rank.communicate(timeout=LONG)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [78, 78], errors
    assert errors.count("--log-dir leads to") == 1, errors


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
    with started(
        "--staged", "--quiet", "train.py", folder=Path("/tmp"), PWD=PROJECT, **copies.variables
    ) as process:
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
    done = subprocess.run(
        command, cwd="/tmp", env=environ, capture_output=True, text=True, timeout=LONG
    )
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"[rank 0] staged {copies.folder} {VARIABLE}={copies.folder}" in lines, done
    assert any(
        tells(line, "[rank 0] staged project", copies.of(PROJECT), PROJECT) for line in lines
    )
    ifaces = copies.of(DATA) / "ifaces.conf"
    assert f"[rank 0] ifaces.conf {ifaces} SRUNDDP_IFACES" in lines
