"""The command ``srunddp sbatch``: a job script from options and YAML files. It may print and
exit.
"""

import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import click
import yaml

from srunddp.bootstrap.process_group.device import BACKENDS
from srunddp.config.parse import Setting, parse_values
from srunddp.config.schema import NULLS, ConfigField, build, fields_of, scalar_node, text_of
from srunddp.errors import ConfigError, UsageError, file_errors
from srunddp.sbatch import convert, slurm_options, validate
from srunddp.sbatch import submit as slurm
from srunddp.sbatch.render import render, salloc_options
from srunddp.sbatch.spec import SlurmJob
from srunddp.util import slurm_command
from srunddp.util.atomic_file import replace_file
from srunddp.util.click_types import COMPLETE, DIR, FILE, answering
from srunddp.util.console import write_stderr
from srunddp.util.option_groups import GroupedCommand, after_script

# A site's defaults, and a user's, which win over them.
DEFAULTS = ("/etc/srunddp/sbatch.yaml", "~/.config/srunddp/sbatch.yaml")
_LETTERS = {"job_name": "-J", "nodes": "-N", "cpus_per_task": "-c", "module": "-m"}
_FILES = "ifaces srunddp container error export_file input nodefile output"
_FOLDERS = "chdir data log_dir venv"
_PASSED_ON = {name.replace("-", "_"): option for name, option in slurm_options.OPTIONS.items()}
# What --help says of sbatch's own options; it lists those of the groups.
_HELP = {
    "gpus_per_node": "GPUs on each node, such as 4 or a100:4.",
    "gres": "Devices of each node, such as gpu:a100:4, instead of --gpus-per-node.",
    "mem": "Memory on each node, such as 64G; 0 for all of it.",
    "time": "Time limit, such as 04:00:00 or 1-12:00:00.",
    "partition": "Partitions to choose from, see sinfo -s.",
    "account": "The account that the job is charged to.",
    "qos": "Quality of service, see sacctmgr show qos.",
    "constraint": "Features of the nodes, such as a100&nvlink.",
    "reservation": "Nodes that are reserved under this name.",
    "nodelist": "Nodes that the job must have, such as node[01-04].",
    "exclude": "Nodes that the job must not have.",
    "exclusive": "No other job on the nodes; =user: no jobs of other users.",
    "ntasks": "Number of ranks on all nodes.",
    "gpus": "Number of GPUs on all nodes.",
    "array": "Indexes of a job array, such as 0-7%2.",
    "dependency": "Start after other jobs, such as afterok:4711.",
    "output": "The job's log; LOG_DIR/%x-%j.out unless given.",
    "error": "A separate log for standard error.",
    "mail_type": "When to send mail, such as END,FAIL.",
    "mail_user": "Who receives it.",
}
# What stands for their values there.
_METAVARS = {
    "[TYPE:]N": "gpus_per_node gpus",
    "N": "ntasks",
    "SIZE": "mem",
    "TIME": "time",
    "NAME": "partition account qos reservation conda mpi job_name",
    "NODES": "nodelist exclude",
    "FEATURES": "constraint",
    "MODULE": "modules",
    "NAME=VALUE": "env",
    "LINE": "setup",
    "OPTION": "run_options srun_arg sbatch_arg",
    "NAME@SECONDS": "signal",
    "INDEXES": "array",
    "IMAGE": "container_image",
    "SOURCE:TARGET": "container_mounts",
    "PATTERN": "stage_exclude",
    "LIST": "gres dependency mail_type",
    "USER": "mail_user",
}
_METAVAR_OF = {name: metavar for metavar, names in _METAVARS.items() for name in names.split()}
_GROUPS = {
    "Resources": "nodes gpus_per_node gpus gres ntasks_per_node ntasks cpus_per_task mem exclusive",
    "Where it runs": "partition account qos constraint reservation nodelist exclude",
    "Environment": "modules module_purge venv conda env setup srunddp offline",
    "The ranks": "module backend ifaces mpi restarts spare_nodes run_options srun_arg",
    "Time limit and requeue": "time requeue signal array dependency",
    "Logs, check, monitoring": (
        "job_name log_dir output error rank_logs monitor preflight mail_type mail_user"
    ),
    "Containers": "container container_image container_mounts",
    "Staging": "stage data stage_exclude",
    "Output of this command": "config source write force submit salloc",
    "Other options of sbatch": "sbatch_arg",
}


class _Number(click.ParamType):  # type: ignore[type-arg]
    """An integer, or ``none`` for no value."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).lower() in NULLS:
            return value
        return click.INT.convert(value, param, ctx)


class _Choice(click.Choice):  # type: ignore[type-arg]
    """One of some words, or ``none`` for no value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).lower() in NULLS:
            return value
        return super().convert(value, param, ctx)


class _Sbatch(GroupedCommand):
    """Takes every option of sbatch."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        known = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        with_value = {name for each in options if not each.is_flag for name in each.opts}
        return super().parse_args(ctx, slurm_options.rewrite(args, known, with_value))


def _partitions(context: click.Context, option: click.Parameter, incomplete: str) -> list[str]:
    """Those that Slurm has; none where it does not answer soon, as somebody has pressed the tab
    key.
    """
    names = slurm_command.output("sinfo", "-h", "-o", "%R", timeout=2.0).split()
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


_TYPES = {
    **dict.fromkeys(_FILES.split(), FILE),
    **dict.fromkeys(_FOLDERS.split(), DIR),
    "backend": _Choice(BACKENDS),
}


def _job_options(function: Any) -> Any:
    """An option for each key of the job, with its sentence and its default, and for each option of
    sbatch.
    """
    for name, key in reversed(_keys().items()):
        if name not in ("script", "arguments"):
            function = _option(name, key)(function)
    return function


def _keys() -> dict[str, ConfigField]:
    """The keys of a file: those of the job, and those that are passed on."""
    passed_on = {
        name: ConfigField(option.kind, None, _HELP.get(name, ""))
        for name, option in _PASSED_ON.items()
    }
    return fields_of(SlurmJob) | passed_on


def _option(name: str, key: ConfigField) -> Any:
    option = validate.option(name)
    settings: dict[str, Any] = {"type": _TYPES.get(name), "metavar": _METAVAR_OF.get(name)}
    settings["shell_complete"] = _partitions if name == "partition" else None
    names = [f"{option}/--no-{option[2:]}" if bool in (key.kind, *get_args(key.kind)) else option]
    if key.default in (MISSING, None, False, (), ""):
        default = ""
    else:
        default = f"  [default: {text_of(key.default)}]"
    if passed_on := _PASSED_ON.get(name):
        names = [option, *([f"-{passed_on.letter}"] if passed_on.letter else [])]
        settings["hidden"] = (
            COMPLETE not in os.environ and name not in " ".join(_GROUPS.values()).split()
        )
        # Without a value the next word is SCRIPT.
        if passed_on.takes != "=":
            settings |= {"type": FILE, "metavar": "[=VALUE]"}
    elif int in (key.kind, *get_args(key.kind)):
        settings |= {"type": _Number(), "metavar": "N"}
    if name in _LETTERS:
        names.append(_LETTERS[name])
    if name == "ntasks_per_node":
        names.append("--tasks-per-node")
    text = key.sentence[:1].upper() + key.sentence[1:] + default
    return click.option(
        *names, name, default=None, multiple=get_origin(key.kind) is tuple, help=text, **settings
    )


@click.command(
    cls=_Sbatch,
    groups=_GROUPS,
    epilog=(
        "Every other option of sbatch is passed on, by its name or its letter (not -m): see man"
        f" sbatch. Defaults of a site and a user: {' and '.join(DEFAULTS)}, with the same keys as"
        " --config."
    ),
)
@_job_options
@click.option("--config", type=FILE, help="YAML with these keys; the command line wins over it.")
@click.option(
    "--from", "source", type=FILE, help="Convert a job script that starts torchrun or accelerate."
)
@click.option("--write", type=FILE, help="Write the script to FILE, and make the log folder.")
@click.option(
    "--force", is_flag=True, help="Replace FILE of --write; submit a SCRIPT that is not seen here."
)
@click.option(
    "--submit", is_flag=True, help="Make the log folder, submit the job, and print its number."
)
@click.option(
    "--salloc",
    is_flag=True,
    help="For an interactive allocation: a script that is started by bash.",
)
@click.argument("script", type=FILE, required=False)
@click.argument("arguments", nargs=-1, type=FILE, metavar="[ARGUMENTS]...")
def sbatch(
    source: str | None, write: str | None, force: bool, submit: bool, salloc: bool, **given: Any
) -> None:
    """Write the job script that trains SCRIPT on Slurm.

    \b
    srunddp sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=8 --time=4:00:00 train.py --epochs=20
    srunddp sbatch --config=job.yaml --submit
    srunddp sbatch --from=torchrun.sh --write=job.sh
    """
    if salloc and submit:
        raise UsageError(
            "--salloc and --submit",
            expected="one of them",
            hint="write --write=FILE in the place of --submit, then bash FILE",
        )
    if source and (salloc or any(value not in (None, ()) for value in given.values())):
        raise UsageError(
            "--from with SCRIPT or options of the job",
            expected="--from without them",
            hint="remove them, and change the file that is written",
        )
    with answering():
        if source:
            job = SlurmJob(log_dir="")  # which makes no folder
            text, notes = convert.convert(source)
            _note(
                [
                    *notes,
                    "srunddp has to be in PATH there: install it in the environment of the script",
                ]
            )
        else:
            job = _job(given, salloc, submit and not force)
            text = render(job, ["srunddp", *sys.argv[1:]], interactive=salloc)
        if not submit:
            _note(slurm.check(text, salloc_options(job) if salloc else [], os.environ))
        if write or submit:
            _save(
                text,
                write,
                [os.path.join(job.folder, each) for each in job.log_folders],
                force=force,
            )
        if write:
            write_stderr(f"srunddp: written: {write} -> {'bash' if salloc else 'sbatch'} {write}\n")
        elif not submit:
            click.echo(text, nl=False)
        if submit:
            number, code = slurm.submit(text, os.environ, _note, wait="wait" in job.slurm)
            click.echo(number)
            sys.exit(code)


def _job(given: Mapping[str, Any], interactive: bool, has_to_be_seen: bool) -> SlurmJob:
    """The job, when all notes on it have been printed."""
    paths = [path for path in map(os.path.expanduser, DEFAULTS) if os.path.exists(path)]
    settings = parse_settings(given, ["srunddp", *sys.argv[1:]], paths)
    for path in paths:
        of_path = {
            name: text_of(value) for name, (value, source) in settings.items() if source == path
        }
        _note(
            [f"{path}: {', '.join(f'{name}={value}' for name, value in of_path.items())}"]
            if of_path
            else []
        )
    requested = job_of(settings)
    job = _with_defaults(requested, os.environ)
    validate.check(job, interactive=interactive)
    problem = validate.script_problem(job)
    if problem and has_to_be_seen and not (job.stage or job.in_container):
        raise ConfigError(problem[0], expected="a Python script to submit", hint=problem[1])
    _note(
        [f"no --venv: the active environment is used, {job.venv}"]
        if job.venv != requested.venv
        else []
    )
    _note([" -> ".join(problem)] if problem else [])
    _note(validate.notes(job, {} if interactive else os.environ))
    _note(after_script(click.get_current_context(), given["arguments"]) if given["script"] else [])
    return job


def parse_settings(
    given: Mapping[str, Any], command: Sequence[str], files: Sequence[str] = ()
) -> dict[str, Setting]:
    """What options, by key, and the files of defaults and ``--config`` give; the script will quote
    the command.

    A ConfigError where a value is of another type, a key is unknown, or a character is not
    printable.
    """
    for each in command:
        validate.check_printable("the argument", each)
    keys = _keys()
    chosen = {name: given[name] for name in ("config", *keys) if given[name] not in (None, ())}
    none = [name for name, value in chosen.items() if value == ("none",) and name != "arguments"]
    values = [(name, _node(() if name in none else value)) for name, value in chosen.items()]
    return parse_values(keys, [*(("config", scalar_node(path)) for path in files), *values], {})


def job_of(settings: Mapping[str, Setting]) -> SlurmJob:
    """The job of these settings."""
    values = {name: setting.value for name, setting in settings.items()}
    words = [
        slurm_options.words(each.name, values.pop(name, None)) for name, each in _PASSED_ON.items()
    ]
    values["sbatch_arg"] = (*itertools.chain(*words), *values.get("sbatch_arg", ()))
    job: SlurmJob = build(SlurmJob, values)
    return job


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
    if folder and os.path.isdir(folder := os.path.join(job.folder, folder)):
        return os.access(os.path.join(folder, "bin", "srunddp"), os.X_OK)
    return bool(folder or job.conda or job.in_container)


def _note(lines: Iterable[str]) -> None:
    for line in lines:
        write_stderr(f"srunddp: note: {line}\n")


def _save(text: str, path: str | None, folders: Sequence[str], *, force: bool) -> None:
    """Make the folders of logs, and write the script to a file that may be run."""
    if path and os.path.lexists(path) and not force:
        raise ConfigError(
            f"{path} exists", expected="a new file", hint="choose another name, or add --force"
        )
    hint = "choose another --log-dir, --output or --write"
    with file_errors(expected="a folder that can be written to", hint=hint):
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
        if path:
            replace_file(Path(path), text.encode())
            os.chmod(path, 0o755)
