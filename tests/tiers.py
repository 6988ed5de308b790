"""Run a tier of the tests: its steps, those of one stage at the same time, and a summary with what
it cost.

``python -m tests.tiers quick | gate | all``; bin/test sets everything up first and calls this.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tiers"

# Tests wait more than they compute, so there are more processes than cores. Each cluster has some
# 30 daemons.
CORES = os.cpu_count() or 1
PROCESSES = min(2 * CORES, 8)
CLUSTERS = min(CORES, 3)

# A gate that needed more than this many second runs fails: so many tests that fail now and then
# hide a real defect.
MOST_FLAKY = 2
# When this many tests have failed, the gate has failed whatever a second run says. A few are still
# run, as a hint.
MOST_SECOND_RUNS = 5

PYTEST = (sys.executable, "-m", "pytest")
PYTEST_SOME_FAILED = 1  # pytest's exit code where tests ran, and some failed


@dataclass(frozen=True)
class Step:
    """One command of a tier.

    Attributes:
        name: What the summary and the log file call it.
        command: The words of the command.
        cache: For a step of pytest, the folder where pytest notes which tests have failed.
    """

    name: str
    command: tuple[str, ...]
    cache: Path | None = None


@dataclass(frozen=True)
class Tier:
    """What ``bin/test`` runs in one go.

    Attributes:
        stages: Steps of one stage run at the same time; a stage begins when the one before it has
            ended.
        second_run: The words that, followed by a node id, run a test that failed once more by
            itself; empty where a failure is final.
    """

    stages: tuple[tuple[Step, ...], ...]
    second_run: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What has come of a tier so far.

    Attributes:
        broken: Steps that failed otherwise than by tests that failed.
        failed: Tests that failed, by pytest's node ids; where they were run again, those that
            failed again.
        flaky: Tests that failed, and passed when they were run again.
        lines: The closing line of each run of pytest.
    """

    broken: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.broken and not self.failed and len(self.flaky) <= MOST_FLAKY


def tools() -> tuple[Step, ...]:
    """Lint, format, types and layers, each as a step."""
    here = Path(sys.executable).parent
    return (
        Step("lint", (str(here / "ruff"), "check", ".")),
        Step("format", (str(here / "ruff"), "format", "--check", ".")),
        Step("types", (str(here / "mypy"),)),
        Step("layers", (str(here / "lint-imports"),)),
    )


def pytest_step(name: str, *arguments: str, processes: int = 0) -> Step:
    """A step that runs pytest on a part of the tests.

    Args:
        name: The name of the step.
        arguments: Options and paths for pytest.
        processes: How many processes run tests at the same time; with 0 pytest itself runs one
            after the other.
    """
    cache = BUILD / f"{name}.cache"
    command = [*PYTEST, "-o", f"cache_dir={cache}", "--durations=10", *arguments]
    if processes:
        # In the order of tests/conftest.py, which begins with the slow modules.
        command += [
            "--numprocesses",
            str(processes),
            "--dist",
            "loadscope",
            "--no-loadscope-reorder",
        ]
    return Step(name, tuple(command), cache)


def tiers(options: tuple[str, ...] = ()) -> dict[str, Tier]:
    """All tiers by name.

    Args:
        options: More options for each run of pytest.
    """
    no_cluster = ("-m", "not slurm and not alone", "--ignore=tests/slurm", *options)
    cluster = ("-m", "slurm and not alone", "tests/slurm", *options)
    alone = ("-m", "alone", *options)
    many = "--hypothesis-profile=many"
    return {
        "quick": Tier(
            ((pytest_step("tests", "--quick", *options, processes=PROCESSES), *tools()),)
        ),
        "gate": Tier(
            (
                (
                    pytest_step("tests", "--gate", *no_cluster, processes=PROCESSES),
                    pytest_step("cluster", "--gate", *cluster, processes=CLUSTERS),
                    *tools(),
                ),
                (pytest_step("alone", "--gate", *alone),),
            ),
            second_run=(*PYTEST, "--gate", *options),
        ),
        "all": Tier(
            (
                tools(),
                (
                    pytest_step("tests", many, *no_cluster, processes=PROCESSES),
                    pytest_step("cluster", many, *cluster, processes=CLUSTERS),
                ),
                (pytest_step("alone", many, *alone),),
            )
        ),
    }


def machine_cpu_seconds() -> float:
    """The CPU time that all processes of this machine have taken since it started.

    A cluster's daemons are nobody's children, so the time of our own children would leave them out.
    Source: proc_stat(5); idle time, waiting for a disk and time stolen by a hypervisor do not
    count.
    """
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, Path("/proc/stat").read_text().split()[1:8]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def closing_line(log: Path) -> str:
    """The last line with text, which of pytest says how many tests passed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run_step(step: Step, live: bool) -> int:
    """Run a step to its end and return its exit code.

    Args:
        step: The step.
        live: Whether its output is shown as it comes. Else it is shown as a whole when the step has
            ended, as two runs of pytest would write into each other's lines.
    """
    log = BUILD / f"{step.name}.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            step.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout
        # A read that returns what is there, so that the dots of a live step do not wait for the end
        # of their line.
        while piece := os.read(process.stdout.fileno(), 65536):
            file.write(piece.decode(errors="replace"))
            if live:
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
    if not live:
        print(f"\n{step.name}: {' '.join(step.command)}\n{log.read_text()}", flush=True)
    return process.returncode


def failed_tests(cache: Path) -> list[str]:
    """The node ids that pytest's cache notes as failed."""
    path = cache / "v" / "cache" / "lastfailed"
    if not path.exists():
        return []
    found: dict[str, bool] = json.loads(path.read_text())
    return sorted(found)


def run_stage(stage: tuple[Step, ...], outcome: Outcome) -> None:
    """Run the steps of a stage at the same time, the first one with its output shown as it
    comes.
    """
    codes: dict[str, int] = {}

    def run(step: Step, live: bool) -> None:
        codes[step.name] = run_step(step, live)

    threads = [threading.Thread(target=run, args=(step, step is stage[0])) for step in stage]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in stage:
        judge(step, codes[step.name], outcome)


def judge(step: Step, code: int, outcome: Outcome) -> None:
    """Note how a step ended."""
    if step.cache is not None:
        outcome.lines.append(f"{step.name}: {closing_line(BUILD / f'{step.name}.log')}")
    if code == 0:
        return
    if step.cache is not None and code == PYTEST_SOME_FAILED:
        failed = failed_tests(step.cache)
    else:
        failed = []
    outcome.failed += failed
    if not failed:
        outcome.broken.append(f"{step.name} ended with exit code {code}")


def run_again(command: tuple[str, ...], outcome: Outcome) -> None:
    """Run each test that failed once more by itself; who passes then is flaky.

    The output of the first failure is in the log of its step, and has been printed.
    """
    candidates = outcome.failed[:MOST_SECOND_RUNS]
    outcome.failed = outcome.failed[MOST_SECOND_RUNS:]
    for number, test in enumerate(candidates):
        print(f"\nonce more, by itself: {test}", flush=True)
        if run_step(Step(f"second-run-{number}", (*command, test)), live=True) == 0:
            outcome.flaky.append(test)
        else:
            outcome.failed.append(test)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def summary(name: str, outcome: Outcome, wall: float, cpu: float) -> str:
    """The last lines of a tier."""
    lines = ["", f"In all, {name}:", *outcome.lines]
    lines += [f"FAILED {test}" for test in outcome.failed]
    lines += [f"BROKEN {step}" for step in outcome.broken]
    lines += [
        f"FLAKY {test}: failed, and passed when it was run again by itself"
        for test in outcome.flaky
    ]
    if len(outcome.flaky) > MOST_FLAKY:
        lines.append(f"{len(outcome.flaky)} tests are flaky; the gate allows {MOST_FLAKY}")
    lines.append(
        f"wall time {minutes(wall)}, CPU time {minutes(cpu)} of all processes on this machine;"
        " set-up not included"
    )
    lines.append(f"{name}: {'passed' if outcome.passed else 'failed'}")
    return "\n".join(lines)


def run(name: str, tier: Tier) -> int:
    """Run a tier, print its summary and return an exit code: 0 where all is well, else 1."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    began = time.monotonic()
    cpu_before = machine_cpu_seconds()
    outcome = Outcome()
    for stage in tier.stages:
        run_stage(stage, outcome)
    if tier.second_run:
        run_again(tier.second_run, outcome)
    print(
        summary(name, outcome, time.monotonic() - began, machine_cpu_seconds() - cpu_before),
        flush=True,
    )
    return 0 if outcome.passed else 1


def main() -> int:
    name, *options = sys.argv[1:]
    return run(name, tiers(tuple(options))[name])


if __name__ == "__main__":
    sys.exit(main())
