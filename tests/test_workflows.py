"""The workflows run each tier, with few rights, by actions and images that nobody can exchange."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
each_workflow = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@dataclass(frozen=True)
class Job:
    """A job of a workflow.

    Attributes:
        name: Its key below ``jobs``.
        permissions: Its own, where it has some.
        minutes: Its time limit, or the expression that stands for it; None where it has none.
        image: The image of its container; empty where it runs on the machine itself.
        uses: The actions of its steps.
        commands: The commands of its steps, with those of a matrix put in.
    """

    name: str
    permissions: dict[str, str]
    minutes: int | str | None
    image: str
    uses: list[str]
    commands: list[str]


def load(path: Path) -> dict[Any, Any]:
    """Read a workflow; YAML takes its key ``on`` for True."""
    document = yaml.safe_load(path.read_text())
    assert isinstance(document, dict)
    return document


def jobs(path: Path) -> Iterator[Job]:
    """Yield the jobs of a workflow."""
    for name, job in load(path)["jobs"].items():
        steps = job["steps"]
        cases = job.get("strategy", {}).get("matrix", {}).get("include", [])
        commands = [step["run"] for step in steps if "run" in step]
        yield Job(
            name=name,
            permissions=job.get("permissions", {}),
            minutes=job.get("timeout-minutes"),
            image=job.get("container", {}).get("image", ""),
            uses=[step["uses"] for step in steps if "uses" in step],
            commands=commands + [case["command"] for case in cases],
        )


def commands(name: str) -> set[str]:
    """All commands of the workflow of this name."""
    return {
        command
        for job in jobs(ROOT / ".github" / "workflows" / f"{name}.yml")
        for command in job.commands
    }


@each_workflow
def test_actions_are_named_by_commit_and_images_by_digest(path: Path) -> None:
    """Whoever takes over an action or an image can move its tags."""
    for job in jobs(path):
        assert job.uses, job
        for action in job.uses:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r"|[\w.:/-]+@sha256:[0-9a-f]{64}", job.image), job.image


@each_workflow
def test_each_action_has_its_release_as_a_comment(path: Path) -> None:
    """Nobody can read a commit id, and the tools that propose a newer one look for the comment."""
    lines = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.search(r"@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line), line


def test_an_action_has_the_same_commit_everywhere() -> None:
    used = {action for path in FILES for job in jobs(path) for action in job.uses}
    assert len(used) == len({action.partition("@")[0] for action in used}), used


@each_workflow
def test_a_workflow_may_only_read_and_each_job_ends(path: Path) -> None:
    """Without a limit of its own a job that hangs takes six hours."""
    assert load(path)["permissions"] == {"contents": "read"}
    for job in jobs(path):
        assert not job.permissions, job
        assert job.minutes, job


def test_a_push_to_a_pull_request_starts_one_run() -> None:
    """A branch's push and its pull request are the same commit: one of them is tried."""
    workflow = load(ROOT / ".github" / "workflows" / "tests.yml")
    assert workflow[True] == {"push": {"branches": ["main"]}, "pull_request": None}
    assert "github.event.pull_request.number" in workflow["concurrency"]["group"]
    assert workflow["concurrency"]["cancel-in-progress"] is True


def test_every_tier_is_run_by_some_workflow() -> None:
    assert {".ci/run", "bin/test --quick"} <= commands("tests")
    assert {"bin/test", "bin/test --docs", "bin/test --interop", "bin/test --quick"} <= commands(
        "nightly"
    )
    assert "bin/test --soak" in commands("weekly")
    assert {
        f"bin/test --slurm {version}{groups}"
        for version in ("24.11", "26.05")
        for groups in ("", " --cgroup2")
    } <= commands("beds")


@pytest.mark.parametrize("name", ["nightly", "weekly", "beds"])
def test_what_a_change_does_not_wait_for_runs_by_the_clock(name: str) -> None:
    triggers = load(ROOT / ".github" / "workflows" / f"{name}.yml")[True]
    assert [*triggers] == ["schedule", "workflow_dispatch"]
    [schedule] = triggers["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* [*\d]", schedule["cron"]), schedule


def test_the_issue_form_asks_for_what_the_page_says_a_ticket_needs() -> None:
    page = (ROOT / "docs" / "guides" / "failures.md").read_text()
    section = page.split("\n## What to attach to a ticket\n")[1].split("\n## ")[0]
    listed = re.findall(r"`[^`]+`", section)
    form = load(ROOT / ".github" / "ISSUE_TEMPLATE" / "defect.yml")
    asked = " ".join(str(part["attributes"]) for part in form["body"])
    assert listed
    assert [name for name in listed if name not in asked] == []
