"""A trace of a few steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from srunddp.errors import ConfigError
from srunddp.train.profiler import Profile, parse


def train(profile: Profile, steps: range) -> None:
    for step in steps:
        profile.before(step)
        with record_function(f"step {step}"):
            torch.ones(3).add(1)
        profile.after(step)
        with record_function(f"after {step}"):
            pass


def traced(path: Path) -> list[str]:
    """The names of the steps in a trace, and of what came after them."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    names = {event.get("name", "") for event in json.loads(content)["traceEvents"]}
    assert "aten::add" in names
    return sorted(name for name in names if name.startswith(("step ", "after ")))


@pytest.mark.parametrize("name", ["trace-rank0.json", "trace-rank0.json.gz"])
@pytest.mark.parametrize(
    ("made", "found"),
    [
        (range(10), ["after 3", "step 3", "step 4"]),
        (range(4, 10), ["step 4"]),  # a resume has skipped the first
    ],
)
def test_a_trace_has_the_steps_of_its_range(tmp_path: Path, name: str, made: range, found: list[str]) -> None:
    said: list[str] = []
    profile = Profile(range(3, 5), tmp_path / "traces" / name, said.append)
    train(profile, made)
    profile.close()
    assert traced(tmp_path / "traces" / name) == found
    assert list((tmp_path / "traces").iterdir()) == [tmp_path / "traces" / name]
    assert said == []


def test_ending_early_writes_what_there_is_once(tmp_path: Path) -> None:
    profile = Profile(range(3, 50), tmp_path / "trace.json", pytest.fail)
    train(profile, range(4))
    assert not (tmp_path / "trace.json").exists()
    profile.close()
    assert "step 3" in traced(tmp_path / "trace.json")
    (tmp_path / "trace.json").unlink()
    train(profile, range(6))
    profile.close()
    assert list(tmp_path.iterdir()) == [], "steps that are made again"


@pytest.mark.parametrize("made", [range(3), range(5, 9), range(0)])
def test_without_a_step_of_the_range_there_is_no_trace(tmp_path: Path, made: range) -> None:
    profile = Profile(range(3, 5), tmp_path / "trace.json", pytest.fail)
    train(profile, made)
    profile.close()
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_is_said_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    train(Profile(range(1, 2), tmp_path / "file" / "trace.json", said.append), range(5))
    assert len(said) == 1
    assert said[0].startswith(f"no trace in {tmp_path}/file/trace.json: ")


def test_a_script_that_profiles_itself_goes_on_without_our_trace(tmp_path: Path) -> None:
    said: list[str] = []
    ours = Profile(range(1, 3), tmp_path / "trace.json", said.append)
    with torch.profiler.profile() as own:
        train(ours, range(5))
    assert said == [f"no trace in {tmp_path}/trace.json: the script profiles itself"]
    assert {"step 0", "step 4"} <= {event.name for event in own.events()}


@pytest.mark.parametrize(("text", "steps"), [("10:15", range(10, 15)), ("0:1", range(1)), (" 3:4 ", range(3, 4))])
def test_a_range_is_first_and_end(text: str, steps: range) -> None:
    assert parse(text) == steps


@pytest.mark.parametrize("text", ["", "10", "15:10", "10:10", "-1:5", "a:b", "1:2:3", "1.0:2", "1:", ":2", "٣:٤"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"profile is {text!r}; expected FIRST:END, END above FIRST -> write ")
