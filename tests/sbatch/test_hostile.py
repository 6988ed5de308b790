"""Whatever stands in a field is passed on as it is, or refused: nothing of it is ever carried
out.
"""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from srunddp.errors import ConfigError
from srunddp.sbatch import validate
from srunddp.sbatch.render import directive, render, salloc_options
from srunddp.sbatch.spec import SlurmJob
from tests.support.job_scripts import Called, carry_out
from tests.support.job_specs import requested, written

pytestmark = pytest.mark.slow

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
    "\x85touch canary",
    "\u2028touch canary",
    "\udcff",
    "",
]
# What it takes for a field to be looked at.
FULL: dict[str, Any] = {
    "script": "train.py",
    "backend": "gloo",
    "cpus_per_task": 2,
    "monitor": "1",
    "requeue": True,
    "preflight": True,
    "log_dir": "logs",
    "offline": True,
    "ifaces": "ifaces.conf",
    "sbatch_arg": ("--gpus-per-node=2",),
}
TEXTS = [  # lines of setup are carried out, as they are bash
    field.name
    for field in dataclasses.fields(SlurmJob)
    if str(field.type).startswith(("str", "tuple")) and field.name != "setup"
]
SALLOC = ("job_name", "sbatch_arg", "log_dir", "script")


def filled(name: str, text: str) -> SlurmJob:
    """A job with a text in one field, and with all else that uses it."""
    in_lists = {
        "env": (f"NAME={text}",),
        "arguments": (text, "second"),
        "sbatch_arg": (f"--comment={text}",),
    }
    value = in_lists.get(name, (f"--x={text}",) if name == "srun_arg" else (text,))
    more: dict[str, Any] = {name: value if isinstance(getattr(SlurmJob(), name), tuple) else text}
    if name in ("data", "stage_exclude", "venv"):
        more |= {
            "stage": True,
            "log_dir": None,
            "monitor": None,
            "venv": more.get("venv", "venv"),
        }
    if name == "container_mounts":
        more["container_image"] = "image"
    return SlurmJob(**{**FULL, **more})


def text_of(job: SlurmJob, *, interactive: bool = False) -> str | None:
    """The script; None where the job is refused, by one line that says why."""
    refusal = None
    try:
        validate.check(job, {}, interactive=interactive)
    except ConfigError as error:
        refusal = error
    assert refusal is None or (str(refusal).isprintable() and refusal.expected and refusal.hint)
    return None if refusal else render(job, ("srunddp", "sbatch"), interactive=interactive)


def unharmed(folder: Path) -> bool:
    return not list(folder.rglob("canary*"))


def passed_on(text: str, called: Called) -> bool:
    """Whether a program got it whole: as a word, behind ``=`` or a comma in one, or in a
    variable.
    """
    ends = (f"={text}", f",{text}", f"/{text}", f"/{text}/bin:")
    values = [value for words, environ in called.calls for value in (*words, *environ.values())]
    return any(value == text or value.endswith(ends) for value in values)


_DIRECTIVES = {"job_name", "signal", "sbatch_arg"}


def made_of(
    name: str, folder: Path, interactive: bool = False
) -> Iterator[tuple[str, SlurmJob, str, Path]]:
    """Each text that passes in this field, with the job, its script, and a folder; nothing may be
    carried out.
    """
    for number, text in enumerate(HOSTILE):
        job = dataclasses.replace(filled(name, text), requeue=not interactive)
        made = text_of(job, interactive=interactive)
        assert made is None or text.isprintable()
        if made is not None:
            (folder / str(number)).mkdir()
            yield text, job, made, folder / str(number)
            assert unharmed(folder)


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_in_a_field_is_carried_out(name: str, tmp_path: Path) -> None:
    for text, _, made, folder in made_of(name, tmp_path):
        if name in _DIRECTIVES:
            # For the shell a comment; what Slurm reads of it is tested on the cluster.
            option = "comment" if name == "sbatch_arg" else name.replace("_", "-")
            assert not text or directive(option, text) in made.splitlines()
            continue
        called = carry_out(made, folder)
        is_default = (name, text) == ("mpi", "")
        assert name == "srunddp" or (
            called.code == 0 and (is_default or passed_on(text, called))
        ), called
    assert list(tmp_path.iterdir()) or name == "modules", (
        "nothing gets through: is the field used at all?"
    )


@pytest.mark.parametrize("name", SALLOC)
def test_no_text_is_carried_out_on_the_way_into_salloc(name: str, tmp_path: Path) -> None:
    for _, job, made, folder in made_of(name, tmp_path, interactive=True):
        called = carry_out(made, folder, SLURM_JOB_ID="")
        assert called.of("salloc") == [[*salloc_options(job), "bash", str(folder / "job.sh")]]
        assert called.of("srun") == []


@given(st.text(max_size=20))
@example("none")  # which unsets an option
def test_a_text_of_command_line_or_file_stays_as_it_was(text: str) -> None:
    """``--config`` reads it back, and a list's element with commas stays one."""
    words = ["srunddp", "sbatch", f"--env=NAME={text}", "train.py", text]
    if not text.isprintable():
        with pytest.raises(ConfigError, match="expected printable characters -> "):
            requested(words)
        return
    job = requested(words)
    assert (job.env, job.arguments) == ((f"NAME={text}",), (text,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(
            yaml.safe_dump({"script": "train.py", "env": [f"NAME={text}"], "arguments": [text]})
        )
        assert requested(["srunddp", "sbatch", f"--config={path}"]) == job


def test_a_folder_is_no_pattern_of_slurms() -> None:
    text = text_of(SlurmJob(script="train.py", log_dir="100%j", monitor="1")) or ""
    assert "\n#SBATCH --output=100%%j/%x-%j.out\n" in text
    assert " --log-dir=100%j --monitor=1 --monitor-dir=100%j " in text
    assert ' report "$SLURM_JOB_ID" --monitor-dir=100%j ' in text


def test_the_comment_that_quotes_the_command_cannot_end(tmp_path: Path) -> None:
    words = [
        "srunddp",
        "sbatch",
        "--job-name=a",
        "train.py",
        "x; touch canary #",
        "$(touch canary)",
    ]
    text = written(words)
    carry_out(text, tmp_path)
    assert unharmed(tmp_path)
    quoted = next(
        line for line in text.splitlines() if line.startswith("#     srunddp")
    ).removeprefix("#     ")
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {quoted}"], capture_output=True, text=True, cwd=tmp_path
    )
    assert printed.stdout.splitlines() == words
