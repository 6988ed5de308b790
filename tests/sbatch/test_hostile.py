"""Whatever stands in a field is passed on as it is, or refused: nothing of it is ever carried out."""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srunddp.config.parse import parse_options
from srunddp.errors import ConfigError
from srunddp.sbatch import render_mpirun, render_slurm, validate
from srunddp.sbatch.sections import Provenance, directive
from srunddp.sbatch.spec import LaunchSpec, MpirunJob, SlurmJob
from tests.support.job_scripts import Called, carry_out
from tests.support.job_specs import rendered, wished

HOSTILE = [
    "a b",
    "it's",
    'say "hi"',
    "$(touch canary)",
    "`touch canary`",
    "$HOME ${PATH} $((1+1))",
    "a; touch canary #",
    "a && touch canary",
    "a | touch canary",
    "> canary",
    "--help",
    "-x",
    "back\\slash",
    "\\",
    "'; touch canary; '",
    '"; touch canary; "',
    "\\'; touch canary; \\'",
    "!! !touch",
    "{a,b} * ? [a-z] ~",
    "ümläut 日本",
    "%j %x %",
    "# comment",
    "line\ntouch canary",
    "line\r\n#SBATCH --comment=canary\ntouch canary",
    "tab\tbell\x07",
    "escape\x1b[31m",
    "\x00",
    "\u2028touch canary",
    "\udcff",
    "",
]
# What it takes for a field to be looked at.
BASE: dict[str, Any] = {"script": "train.py", "backend": "gloo"}
FULL: dict[str, Any] = {
    **BASE,
    "gpus_per_node": "2",
    "cpus_per_task": 2,
    "monitor": 1,
    "requeue": True,
    "preflight": True,
    "rank_logs": True,
    "offline": True,
    "ifaces": "ifaces.conf",
}
TEXTS = [field.name for field in dataclasses.fields(SlurmJob) if str(field.type).startswith(("str", "tuple"))]
MPI_TEXTS = [field.name for field in dataclasses.fields(MpirunJob) if str(field.type).startswith(("str", "tuple"))]
SALLOC = ("job_name", "partition", "account", "nodelist", "constraint", "reservation", "log_dir", "script")


def filled(kind: type[LaunchSpec], name: str, text: str) -> LaunchSpec:
    """A job with a text in one field, and with all else that uses it."""
    value = (f"NAME={text}",) if name == "env" else (text, "second") if name == "arguments" else (text,)
    more: dict[str, Any] = {name: value if isinstance(getattr(kind(), name), tuple) else text}
    if kind is SlurmJob and name in ("data", "stage_exclude", "venv"):
        more |= {"stage": True, "rank_logs": False, "monitor": None, "venv": more.get("venv", "venv")}
    if name == "gres":
        more |= {"gpus_per_node": None}
    if name == "container_mounts":
        more |= {"container_image": "image"}
    base = BASE | FULL if kind is SlurmJob else BASE | {"preflight": True, "rank_logs": True}
    return kind(**{**base, **more})


def text_of(start: LaunchSpec, *, interactive: bool = False) -> str | None:
    """The script; None where the job is refused, by one line that says why."""
    if refusal := refused(lambda: validate.check(start, interactive=interactive)):
        assert str(refusal).isprintable()
        assert all((refusal.expected, refusal.hint))
        return None
    written = Provenance(("srunddp", "sbatch"))
    if isinstance(start, MpirunJob):
        return render_mpirun.render(start, written)
    assert isinstance(start, SlurmJob)
    return render_slurm.render(start, written, interactive=interactive)


def refused(act: Callable[[], object]) -> ConfigError | None:
    try:
        act()
    except ConfigError as error:
        return error
    return None


def unharmed(folder: Path) -> bool:
    return not list(folder.rglob("canary*"))


def shown(name: str, start: LaunchSpec, called: Called) -> list[str]:
    """The text's traces, which must all be there as it was given."""
    value = getattr(start, name)
    text = value[0] if isinstance(value, tuple) else value
    environ = [environ for words, environ in called.calls if words[0] in ("srun", "mpirun")][-1]
    training = called.training()
    reported = isinstance(start, MpirunJob) or ["report", "7", f"--monitor-dir={text}"] in called.of("srunddp")
    prefix = "./" if text.startswith("-") else ""
    where = {
        "env": text in [f"NAME={environ.get('NAME')}"],
        "venv": environ.get("VIRTUAL_ENV", "").endswith(text) and text in environ["PATH"],
        "conda": ["activate", text] in called.of("conda"),
        "ifaces": f"--ifaces={text}" in training,
        "log_dir": f"--log-dir={text}" in training and reported,
        "container_image": f"--container-image={text}" in training,
        "container_mounts": any(
            word.startswith("--container-mounts=") and word.endswith(f",{text}") for word in training
        ),
        "script": prefix + text in training,
        "data": any(text in words for words in called.of("srunddp")),
        "stage_exclude": any(text in words for words in called.of("srunddp")),
        "modules": ["load", text] in called.of("module"),
        "mpi": f"--mpi={text}" in training or not text,
        "mpirun": bool(training),
    }
    return [] if where.get(name, text in training) else [f"{name}={text!r} is not in {training}"]


_DIRECTIVES = {
    "job_name", "gres", "gpus_per_node", "mem", "time", "partition", "account", "qos", "constraint", "reservation",
    "nodelist", "exclude", "array", "dependency", "signal",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_in_a_field_of_a_job_is_carried_out(name: str, tmp_path: Path) -> None:
    passed = 0
    for number, text in enumerate(HOSTILE):
        start = filled(SlurmJob, name, text)
        made = text_of(start)
        if made is None:
            continue
        passed += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        if name in _DIRECTIVES:
            # For the shell a comment; what Slurm reads of it is tested on the cluster.
            assert directive(name.replace("_", "-"), text) in made.splitlines()
        elif name != "srunddp":
            called = called_well(made, folder)
            assert shown(name, start, called) == []
        else:
            carry_out(made, folder)
        assert unharmed(tmp_path)
    strict = {"modules", "gres", "gpus_per_node", "mem", "time", "array", "dependency", "signal", "mpi"}
    assert passed or name in strict | {"run_options"}, "nothing gets through: is the field used at all?"


def called_well(text: str, folder: Path) -> Called:
    called = carry_out(text, folder)
    assert called.code == 0, called
    return called


@pytest.mark.parametrize("name", MPI_TEXTS)
def test_no_text_in_a_field_of_an_mpirun_is_carried_out(name: str, tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE):
        start = filled(MpirunJob, name, text)
        if (made := text_of(start)) is None:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        called = carry_out(made, folder)
        if name not in ("srunddp", "mpirun"):
            assert called.code == 0, called
            assert shown(name, start, called) == [], text
        assert unharmed(tmp_path)


@pytest.mark.parametrize("name", SALLOC)
def test_no_text_is_carried_out_on_the_way_into_salloc(name: str, tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE):
        start = dataclasses.replace(filled(SlurmJob, name, text), requeue=False)
        assert isinstance(start, SlurmJob)
        if (made := text_of(start, interactive=True)) is None:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        called = carry_out(made, folder, SLURM_JOB_ID="")
        (words,) = called.of("salloc")
        assert words == [*render_slurm.allocation(start)[1:], "bash", str(folder / "job.sh")]
        assert called.of("srun") == []
        assert unharmed(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_texts_in_all_fields_at_once_are_passed_on_or_refused(data: st.DataObject) -> None:
    # All that str.isprintable() lets through, and more often what means something to a shell.
    letters = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
    text = st.text(st.sampled_from("'\"$`\\;&|()<>*?#~!{}[]= -%") | letters, min_size=1, max_size=12)
    names = ("job_name", "account", "constraint", "reservation", "env", "ifaces", "log_dir", "script")
    given_texts = {name: data.draw(text, name) for name in names}
    values: dict[str, Any] = {**FULL, **given_texts, "arguments": tuple(data.draw(st.lists(text, max_size=4)))}
    values["env"] = (f"NAME={given_texts['env']}",)
    made = text_of(SlurmJob(**values))
    if made is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        called = carry_out(made, Path(folder))
        assert called.code == 0, called
        assert called.training()[-len(values["arguments"]) :] == list(values["arguments"]) or not values["arguments"]
        for name in ("env", "ifaces", "log_dir", "script"):
            assert shown(name, SlurmJob(**values), called) == []


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_what_the_command_line_or_a_file_passes_on_is_the_text_as_it_was(text: str) -> None:
    """``--config`` reads it back, and a list's element with commas stays one."""
    words = ["srunddp", "sbatch", f"--env=NAME={text}", "train.py", text]
    if refusal := refused(lambda: wished(words)):
        assert not text.isprintable()
        assert str(refusal).isprintable()
        return
    job = wished(words).job
    assert (job.env, job.arguments) == ((f"NAME={text}",), (text,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump({"script": "train.py", "env": [f"NAME={text}"], "arguments": [text]}))
        assert parse_options(SlurmJob, [("config", yaml.ScalarNode("tag:yaml.org,2002:str", str(path)))]) == job


@pytest.mark.parametrize("text", ["line\ntouch canary", "\x1b[31m", "\x85touch canary"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_control_character_in_a_file_is_refused_by_one_line(name: str, text: str, tmp_path: Path) -> None:
    value: Any = [f"NAME={text}"] if name == "env" else [text] if isinstance(getattr(SlurmJob(), name), tuple) else text
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"script": "train.py", name: value}))
    wish = wished(["srunddp", "sbatch", f"--config={tmp_path / 'job.yaml'}"])
    with pytest.raises(ConfigError, match="expected letters that can be printed -> ") as error:
        rendered(wish.job, wish)
    assert str(error.value).isprintable()


def test_a_folder_is_no_pattern_of_slurms() -> None:
    job = SlurmJob(script="train.py", log_dir="100%j", monitor=1, rank_logs=True)
    text = text_of(job) or ""
    assert "\n#SBATCH --output=100%%j/%x-%j.out\n" in text
    assert " --log-dir=100%j --monitor=1 --monitor-dir=100%j " in text
    assert ' report "$SLURM_JOB_ID" --monitor-dir=100%j ' in text


def test_the_comment_that_quotes_the_command_cannot_end(tmp_path: Path) -> None:
    words = ["srunddp", "sbatch", "--job-name=a", "train.py", "x; touch canary #", "$(touch canary)"]
    wish = wished(words)
    text = rendered(wish.job, wish)
    carry_out(text, tmp_path)
    assert unharmed(tmp_path)
    quoted = next(line for line in text.splitlines() if line.startswith("#     srunddp")).removeprefix("#     ")
    printed = subprocess.run(["bash", "-c", f"printf '%s\\n' {quoted}"], capture_output=True, text=True, cwd=tmp_path)
    assert printed.stdout.splitlines() == words
