"""One process a node, that ends with its supervisor in every case, and what it wrote is
complete.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from srunddp.monitor.config import MonitorConfig
from srunddp.monitor.sampler.process import SamplerConfig, Samples
from tests.support.facts import tells
from tests.support.sampled import NODE, rows, supervised
from tests.support.small_disk import small_disk
from tests.support.starting import until
from tests.support.worlds import is_gone


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGSTOP])
def test_a_killed_supervisor_takes_its_sampler_with_it(tmp_path: Path, number: int) -> None:
    """Also one that cannot see that the line to its supervisor has ended."""
    with supervised(tmp_path) as job:
        until(lambda: job.rows("node"))
        os.kill(job.sampler, number)
        job.process.kill()
        until(lambda: is_gone(job.sampler))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_signals_to_all_processes_do_not_end_it(tmp_path: Path, number: int) -> None:
    with supervised(tmp_path) as job:
        os.kill(job.sampler, number)
        before = len(job.rows("node"))
        until(lambda: len(job.rows("node")) > before + 2)


def test_the_last_sample_is_taken_at_the_end(tmp_path: Path) -> None:
    with supervised(tmp_path, seconds=600) as job:
        until(lambda: job.rows("links"))
        assert job.finish() == ""
        assert is_gone(job.sampler)
        assert {name: len(job.rows(name)) for name in ("node", "tasks")} == {"node": 2, "tasks": 2}


def test_one_that_is_gone_or_does_not_answer_is_finished(tmp_path: Path) -> None:
    with supervised(tmp_path) as job:
        until(lambda: job.rows("node"))
        os.kill(job.sampler, signal.SIGKILL)
        assert job.do("os.waitpid(-1, 0)[0]") == str(job.sampler)
        assert job.finish() == ""
    with supervised(tmp_path) as job:
        os.kill(job.sampler, signal.SIGSTOP)
        assert job.do("sampler.finish(0.2)") == "''"
        assert is_gone(job.sampler)


def test_files_are_complete_when_it_is_killed(tmp_path: Path) -> None:
    """And begun anew."""
    (tmp_path / f"{NODE}.node.csv").write_text("old\n" * 1000)
    with supervised(tmp_path, seconds=0.02) as job:
        until(lambda: len(job.rows("links")) > 10)
        os.kill(job.sampler, signal.SIGKILL)
        until(lambda: is_gone(job.sampler))
        for name in ("node", "tasks", "links"):
            text = (tmp_path / f"{NODE}.{name}.csv").read_text()
            assert text.endswith("\n")
            assert len({line.count(",") for line in text.splitlines()}) == 1


def test_it_is_named_and_holds_nothing_of_the_job_open(tmp_path: Path) -> None:
    with supervised(tmp_path) as job:
        until(lambda: job.rows("links"))
        assert Path(f"/proc/{job.sampler}/comm").read_text() == "srunddp-monitor\n"
        assert Path(f"/proc/{job.process.pid}/fd/77").exists()
        found = {fd.name: os.readlink(fd) for fd in Path(f"/proc/{job.sampler}/fd").iterdir()}
        assert [found[standard] for standard in "012"] == ["/dev/null"] * 3
        assert "77" not in found
        others = [
            at
            for at in found.values()
            if not at.startswith(("/proc/", "/sys/", "/dev/null", str(tmp_path)))
        ]
        assert len(others) == 1  # the line to its supervisor
        assert others[0].startswith("socket:")
        # It imports nothing heavy.
        assert job.do("{'torch', 'psutil', 'numpy', 'csv', 'pynvml'} & {*sys.modules}") == "set()"
        maps = Path(f"/proc/{job.sampler}/maps").read_text()
        assert not [name for name in ("libtorch", "numpy", "psutil") if name in maps]


def test_samples_do_not_drift(tmp_path: Path) -> None:
    """Most are at the same place within an interval; a sample that begins when the one before is
    over wanders.
    """
    with supervised(tmp_path, seconds=0.01) as job:
        until(lambda: len(job.rows("node")) > 250)
        times = [round(1000 * float(row["time"])) % 10 for row in job.rows("node")]
    shares = [
        sum((time - place) % 10 in (9, 0, 1) for time in times) / len(times) for place in range(10)
    ]
    assert max(shares) > 0.6


NONE: set[str] = set()
BROKEN = {
    "node.NetworkCounters.rows": {"links"},
    "process_tree.Tasks.look": NONE,
    "gpu.Gpus.choose": NONE,
}


@pytest.mark.parametrize(("broken", "missing"), [*BROKEN.items(), ("node.Node.rows", {"node"})])
def test_a_source_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str, missing: set[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AttributeError(broken)

    monkeypatch.setattr(f"srunddp.monitor.sampler.{broken}", fail)
    Samples(
        SamplerConfig(MonitorConfig(tmp_path, NODE, 0, True, 1.0), "eth0", "", os.getpid(), None)
    ).take()
    written = {name for name in ("node", "tasks", "links") if rows(tmp_path / f"{NODE}.{name}.csv")}
    assert written == {"node", "tasks", "links"} - missing


def test_a_full_disk_ends_it_with_one_line_and_whole_rows(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk, supervised(disk, seconds=0.005) as job:
        until(lambda: job.rows("node") and is_gone(job.sampler))
        said = job.finish()
        assert tells(said, "monitor", NODE, f"{disk}/{NODE}.", ".csv: No space left")
        for path in disk.glob("*.csv"):
            assert path.read_bytes().endswith(b"\n")
            assert None not in {value for row in rows(path) for value in row.values()}
    # A folder that is gone is said, too.
    with supervised(tmp_path / "none") as job:
        file = f"{tmp_path}/none/{NODE}.node.csv"
        assert tells(job.finish(), "monitor", NODE, file, "No such file")
