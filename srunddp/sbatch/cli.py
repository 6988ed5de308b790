"""Provides the command ``srunddp sbatch``: makes a job script from options and YAML files, then
prints, writes or submits it.
"""

import copy
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from shlex import quote as word
from typing import Any, get_args, get_origin

import click
import yaml

from srunddp.config.parse import Setting, parse_values
from srunddp.config.schema import NULLS, ConfigField, build, fields_of, scalar_node, text_of
from srunddp.errors import ConfigError, UsageError, file_errors, one_of
from srunddp.sbatch import convert, run_options, slurm_options, validate
from srunddp.sbatch import render as scripts
from srunddp.sbatch import submit as slurm
from srunddp.sbatch.spec import SlurmJob
from srunddp.util import slurm_command
from srunddp.util.atomic_file import is_stream, write_output
from srunddp.util.click_types import COMPLETE, DIR, FILE, MonitoredCommand
from srunddp.util.console import say, write_stderr
from srunddp.util.option_groups import after_script

# The files with the defaults of a site and of a user. The user's values win.
DEFAULTS = ("/etc/srunddp/sbatch.yaml", "~/.config/srunddp/sbatch.yaml")
# Together with --from, only keys that concern the replaced command count, from options and from
# files of defaults. They include all options of srunddp run except these: module, because the
# script's launcher shows whether SCRIPT is a module; spare_nodes and min_nodes, because srun needs
# other options if a run goes on without a node.
_NOT_CARRIED = ("module", "spare_nodes", "min_nodes")
_CARRIED_BESIDES = ("mpi", "env", "srun_arg", "srunddp", "run_options")
CARRIED = (*(name for name in run_options.OPTIONS if name not in _NOT_CARRIED), *_CARRIED_BESIDES)
_PASSED_ON = {name.replace("-", "_"): option for name, option in slurm_options.OPTIONS.items()}


def _or_none(kind: click.ParamType) -> click.ParamType:  # type: ignore[type-arg]
    """Return a type of options that accepts what ``kind`` accepts, and ``none`` for no value. It
    returns each value as it is written.
    """

    # Derive from the kind's own class: to write the help and to complete words, click asks by
    # isinstance whether a type is a choice or a range.
    class OrNone(type(kind)):  # type: ignore[misc]
        def convert(
            self, value: Any, param: click.Parameter | None, ctx: click.Context | None
        ) -> Any:
            """Check a value unless it is ``none``, and return it as it is written."""
            if str(value).lower() not in NULLS:
                super().convert(value, param, ctx)
            return value

    taken = copy.copy(kind)
    taken.__class__ = OrNone
    return taken


class _Sbatch(MonitoredCommand):
    """A command that accepts every option of sbatch in addition to its declared options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rewrite the options that click cannot read by itself, then read the words."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        known = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        with_value = {name for each in options if not each.is_flag for name in each.opts}
        with_value.discard("--monitor")  # its value may be left out
        return super().parse_args(ctx, slurm_options.rewrite(args, known, with_value))


def _partitions(context: click.Context, option: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of partitions that begin with a text, for completion by a shell.

    The list is empty if Slurm does not answer within 2 s, because the user waits at the prompt.
    """
    names = slurm_command.output("sinfo", "-h", "-o", "%R", timeout=2.0).split()
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


@dataclass(frozen=True)
class _Shown:
    """What ``--help`` shows for an option in addition to the name, type and default of its key.

    Attributes:
        name: The key of the option in :class:`SlurmJob` or in a file.
        metavar: The placeholder for the value in ``--help``; None for click's own.
        sentence: The help of an option that is passed on to sbatch, or a sentence to add to the
            help of an option of srunddp run. Other options have their help in :class:`SlurmJob`.
        kind: The type of the value, if it is not plain text.
        also: A further name of the option, such as ``-N``.
    """

    name: str
    metavar: str | None = None
    sentence: str = ""
    kind: click.ParamType | None = None  # type: ignore[type-arg]
    also: str | None = None


# The options that --help lists, by group, in the order of the list.
_GROUPS = {
    "Resources": (
        _Shown("nodes", also="-N"),
        _Shown("gpus_per_node", "[TYPE:]N", "GPUs on each node, such as 4 or a100:4."),
        _Shown("gpus", "[TYPE:]N", "Number of GPUs on all nodes."),
        _Shown(
            "gres", "LIST", "Devices of each node, such as gpu:a100:4, instead of --gpus-per-node."
        ),
        _Shown("ntasks_per_node", also="--tasks-per-node"),
        _Shown("ntasks", "N", "Number of ranks on all nodes."),
        _Shown("cpus_per_task", also="-c"),
        _Shown("mem", "SIZE", "Memory on each node, such as 64G; 0 for all of it."),
        _Shown("exclusive", sentence="No other job on the nodes; =user: no jobs of other users."),
    ),
    "Where it runs": (
        _Shown("partition", "NAME", "Partitions to choose from, see sinfo -s."),
        _Shown("account", "NAME", "The account that the job is charged to."),
        _Shown("qos", "NAME", "Quality of service, see sacctmgr show qos."),
        _Shown("constraint", "FEATURES", "Features of the nodes, such as a100&nvlink."),
        _Shown("reservation", "NAME", "Nodes that are reserved under this name."),
        _Shown("nodelist", "NODES", "Nodes that the job must have, such as node[01-04]."),
        _Shown("exclude", "NODES", "Nodes that the job must not have."),
    ),
    "Environment": (
        _Shown("modules", "MODULE"),
        _Shown("module_purge"),
        _Shown("venv", kind=DIR),
        _Shown("conda", "NAME"),
        _Shown("env", "NAME=VALUE"),
        _Shown("setup", "LINE"),
        _Shown("srunddp", kind=FILE),
        _Shown("offline"),
    ),
    "The ranks": (
        _Shown("module", also="-m"),
        _Shown("backend"),
        _Shown("ifaces"),
        _Shown("mpi", "NAME"),
        _Shown("restarts"),
        _Shown("spare_nodes"),
        _Shown("min_nodes"),
        _Shown("result"),
        _Shown("run_options", "OPTION"),
        _Shown("srun_arg", "OPTION"),
    ),
    "Time limit and requeue": (
        _Shown("time", "TIME", "Time limit, such as 04:00:00 or 1-12:00:00."),
        _Shown("requeue"),
        _Shown("signal", "NAME@SECONDS"),
        _Shown("array", "INDEXES", "Indexes of a job array, such as 0-7%2."),
        _Shown("dependency", "LIST", "Start after other jobs, such as afterok:4711."),
    ),
    "Logs, check, monitoring": (
        _Shown("job_name", "NAME", also="-J"),
        _Shown("log_dir", sentence="The job's log is in DIR, too; without DIR in logs."),
        _Shown("output", sentence="The job's log; logs/%x-%j.out unless given.", kind=FILE),
        _Shown("error", sentence="A separate log for standard error.", kind=FILE),
        _Shown("monitor", sentence="The job's script ends with srunddp report."),
        _Shown("monitor_dir"),
        _Shown("preflight"),
        _Shown("mail_type", "LIST", "When to send mail, such as END,FAIL."),
        _Shown("mail_user", "USER", "Who receives it."),
    ),
    "Containers": (
        _Shown("container", kind=FILE),
        _Shown("container_image", "IMAGE"),
        _Shown("container_mounts", "SOURCE:TARGET"),
    ),
    "Staging": (_Shown("stage"), _Shown("data", kind=DIR), _Shown("stage_exclude", "PATTERN")),
    "Output of this command": (
        _Shown("config"),
        _Shown("source"),
        _Shown("write"),
        _Shown("force"),
        _Shown("submit"),
        _Shown("salloc"),
    ),
    "Other options of sbatch": (_Shown("sbatch_arg", "OPTION"),),
}
_LISTED = {shown.name: shown for group in _GROUPS.values() for shown in group}
# Options that --help does not list, but whose values a shell can complete.
_UNLISTED = {
    shown.name: shown
    for shown in (
        _Shown("chdir", kind=DIR),
        _Shown("export_file", kind=FILE),
        _Shown("input", kind=FILE),
        _Shown("nodefile", kind=FILE),
    )
}


def _job_options(function: Any) -> Any:
    """Add an option to a command for each key of the job and for each option of sbatch, with its
    help and its default.
    """
    # Begin with the last key: click lists options in the reverse of the order in which decorators
    # add them.
    for name, key in reversed(_keys().items()):
        if name not in ("script", "arguments"):
            function = _option(name, key)(function)
    return function


def _keys() -> dict[str, ConfigField]:
    """Return all keys that a YAML file may have: the fields of the job, the options of srunddp run,
    and the options of sbatch that are passed on.
    """
    keys = fields_of(SlurmJob)
    for name, option in run_options.OPTIONS.items():
        if name not in keys:
            keys[name] = run_options.key_of(option)
    for name, passed_on in _PASSED_ON.items():
        sentence = _LISTED[name].sentence if name in _LISTED else ""
        keys[name] = ConfigField(passed_on.kind, None, sentence)
    return keys


def _option(name: str, key: ConfigField) -> Any:
    """Return the decorator that adds a key's option to a command."""
    shown = _LISTED.get(name) or _UNLISTED.get(name) or _Shown(name)
    passed_on = _PASSED_ON.get(name)
    of_run = run_options.OPTIONS.get(name)
    option = validate.option(name)
    kind = shown.kind
    metavar = shown.metavar
    names = [option]
    if passed_on:
        if passed_on.letter:
            names.append(f"-{passed_on.letter}")
        if passed_on.takes != "=":
            # The option may have no value, so click must not take the next word for its value:
            # _Sbatch has turned --hold into --hold=true.
            kind = FILE
            metavar = "[=VALUE]"
    elif _holds(bool, key):
        names = [f"{option}/--no-{option[2:]}"]
    elif of_run:
        kind = _or_none(of_run.type)
        metavar = of_run.metavar
    elif _holds(int, key):
        kind = _or_none(click.INT)
        metavar = "N"
    if shown.also:
        names.append(shown.also)
    return click.option(
        *names,
        name,
        # None means that the option was not given, so that a value from a file counts.
        default=None,
        multiple=get_origin(key.kind) is tuple,
        help=_help(key, of_run, shown),
        type=kind,
        metavar=metavar,
        shell_complete=_partitions if name == "partition" else None,
        # A shell can complete all options of sbatch and of srunddp run. --help lists only the most
        # needed ones.
        hidden=bool(passed_on or of_run) and name not in _LISTED and COMPLETE not in os.environ,
    )


def _holds(kind: type, key: ConfigField) -> bool:
    """Tell whether the key accepts values of type ``kind``, alone or among other types."""
    return kind in (key.kind, *get_args(key.kind))


def _help(key: ConfigField, of_run: click.Option | None, shown: _Shown) -> str:
    """Return the text of an option in ``--help``: the key's sentence and the default. An option of
    srunddp run has the same text as in ``srunddp run --help``, and the additional sentence.
    """
    if of_run:
        return " ".join(filter(None, [of_run.help, shown.sentence]))
    text = key.sentence[:1].upper() + key.sentence[1:]
    if key.default in (MISSING, None, False, (), ""):
        return text
    return f"{text}  [default: {text_of(key.default)}]"


@click.command(
    cls=_Sbatch,
    groups={title: " ".join(shown.name for shown in group) for title, group in _GROUPS.items()},
    epilog=(
        "Every other option of srunddp run is known by its name: see srunddp run --help. Every"
        " other option of sbatch is passed on, by its name or its letter (not -m, -Q, -v): see man"
        f" sbatch. Defaults of a site and a user: {' and '.join(DEFAULTS)}, with the same keys as"
        " --config."
    ),
)
@_job_options
@click.option("--config", type=FILE, help="YAML with these keys; the command line wins over it.")
@click.option(
    "--from",
    "source",
    type=FILE,
    help="Convert a job script that starts torchrun, accelerate or deepspeed.",
)
@click.option("--write", type=FILE, help="Write the script to FILE, and make the log folder.")
@click.option(
    "--force",
    is_flag=True,
    help=(
        "Replace FILE of --write; submit a SCRIPT that is not seen here, or a job that Slurm says"
        " cannot run."
    ),
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
    if source:
        _check_with_source(given, salloc=salloc)
        job = None
        added = _added(given)
        text, notes = convert.convert(source, _carried(added))
        validate.check_run_options(added, os.environ, script=text)
        _note(notes)
        _note(["srunddp has to be in PATH there: install it in the environment of the script"])
    else:
        job = _job(given, interactive=salloc, has_to_be_seen=submit and not force)
        text = scripts.render(job, ["srunddp", *sys.argv[1:]], interactive=salloc)
    _check_with_slurm(
        text, scripts.salloc_options(job) if job and salloc else [], submit=submit, force=force
    )
    # The log folder must exist before the job starts, because Slurm does not make it.
    if write or submit:
        folders = [os.path.join(job.folder, each) for each in job.log_folders] if job else []
        _save(text, write, folders, force=force)
    if write:
        write_stderr(f"srunddp: written: {write} -> {'bash' if salloc else 'sbatch'} {write}\n")
    elif not submit:
        click.echo(text, nl=False)
    if submit:
        waits = bool(job and "wait" in job.slurm)
        number, code = slurm.submit(text, os.environ, _note, wait=waits)
        # Only the number goes to standard output: job=$(srunddp sbatch --submit …).
        click.echo(number)
        if waits:
            _say_how_it_ended(number, code, job)
        else:
            _say_what_follows(number, job)
        sys.exit(code)


def _check_with_slurm(text: str, options: Sequence[str], *, submit: bool, force: bool) -> None:
    """Ask Slurm whether a job can run, because Slurm also accepts jobs that would wait forever.

    Args:
        text: The job script.
        options: The words of salloc's command line; empty for a script of sbatch.
        submit: Whether the job is submitted next.
        force: Whether to submit the job whatever Slurm says.

    Raises:
        ConfigError: Slurm says that the job cannot run.
    """
    if submit and force:
        return
    try:
        notes = slurm.check(text, options, os.environ)
    except ConfigError as error:
        if not submit:
            raise
        hint = f"{error.hint}; to submit it all the same: --submit --force"
        raise ConfigError(error.found, expected=error.expected, hint=hint) from None
    # The notes say that Slurm did not answer. Leave them out if the job is submitted next, because
    # then the error of sbatch says so.
    if not submit:
        _note(notes)


def _say_what_follows(number: str, job: SlurmJob | None) -> None:
    """Print where a submitted job's log is, and the commands that read its files."""
    logs = number
    if job:
        log, logs = _logs_of(number, job)
        say(f"job {number} is submitted, its log: {log}")
    _say_how_to_report(number, job)
    say(f"if it fails -> srunddp triage {logs}")


def _say_how_it_ended(number: str, code: int, job: SlurmJob | None) -> None:
    """Print how a job ended, after sbatch has waited for its end, and the commands that read its
    files.
    """
    logs = number
    ended = f"job {number} has ended with exit code {code}"
    if job:
        log, logs = _logs_of(number, job)
        ended += f", its log: {log}"
    say(ended)
    _say_how_to_report(number, job)
    if code:
        say(f"what failed -> srunddp triage {logs}")


def _logs_of(number: str, job: SlurmJob) -> tuple[str, str]:
    """Return the path of a job's log, and the argument by which srunddp triage finds the log."""
    log, is_whole = scripts.log_of(job, number)
    # Prefer the log's path to the job's number: Slurm soon forgets an ended job, and then srunddp
    # triage cannot ask where the job's log is.
    if is_whole:
        return log, word(log)
    return log, number


def _say_how_to_report(number: str, job: SlurmJob | None) -> None:
    if job and job.monitor:
        folder = os.path.join(job.folder, job.monitor_folder)
        words = ["report", *([] if folder == "logs" else [f"--monitor-dir={folder}"]), number]
        say(f"where the time goes -> srunddp {shlex.join(words)}")


def _check_with_source(given: Mapping[str, Any], *, salloc: bool) -> None:
    """Refuse options that --from does not take.

    Args:
        given: The values of the options, by key.
        salloc: Whether --salloc is given.

    Raises:
        UsageError: An option is given that --from does not take.
    """
    others = [
        "SCRIPT" if name in ("script", "arguments") else validate.option(name)
        for name, value in given.items()
        if value not in (None, ()) and name not in CARRIED
    ]
    if salloc:
        others.append("--salloc")
    if others:
        takes = one_of(map(validate.option, _CARRIED_BESIDES), "and")
        raise UsageError(
            f"--from with {one_of(dict.fromkeys(others), 'and')}",
            expected=f"--from, with no options but those of srunddp run, {takes}",
            hint="remove it, and change the #SBATCH lines of the file that is written",
        )


def _added(given: Mapping[str, Any]) -> SlurmJob:
    """Return a job with only the values that options and files of defaults add to a converted
    command. Print notes on what each file of defaults adds, and on values that are not used.
    """
    settings, paths = _settings(given)
    for path in paths:
        of_path = [name for name, setting in settings.items() if setting.path == path]
        used = [f"{name}={text_of(settings[name].value)}" for name in of_path if name in CARRIED]
        unused = [name for name in of_path if name not in CARRIED]
        if used:
            _note([f"{path}: {', '.join(used)}"])
        if unused:
            _note([f"{path}: not used, as the job script has its own: {', '.join(unused)}"])
    job = job_of({name: settings[name] for name in settings if name in CARRIED})
    validate.check_texts(job)
    return job


def _carried(job: SlurmJob) -> convert.Carried:
    return convert.Carried(
        srun=scripts.step_options(job),
        program=job.srunddp or "",
        run=scripts.run_options(job),
        env=job.env,
    )


def _settings(given: Mapping[str, Any]) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings from options and from the files of defaults that exist, and the paths of
    these files.
    """
    paths = [path for path in map(os.path.expanduser, DEFAULTS) if os.path.exists(path)]
    return parse_settings(given, ["srunddp", *sys.argv[1:]], paths), paths


def _job(given: Mapping[str, Any], *, interactive: bool, has_to_be_seen: bool) -> SlurmJob:
    """Make the job from the options and files, check it, and print all notes on it.

    Args:
        given: The values of the options, by key.
        interactive: Whether the script is for salloc.
        has_to_be_seen: Whether to refuse a training script that this node does not see, because the
            job is submitted at once.
    """
    settings, paths = _settings(given)
    for path in paths:
        of_path = [
            f"{name}={text_of(value)}"
            for name, (value, source) in settings.items()
            if source == path
        ]
        if of_path:
            _note([f"{path}: {', '.join(of_path)}"])
    requested = job_of(settings)
    job = _with_defaults(requested, os.environ)
    validate.check(job, os.environ, interactive=interactive)
    problem = validate.script_problem(job)
    if problem and has_to_be_seen and not (job.stage or job.in_container):
        raise ConfigError(problem[0], expected="a Python script to submit", hint=problem[1])
    if problem:
        _note([" -> ".join(problem)])
    _note(validate.notes(job, os.environ, interactive=interactive))
    if given["script"]:
        _note(after_script(click.get_current_context(), given["arguments"]))
    return job


def parse_settings(
    given: Mapping[str, Any], command: Sequence[str], files: Sequence[str] = ()
) -> dict[str, Setting]:
    """Merge the options, the file of ``--config`` and the files of defaults.

    Args:
        given: The values of the options, by key.
        command: The words of the command line, which the job script quotes.
        files: The files of defaults; a later file wins over an earlier one.

    Returns:
        The value of each key that an option or a file gives, and where the value comes from.

    Raises:
        ConfigError: A value has the wrong type, a key is unknown, or a character is not printable.
    """
    for each in command:
        validate.check_printable("the argument", each)
    keys = _keys()
    # The files come first, because a later value wins: see `parse_values`. So options win over all
    # files.
    values: list[tuple[str, yaml.Node]] = [("config", scalar_node(path)) for path in files]
    for name in ("config", *keys):
        value = given[name]
        if value in (None, ()):
            continue
        if value == ("none",) and name != "arguments":
            value = ()  # --env=none removes the values that come from a file
        values.append((name, _node(value)))
    settings = parse_values(keys, values, {}, {"run_options": _of_run_options})
    for name, setting in settings.items():
        if name in run_options.OPTIONS:
            run_options.check(name, setting.value, setting.path)
    return settings


def _of_run_options(words: Setting) -> list[tuple[str, yaml.Node]]:
    """Return the options that the words of ``run_options`` name, as keys and YAML nodes."""
    return [(name, _node(value)) for name, value in run_options.parse(words.value, words.path)]


def job_of(settings: Mapping[str, Setting]) -> SlurmJob:
    """Make the job from merged settings.

    sbatch's own options become words of ``sbatch_arg``. Options of srunddp run that are no fields
    of the job become words of ``run_options``.
    """
    values = {name: setting.value for name, setting in settings.items()}
    known = fields_of(SlurmJob)
    for_ranks: list[str] = []
    for name in run_options.OPTIONS:
        if name not in known:
            for_ranks += run_options.words(name, values.pop(name, None))
    values["run_options"] = tuple(for_ranks)
    words: list[str] = []
    for name, option in _PASSED_ON.items():
        words += slurm_options.words(option.name, values.pop(name, None))
    values["sbatch_arg"] = (*words, *values.get("sbatch_arg", ()))
    job: SlurmJob = build(SlurmJob, values)
    return job


def _node(value: str | bool | tuple[str, ...]) -> yaml.Node:
    """Return a value as a YAML node. A tuple becomes a list, whose texts are not split further."""
    if isinstance(value, tuple):
        return yaml.SequenceNode("tag:yaml.org,2002:seq", [scalar_node(each) for each in value])
    return scalar_node(text_of(value))


def _with_defaults(job: SlurmJob, environ: Mapping[str, str]) -> SlurmJob:
    """Return the job with values for what the user has left out: the active virtual environment,
    and the path of this srunddp if the job's environment seems to have no srunddp.
    """
    active = environ.get("VIRTUAL_ENV")
    if active and not (job.venv or job.conda or job.in_container):
        job = replace(job, venv=active)
    if job.srunddp or _has_srunddp(job, environ):
        return job
    # Use the absolute path, which does not depend on PATH in the job.
    return replace(job, srunddp=os.path.abspath(shutil.which(sys.argv[0]) or sys.argv[0]))


def _has_srunddp(job: SlurmJob, environ: Mapping[str, str]) -> bool:
    """Tell whether the job's environment has the command ``srunddp``. An environment that this node
    does not see is assumed to have it.
    """
    folder = job.venv
    if not folder and job.conda and "/" in job.conda:
        folder = job.conda
    # The folder of a conda environment given by name is known only if it is the active one.
    if job.conda and job.conda == environ.get("CONDA_DEFAULT_ENV"):
        folder = environ.get("CONDA_PREFIX")
    if folder:
        folder = os.path.join(job.folder, folder)
        if os.path.isdir(folder):
            return os.access(os.path.join(folder, "bin", "srunddp"), os.X_OK)
    # If this node does not see the environment, assume that it has srunddp on the job's nodes.
    return bool(folder or job.conda or job.in_container)


def _note(lines: Iterable[str]) -> None:
    for line in lines:
        write_stderr(f"srunddp: note: {line}\n")


def _save(text: str, path: str | None, folders: Sequence[str], *, force: bool) -> None:
    """Make the log folders, and write the script to an executable file.

    Args:
        text: The script.
        path: Where to write the script; None for nowhere.
        folders: The log folders.
        force: Whether to replace a file that exists.

    Raises:
        ConfigError: The file exists, or a file or folder cannot be written.
    """
    if path and os.path.lexists(path) and not force and not is_stream(path):
        raise ConfigError(
            f"{path} exists", expected="a new file", hint="choose another name, or add --force"
        )
    hint = "choose another --log-dir, --output or --write"
    with file_errors(expected="a folder that can be written to", hint=hint):
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
        if path:
            write_output(Path(path), text.encode())
            if not is_stream(path):
                os.chmod(path, 0o755)
