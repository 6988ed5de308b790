"""What all tests share: where srunddp is, which MPI environments there are, and what must not be
skipped in CI.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.gpu.requirements import need_gpus

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "programs"

# What the machine, or the shell that runs the tests, may have exported.
_FOREIGN = (
    "CONDA_PREFIX",
    "GLOO_",
    "LOCAL_RANK",
    "MASTER_",
    "NCCL_",
    "OMPI_COMM",
    "PMI",
    "PYTHON",
    "RANK",
    "SLURM",
    "SRUNDDP",
    "VIRTUAL_ENV",
    "WORLD_SIZE",
)
# The bed that the tests run in: its Slurm, and whether its kernel is this machine's or User Mode
# Linux, such as "24.11 machine" or "24.11 uml". Empty outside of one. tests/beds/init.sh sets it.
BED = os.environ.get("SRUNDDP_TEST_BED", "")
# How many times as long as elsewhere a test may take: under User Mode Linux, each system call costs
# several switches of processes.
SLOWNESS = 5 if BED.endswith("uml") else 1

pytest_plugins = ["tests.slurm.shared_cluster"]

# Kinds of tests that are run by themselves, each with an option of its name.
_APART = ("soak", "interop", "docs")

# Folders that `--quick` does not even collect. Each test there needs a cluster, an MPI or a GPU, or
# imports torch.
NOT_QUICK = ("docs", "gpu", "interop", "mpirun", "slurm", "soak", "train")

# How many inputs a test of hypothesis makes up. CI tries the same inputs each time, a developer's
# machine new ones. A test sets no number of its own: `bin/test` takes many
# (`--hypothesis-profile=many`), `--quick` and the gate few.
settings.register_profile(
    "few", max_examples=20, deadline=None, derandomize="CI" in os.environ, print_blob=True
)
settings.register_profile("many", max_examples=500, deadline=None, print_blob=True)
settings.load_profile("few")

# In a module of which all tests are slow.
_ALL_SLOW = re.compile(r"^pytestmark = .*\bmark\.slow\b", re.MULTILINE)
_TEST = re.compile(r"^def test_", re.MULTILINE)
_LIMIT = 600 * SLOWNESS  # seconds: a test that hangs fails, rather than hold up all others


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long campaigns, and nothing else")
    parser.addoption(
        "--quick", action="store_true", help="run what needs no cluster and takes little time"
    )
    parser.addoption(
        "--gate",
        action="store_true",
        help="run what needs no cluster, and what is marked for the gate",
    )
    parser.addoption(
        "--interop", action="store_true", help="run other people's programs, and nothing else"
    )
    parser.addoption("--docs", action="store_true", help="try what is published, and nothing else")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave folders and modules without a quick test out of `--quick`: to collect them would import
    torch.
    """
    if not config.getoption("--quick"):
        return None
    if collection_path in [ROOT / "tests" / name for name in NOT_QUICK]:
        return True
    is_test = collection_path.match("test_*.py")
    if is_test and _ALL_SLOW.search(collection_path.read_text()):
        return True
    return None


def _is_chosen(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the tier that the options name has this test."""
    marks = {mark.name for mark in item.iter_markers()}
    if config.getoption("--quick"):
        return marks.isdisjoint({"slow", "alone", "slurm", "mpirun", "gpu", *_APART})
    if config.getoption("--gate"):
        needs_more_than_a_machine = not marks.isdisjoint({"slurm", "mpirun"})
        return marks.isdisjoint({"soak", "interop", "nightly"}) and (
            "gate" in marks or not needs_more_than_a_machine
        )
    wanted = {kind for kind in _APART if config.getoption(f"--{kind}")}
    return marks & set(_APART) == wanted


# After the conftest.py files of folders that mark their tests.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers = [option for option in ("quick", "gate", *_APART) if config.getoption(f"--{option}")]
    if len(tiers) > 1:
        raise pytest.UsageError(
            f"{' and '.join(f'--{tier}' for tier in tiers)}; expected one of them"
        )
    chosen = [item for item in items if _is_chosen(item, config)]
    left_out = [item for item in items if not _is_chosen(item, config)]
    config.hook.pytest_deselected(items=left_out)
    # Slow modules come first: if one began as the last, all other processes would wait for it.
    items[:] = sorted(chosen, key=lambda item: item.get_closest_marker("slow") is None)
    if "soak" not in tiers:
        for item in chosen:
            item.add_marker(pytest.mark.timeout(_LIMIT))


# As the last line: `bin/test --quick` must not look like the whole.
@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and config.getoption("--quick") and not hasattr(config, "workerinput"):
        reports = [
            report
            for reports in reporter.stats.values()
            for report in reports
            if hasattr(report, "nodeid")
        ]
        run = {report.nodeid.partition("[")[0] for report in reports}
        there = sum(
            len(_TEST.findall(path.read_text())) for path in (ROOT / "tests").rglob("test_*.py")
        )
        reporter.write_line(
            f"{there - len(run)} of {there} test functions were left out; bin/test runs them all"
        )


# Before fixtures are set up, which may use the GPU.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if marker := item.get_closest_marker("gpu"):
        need_gpus(*marker.args)


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> None:
    for name in [
        name
        for name in os.environ
        if name.startswith(_FOREIGN) and not name.startswith("SRUNDDP_TEST_")
    ]:
        del os.environ[name]
    # A shell has those that it starts in the background ignore Ctrl-C, and nohup has them ignore
    # SIGHUP; so would all that the tests start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def missing(what: str) -> None:
    """Skip a test for want of something that bin/test installs; in CI that is a failure.

    A bed has no CI of its own: what its Debian lacks is skipped, and said at the end of its run.
    """
    if os.environ.get("CI") == "true" and not BED:
        pytest.fail(f"in CI this must not be missing: {what}")
    pytest.skip(what)


def tool(*candidates: str) -> str:
    """The first of these commands that is there."""
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    missing(f"none of {', '.join(candidates)}")
    raise AssertionError


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, str]]:
    """The namespaces of two nodes, by node."""
    from tests.support.namespaces import two_nodes

    with two_nodes() as names:
        yield names


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Puts a machine with these GPUs in the place of this one."""
    monkeypatch.syspath_prepend(str(PROGRAMS / "nvml"))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def put(*gpus: dict[str, Any], **machine: Any) -> None:
        (tmp_path / "nvml.json").write_text(
            json.dumps({"driver": "580.95.05", "cuda": 12080, "gpus": gpus} | machine)
        )
        monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))

    yield put
    sys.modules.pop("pynvml", None)
