"""What node_exporter reads of the runs on a node, if the site has asked for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from srunddp.monitor.metrics_file import (
    MetricsFile,
    RunLabels,
    RunState,
    exposition,
    remove_left_over,
    user_name,
)
from tests.support.starting import NODE, ended, one_message, slurm, srunddp, started, until, write
from tests.support.worlds import world

# Files of all versions of srunddp may be in one folder: node_exporter drops what has another HELP
# or TYPE.
FAMILIES = {
    "srunddp_ranks": ("gauge", "Ranks of the run on this node."),
    "srunddp_steps_total": (
        "counter",
        "Steps of the first rank on this node, since the last restart.",
    ),
    "srunddp_restarts_total": ("counter", "Restarts of the run, by Slurm and by --restarts."),
    "srunddp_stalls_total": ("counter", "Restarts of the run after a stall or a hang."),
    "srunddp_start_timestamp_seconds": ("gauge", "Unix time of the last start of the ranks."),
    "srunddp_last_step_timestamp_seconds": (
        "gauge",
        "Unix time of the last step of the first rank on this node.",
    ),
    "srunddp_last_checkpoint_timestamp_seconds": (
        "gauge",
        "Unix time of the last checkpoint of srunddp.Trainer, on rank 0's node.",
    ),
}
LABELS = RunLabels("4711", "0", "ada", "node01")
STATE = RunState(
    ranks=8, steps=120, restarts=1, stalls=1, started=1e9, stepped=1e9 + 0.5, checkpointed=1e9 + 1
)
STEPS = "import srunddp, time\nsrunddp.heartbeat()\ninput()\n"


class Read(NamedTuple):
    """What a reader of the text format finds: TYPE and HELP, and values and labels by name."""

    families: dict[str, tuple[str, str]]
    values: dict[str, float]
    labels: dict[str, str]


def read(text: str) -> Read:
    """Read the text format 0.0.4 as strictly as it is written here."""
    helps: dict[str, str] = {}
    kinds: dict[str, str] = {}
    values: dict[str, float] = {}
    labels: dict[str, str] = {}
    pair = r'([a-z]+)="((?:[^"\\\n]|\\["\\n])*)"'
    assert text.endswith("\n")
    for line in text.removesuffix("\n").split("\n"):
        if found := re.fullmatch(r"# HELP (\w+) (.+)", line):
            helps[found[1]] = found[2]
        elif found := re.fullmatch(r"# TYPE (\w+) (counter|gauge)", line):
            assert found[1] in helps
            assert found[1] not in kinds
            kinds[found[1]] = found[2]
        elif not line.startswith("#"):
            # No timestamp behind the value.
            found = re.fullmatch(rf"(\w+)\{{({pair}(?:,{pair})*)\}} (\S+)", line)
            assert found, line
            assert found[1] in kinds
            assert found[1] not in values
            values[found[1]] = float(found[found.re.groups])
            own = {name: unescaped(value) for name, value in re.findall(pair, found[2])}
            assert labels in ({}, own)
            labels = own
    return Read({name: (kinds[name], helps[name]) for name in helps}, values, labels)


def unescaped(value: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], value)


def site(folder: Path) -> tuple[Path, dict[str, str]]:
    """A folder for metrics, and the variables with which a run writes there."""
    metrics = folder / "metrics"
    metrics.mkdir()
    return metrics, naming(folder, metrics)


def naming(folder: Path, metrics: Path) -> dict[str, str]:
    text = f'- nodes: "*"\n  interface: auto\n  metrics: {metrics}\n'
    return {"SRUNDDP_IFACES": str(write(folder / "ifaces.conf", text))}


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def name(job: str, step: str = "3") -> str:
    return f"srunddp-{job}.{step}.{user_name()}.{NODE}.prom"


def values(file: Path) -> dict[str, float]:
    """By name; none if the file is not there yet."""
    try:
        return read(file.read_text()).values
    except FileNotFoundError:
        return {}


def test_help_and_type_are_those_of_all_versions() -> None:
    found = read(exposition(LABELS, STATE))
    assert found.families == FAMILIES
    assert list(found.values.values()) == [8, 120, 1, 1, 1e9, 1e9 + 0.5, 1e9 + 1]
    assert found.labels == {"job": "4711", "step": "0", "user": "ada", "node": "node01"}


def test_what_is_not_known_is_left_out() -> None:
    state = RunState(ranks=1, steps=0, restarts=0, stalls=0, started=1.0)
    found = read(exposition(LABELS, state))
    assert set(FAMILIES) - set(found.values) == {
        "srunddp_last_step_timestamp_seconds",
        "srunddp_last_checkpoint_timestamp_seconds",
    }
    assert set(found.families) == set(found.values)


@example('a"b\\c\nd\\n')
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_label_is_read_as_it_was(text: str) -> None:
    found = read(exposition(RunLabels(text, "0", text, "node01"), STATE))
    assert (found.labels["job"], found.labels["user"]) == (text, text)


def test_a_label_that_is_no_utf8_can_be_written() -> None:
    text = exposition(RunLabels("1", "0", os.fsdecode(b"ad\xff"), "node01"), STATE)
    assert read(text.encode().decode()).labels["user"] == "ad?"


def test_promtool_finds_nothing_to_say() -> None:
    if not (promtool := shutil.which("promtool")):
        pytest.skip("promtool, of Debian's package prometheus")
    text = exposition(RunLabels('4"7\\', "0", "a\nb", "node01"), STATE)
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Real runs.


def test_two_jobs_on_a_node_have_a_file_each_until_their_end(tmp_path: Path) -> None:
    metrics, variables = site(tmp_path)
    write(tmp_path / "train.py", STEPS)
    first = slurm(0, 1, SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="2") | variables
    second = slurm(0, 1, SLURM_JOB_ID="4712") | variables
    old = os.umask(0o077)
    try:
        with (
            started("train.py", folder=tmp_path, **first) as one,
            started("train.py", folder=tmp_path, **second) as two,
        ):
            until(lambda: names(metrics) == {name("4711"), name("4712")})
            found = read((metrics / name("4711")).read_text())
            assert found.labels == {
                "job": "4711",
                "step": "3",
                "user": user_name(),
                "node": NODE,
            }
            assert (found.values["srunddp_ranks"], found.values["srunddp_restarts_total"]) == (1, 2)
            # The exporter is another user.
            assert stat.S_IMODE((metrics / name("4712")).stat().st_mode) == 0o644
            assert ended_well(one)
            until(lambda: names(metrics) == {name("4712")})
            assert ended_well(two)
    finally:
        os.umask(old)
    assert names(metrics) == set()


def ended_well(process: subprocess.Popen[str]) -> bool:
    print(file=process.stdin, flush=True)
    code, _, errors = ended(process)
    return code == 0 and "metrics" not in errors


def test_what_a_killed_run_leaves_goes_with_the_next_run(tmp_path: Path) -> None:
    metrics, variables = site(tmp_path)
    write(tmp_path / "train.py", STEPS)
    write(metrics / "srunddp.prom", "# of the site itself\n")
    write(metrics / "smartmon.prom", "# of another collector\n")
    own = names(metrics)
    killed = slurm(0, 1, SLURM_JOB_ID="4711") | variables
    with started("train.py", folder=tmp_path, **killed) as run:
        until(lambda: names(metrics) == {name("4711"), *own})
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        assert names(metrics) == {name("4711"), *own}
    lives = slurm(0, 1, SLURM_JOB_ID="4712") | variables
    later = slurm(0, 1, SLURM_JOB_ID="4713") | variables
    with (
        started("train.py", folder=tmp_path, **lives) as one,
        started("train.py", folder=tmp_path, **later) as two,
    ):
        until(lambda: names(metrics) == {name("4712"), name("4713"), *own})
        assert ended_well(one)
        assert ended_well(two)


def test_one_file_has_the_ranks_and_steps_of_a_node(tmp_path: Path) -> None:
    metrics, variables = site(tmp_path)
    script = """
import srunddp
for _ in range(1 if RANK else 5):
    srunddp.heartbeat()
srunddp.heartbeat(last=True)
wait_for("end")
"""
    with world(
        tmp_path, script, size=2, variables=variables, limits={"metrics_every": 0.1}
    ) as ranks:
        before = time.time()
        until(lambda: [values(each).get("srunddp_steps_total") for each in files(metrics)] == [5])
        (file,) = files(metrics)
        found = values(file)
        assert found["srunddp_ranks"] == 2
        stepped = found["srunddp_last_step_timestamp_seconds"]
        assert found["srunddp_start_timestamp_seconds"] <= stepped <= time.time()
        assert abs(stepped - before) < 60
        # It is written again and again.
        until(lambda: file.stat().st_mtime > stepped + 0.5)
        (tmp_path / "end").touch()
        assert ranks.wait().codes == [0, 0]
    assert names(metrics) == set()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prom"))


def restarts(folder: Path) -> list[float | None]:
    """Of each file."""
    return [values(each).get("srunddp_restarts_total") for each in files(folder)]


def test_restarts_and_stalls_are_counted_over_the_starts(tmp_path: Path) -> None:
    metrics, variables = site(tmp_path)
    script = """
import srunddp, time
from srunddp import telemetry
start = srunddp.restart_count()
if start == 0:
    telemetry.event("checkpoint_written")
    Path("written").touch()
    srunddp.heartbeat()
    rest()
srunddp.heartbeat()
if start == 1:
    sys.exit(3)
srunddp.heartbeat(last=True)
wait_for("end")
"""
    with world(
        tmp_path,
        script,
        "--restarts=3",
        "--stall-timeout=2",
        size=2,
        variables=variables,
        limits={"metrics_every": 0.1},
    ) as ranks:
        until(lambda: restarts(metrics) == [2])
        (file,) = files(metrics)
        found = values(file)
        assert found["srunddp_stalls_total"] == 1
        written = (tmp_path / "written").stat().st_mtime
        assert abs(found["srunddp_last_checkpoint_timestamp_seconds"] - written) < 10
        (tmp_path / "end").touch()
        assert ranks.wait().codes == [0, 0]
    assert names(metrics) == set()


@pytest.mark.parametrize("is_file", [False, True], ids=["missing", "a file"])
def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, is_file: bool) -> None:
    if is_file:
        write(tmp_path / "metrics", "")
    variables = naming(tmp_path, tmp_path / "metrics")
    script = "time.sleep(1)"
    with world(
        tmp_path, script, size=2, variables=variables, limits={"metrics_every": 0.1}
    ) as ranks:
        done = ranks.wait()
    assert done.codes == [0, 0]
    assert done.text.count("no metrics of this run") == 1
    assert (tmp_path / "metrics").exists() == is_file


def test_without_metrics_nothing_of_them_is_imported(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "print('over')")
    text = '- nodes: "*"\n  interface: auto\n'
    variables = {"SRUNDDP_IFACES": str(write(tmp_path / "ifaces.conf", text))}
    done = srunddp("train.py", folder=tmp_path, PYTHONPROFILEIMPORTTIME="1", **variables)
    assert done.returncode == 0
    assert "srunddp.supervisor.supervisor" in done.stderr
    assert not re.search(r"srunddp\.(run\.metrics|monitor\.metrics_file)", done.stderr)


@pytest.mark.parametrize("folder", ["metrics", "~/metrics", "[/run/a, /run/b]"])
def test_the_folder_has_to_be_one_absolute_path(tmp_path: Path, folder: str) -> None:
    text = f'- nodes: "*"\n  interface: auto\n  metrics: {folder}\n'
    write(tmp_path / "train.py", "")
    done = srunddp(
        "train.py", folder=tmp_path, SRUNDDP_IFACES=str(write(tmp_path / "ifaces.conf", text))
    )
    assert "ifaces.conf:3:12: " in one_message(done)


PROMETHEUS = """
global: {{scrape_interval: 1s}}
scrape_configs:
- job_name: nodes
  honor_labels: true
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@contextmanager
def prometheus(folder: Path, metrics: Path) -> Iterator[Callable[[str], dict[str, float]]]:
    """node_exporter and Prometheus of Debian; yields what asks Prometheus for the present values
    of a metric, by job.
    """
    tools = [shutil.which(name) for name in ("prometheus-node-exporter", "prometheus")]
    if None in tools:
        pytest.skip("Debian's packages prometheus and prometheus-node-exporter")
    exporter, server = (free_port() for _ in range(2))
    write(folder / "prometheus.yml", PROMETHEUS.format(port=exporter))
    commands = (
        (
            *("--collector.disable-defaults", "--collector.textfile"),
            f"--collector.textfile.directory={metrics}",
            f"--web.listen-address=127.0.0.1:{exporter}",
        ),
        (
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{server}",
        ),
    )

    def ask(metric: str) -> dict[str, float]:
        url = f"http://127.0.0.1:{server}/api/v1/query?query={metric}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return {}
        return {each["metric"].get("job", ""): float(each["value"][1]) for each in found}

    with ExitStack() as stack:
        log = stack.enter_context(open(folder / "prometheus.log", "wb"))
        for tool, words in zip(tools, commands, strict=True):
            process = subprocess.Popen([str(tool), *words], stdout=log, stderr=log)
            stack.enter_context(process)
            stack.callback(process.kill)
        yield ask


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_prometheus_reads_two_jobs_and_not_one_that_was_killed(tmp_path: Path) -> None:
    metrics, variables = site(tmp_path)
    write(tmp_path / "train.py", STEPS)
    killed = slurm(0, 1, SLURM_JOB_ID="4711") | variables
    lives = slurm(0, 1, SLURM_JOB_ID="4712") | variables
    later = slurm(0, 1, SLURM_JOB_ID="4713") | variables
    with prometheus(tmp_path, metrics) as ask, ExitStack() as stack:
        one = stack.enter_context(started("train.py", folder=tmp_path, **killed))
        two = stack.enter_context(started("train.py", folder=tmp_path, **lives))
        until(lambda: ask("srunddp_ranks") == {"4711": 1, "4712": 1})
        # Steps are written at the second write, 10 s after the first.
        until(lambda: ask("srunddp_steps_total") == {"4711": 1, "4712": 1})
        assert ask("node_textfile_scrape_error") == {"nodes": 0}
        os.kill(one.pid, signal.SIGKILL)
        one.wait()
        three = stack.enter_context(started("train.py", folder=tmp_path, **later))
        until(lambda: ask("srunddp_ranks") == {"4712": 1, "4713": 1})
        assert ended_well(two)
        assert ended_well(three)
        until(lambda: ask("srunddp_ranks") == {})


# The file by itself.


def metrics_file(
    folder: Path, labels: Callable[[], RunLabels] = lambda: LABELS, every: float = 0.01
) -> MetricsFile:
    return MetricsFile(folder, labels, lambda: STATE, every=every, warn=print)


def test_a_file_that_goes_on_stays(tmp_path: Path) -> None:
    made = metrics_file(tmp_path)
    made.start()
    until(lambda: names(tmp_path) == {LABELS.file_name})
    made.finish(stays=True)
    assert names(tmp_path) == {LABELS.file_name}
    made = metrics_file(tmp_path)
    made.start()
    made.finish(stays=False)
    assert names(tmp_path) == set()


def test_no_thread_left_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the limit of processes, which is hard to reach on purpose without harm to other tests."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    made = metrics_file(tmp_path)
    made.start()
    made.finish(stays=False)
    assert capsys.readouterr().out == "no metrics of this run: can't start new thread\n"


def test_a_reader_finds_whole_files_alone(tmp_path: Path) -> None:
    made = metrics_file(tmp_path, every=0.0001)
    made.start()
    file = tmp_path / LABELS.file_name
    until(file.exists)
    for _ in range(300):
        assert set(read(file.read_text()).values) == set(FAMILIES)
    made.finish(stays=False)


def test_what_does_not_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    """As a directory service that is asked for the user's name, or a file system."""
    answers = threading.Event()

    def labels() -> RunLabels:
        answers.wait()
        return LABELS

    made = metrics_file(tmp_path, labels)
    began = time.monotonic()
    made.start()
    made.finish(stays=False)
    assert time.monotonic() - began < 30
    answers.set()


def test_no_link_of_another_user_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    victim = write(tmp_path / "victim", "precious")
    for name in (LABELS.file_name, LABELS.file_name + ".tmp"):
        (folder / name).symlink_to(victim)
    made = metrics_file(folder)
    made.start()
    until(lambda: not (folder / LABELS.file_name).is_symlink())
    made.finish(stays=False)
    assert victim.read_text() == "precious"


def test_only_old_files_of_others_go(tmp_path: Path) -> None:
    """Whether their processes run nobody can tell here, as in a container."""
    elsewhere = "# srunddp 1.0, process 1 since tick 1 of boot x in pid:[1]\n"
    for job, age in (("old", 1000), ("new", 10)):
        file = write(tmp_path / f"srunddp-{job}.0.ada.prom", elsewhere)
        os.utime(file, (time.time() - age, time.time() - age))
    old = write(tmp_path / "srunddp-x.0.ada.prom.tmp", "")
    os.utime(old, (0, 0))
    write(tmp_path / "srunddp-y.0.ada.prom.tmp", "")
    (tmp_path / "srunddp-z.0.ada.prom").symlink_to("/etc/passwd")
    (tmp_path / "srunddp-folder.prom").mkdir()
    remove_left_over(tmp_path)
    assert names(tmp_path) == {
        "srunddp-new.0.ada.prom",
        "srunddp-y.0.ada.prom.tmp",
        "srunddp-z.0.ada.prom",
        "srunddp-folder.prom",
    }
