"""The command ``srunddp sbatch``: a job script from options and a YAML file. It may print and exit."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import click
import yaml

from srunddp.config.parse import parse_options
from srunddp.config.schema import fields_of, scalar_node, text_of
from srunddp.errors import ConfigError
from srunddp.sbatch import submit as slurm
from srunddp.sbatch import validate
from srunddp.sbatch.render import render, salloc_options
from srunddp.sbatch.spec import SlurmJob
from srunddp.util.atomic_file import replace_file
from srunddp.util.click_types import answering
from srunddp.util.console import write_stderr


def _job_options(function: Any) -> Any:
    """An option for each key of the job, with its sentence and its default."""
    for name, key in reversed(fields_of(SlurmJob).items()):
        if name not in ("script", "arguments"):
            default = "" if key.default in (MISSING, None, False, (), "") else f"  [default: {text_of(key.default)}]"
            option = validate.option(name)
            function = click.option(
                f"{option}/--no-{option[2:]}" if key.kind is bool else option,
                name,
                default=None,
                metavar="N" if int in (key.kind, *get_args(key.kind)) else None,
                multiple=get_origin(key.kind) is tuple,
                help=key.sentence[:1].upper() + key.sentence[1:] + default,
            )(function)
    return function


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@_job_options
@click.option("--config", metavar="FILE", help="YAML with these keys; the command line wins over it.")
@click.option("--output", metavar="FILE", help="Write the script there, and make the log folder.")
@click.option("--force", is_flag=True, help="With --output: replace a file that is there.")
@click.option("--submit", is_flag=True, help="Make the log folder, submit the job, and print its number.")
@click.option("--salloc", is_flag=True, help="For an interactive allocation: started by bash.")
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def sbatch(output: str | None, force: bool, submit: bool, salloc: bool, **given: Any) -> None:
    """Write the job script that trains SCRIPT on Slurm.

    \b
    srunddp sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=8 --time=4:00:00 train.py --epochs=20
    srunddp sbatch --config=job.yaml --submit
    """
    if salloc and submit:
        raise click.UsageError("--salloc and --submit exclude each other: bash starts what --output=FILE writes.")
    with answering():
        command = ["srunddp", *sys.argv[1:]]
        requested = parse_job(given, command)
        job = _with_defaults(requested, os.environ)
        validate.check(job, interactive=salloc)
        text = render(job, command, interactive=salloc)
        _note([f"no environment is named: {job.venv}, which is active here"] if job.venv != requested.venv else [])
        _note(validate.notes(job, {} if salloc else os.environ))
        if not submit:
            _note(slurm.check(text, salloc_options(job) if salloc else [], os.environ))
        if output or submit:
            _save(text, output, job.log_dir, force=force)
        else:
            click.echo(text, nl=False)
        if submit:
            click.echo(slurm.submit(text, os.environ, _note))


def parse_job(given: Mapping[str, Any], command: Sequence[str]) -> SlurmJob:
    """The job as the options, by key, and the file of ``--config`` have it; the script will quote the command.

    Raises:
        ConfigError: a value is of another type; a key is unknown; a letter cannot be printed.
    """
    for each in command:
        validate.check_printable("the argument", each)
    names = ("config", *fields_of(SlurmJob))
    return parse_options(SlurmJob, [(name, _node(given[name])) for name in names if given[name] not in (None, ())])


def _node(value: str | bool | tuple[str, ...]) -> yaml.Node:
    """As YAML has it; each of several values is a text as it stands."""
    if isinstance(value, tuple):
        return yaml.SequenceNode("tag:yaml.org,2002:seq", [scalar_node(each) for each in value])
    return scalar_node(text_of(value))


def _with_defaults(job: SlurmJob, environ: Mapping[str, str]) -> SlurmJob:
    """The active virtual environment where none is named, and an srunddp that the nodes find."""
    if not (job.venv or job.conda or job.in_container) and (active := environ.get("VIRTUAL_ENV")):
        job = replace(job, venv=active)
    if job.srunddp or _has_srunddp(job, environ):
        return job
    return replace(job, srunddp=os.path.abspath(shutil.which(sys.argv[0]) or sys.argv[0]))


def _has_srunddp(job: SlurmJob, environ: Mapping[str, str]) -> bool:
    """Whether the job's environment has the command ``srunddp``, as far as can be seen here."""
    folder = job.venv or (job.conda if job.conda and "/" in job.conda else None)
    if job.conda and job.conda == environ.get("CONDA_DEFAULT_ENV"):
        folder = environ.get("CONDA_PREFIX")
    if folder and os.path.isdir(folder):
        return os.access(os.path.join(folder, "bin", "srunddp"), os.X_OK)
    return bool(folder or job.conda or job.in_container)


def _note(lines: Iterable[str]) -> None:
    for line in lines:
        write_stderr(f"srunddp: note: {line}\n")


def _save(text: str, output: str | None, log_dir: str, *, force: bool) -> None:
    """Make the log folder, and write the script to a file that may be run."""
    if output and os.path.lexists(output) and not force:
        raise ConfigError(f"{output} is there", expected="a new file", hint="name another, or add --force")
    try:
        os.makedirs(log_dir, exist_ok=True)
        if output:
            replace_file(Path(output), text.encode())
            os.chmod(output, 0o755)
    except OSError as error:
        found, hint = f"{error.filename}: {os.strerror(error.errno or 0)}", "name another --log-dir or --output"
        raise ConfigError(found, expected="a place to write to", hint=hint) from None
