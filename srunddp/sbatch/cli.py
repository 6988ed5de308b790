"""The commands ``srunddp sbatch`` and ``srunddp mpirun``: job scripts, and what may print and exit."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import click
import yaml

from srunddp.config.parse import parse_options
from srunddp.config.schema import ConfigField, fields_of, scalar_node, text_of
from srunddp.errors import ConfigError
from srunddp.sbatch import local_defaults, partition, render_slurm, submit, validate
from srunddp.sbatch import render_mpirun as by_mpirun
from srunddp.sbatch.sections import Provenance
from srunddp.sbatch.spec import LaunchSpec, MpirunJob, SlurmJob
from srunddp.util.click_types import answering
from srunddp.util.console import write_stderr

T = TypeVar("T", bound=LaunchSpec)
_POSITIONAL = ("script", "arguments")
_SAID = "srunddp.said"  # the command line as it was


@dataclass(frozen=True)
class JobRequest(Generic[T]):
    """What a command line comes to.

    Attributes:
        job: as the user wishes it, before defaults.
        given: the options that are not the job's.
        written: as the script says it.
    """

    job: T
    given: Mapping[str, Any]
    written: Provenance


class _Flag(click.Option):
    """Of type bool: ``--requeue``, or ``--requeue=false``."""


class _Options(click.Command):
    """Takes a flag without a value for true; click would give it the word that follows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_SAID] = ["srunddp", str(ctx.info_name), *args]
        flags = {name for each in self.params if isinstance(each, _Flag) for name in each.opts}
        left, found = list(args), []
        while left and left[0].startswith("-") and left[0] != "--":
            option = left.pop(0)
            found.append(f"{option}=true" if option in flags else option)
            takes_value = "=" not in option and not self._is_alone(option)
            if takes_value and option not in flags and left:
                found.append(left.pop(0))
        return super().parse_args(ctx, [*found, *left])

    def _is_alone(self, option: str) -> bool:
        named = (each for each in self.params if isinstance(each, click.Option))
        return option in ("-h", "--help") or any(each.is_flag and option in each.opts for each in named)


def _from(kind: type[LaunchSpec]) -> Callable[[Any], Any]:
    """The dataclass's keys as options."""

    def decorate(function: Any) -> Any:
        for name, key in reversed(fields_of(kind).items()):
            if name not in _POSITIONAL:
                function = _option(name, key)(function)
        return function

    return decorate


def _option(name: str, key: ConfigField) -> Callable[[Any], Any]:
    default = "" if key.default in (MISSING, None, False, (), "") else f"  [default: {text_of(key.default)}]"
    return click.option(
        validate.option(name),
        name,
        cls=_Flag if key.kind is bool else click.Option,
        metavar=_metavar(key.kind),
        multiple=_is_list(key.kind),
        help=key.sentence[:1].upper() + key.sentence[1:].removesuffix(".") + "." + default,
    )


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _metavar(kind: Any) -> str:
    if kind is bool:
        return "[BOOL]"
    if _is_list(kind):
        return "TEXT..."
    if choices := [text for each in (kind, *get_args(kind)) if get_origin(each) is Literal for text in get_args(each)]:
        return "|".join(choices)
    return "N" if int in (kind, *get_args(kind)) else "TEXT"


def wish(kind: type[T], given: Mapping[str, Any], command: Sequence[str]) -> JobRequest[T]:
    """What the options come to; those of ``--config`` and of the command line together.

    Raises:
        ConfigError: a value is of another type; a key is unknown; a letter cannot be printed.
    """
    for each in command:
        if not each.isprintable():
            hint = "leave line ends and the like away"
            raise ConfigError(f"the argument {each!r}", expected="letters that can be printed", hint=hint)
    keys = fields_of(kind)
    pairs = [(name, _node(given[name])) for name in ("config", *keys) if given[name] not in (None, ())]
    others = {name: value for name, value in given.items() if name not in keys}
    return JobRequest(parse_options(kind, pairs), others, Provenance(tuple(command)))


def _node(value: str | tuple[str, ...]) -> yaml.Node:
    """As YAML has it; each of several values is a text as it stands."""
    if isinstance(value, str):
        return scalar_node(value)
    return yaml.SequenceNode("tag:yaml.org,2002:seq", [scalar_node(each) for each in value])


def _note(lines: Iterable[str]) -> None:
    for line in lines:
        write_stderr(f"srunddp: note: {line}\n")


_common = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
_config = click.option("--config", metavar="FILE", help="YAML with these keys; the command line wins over it.")
_output = click.option("--output", metavar="FILE", help="Write the script there, and make the log folder.")
_force = click.option("--force", is_flag=True, help="With --output: replace a file that is there.")
_script = click.argument("script", required=False)
_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")


@click.command(cls=_Options, context_settings=_common)
@_from(SlurmJob)
@_config
@_output
@_force
@click.option("--submit", is_flag=True, help="Make the log folder, submit the job, and print its number.")
@click.option("--salloc", is_flag=True, help="For an interactive allocation; with --submit start it now.")
@_script
@_arguments
@click.pass_context
def sbatch(context: click.Context, /, **given: Any) -> None:
    """Write the job script that trains SCRIPT on Slurm.

    \b
    srunddp sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=8 --time=4:00:00 train.py --epochs=20
    srunddp sbatch --config=job.yaml --submit
    """
    with answering():
        _sbatch(wish(SlurmJob, given, context.meta[_SAID]))


@click.command(cls=_Options, context_settings=_common)
@_from(MpirunJob)
@_config
@_output
@_force
@_script
@_arguments
@click.pass_context
def mpirun(context: click.Context, /, **given: Any) -> None:
    """Write the script that trains SCRIPT by mpirun, where there is no Slurm.

    \b
    srunddp mpirun --hosts=a:4,b:4 train.py --epochs=20
    """
    with answering():
        _mpirun(wish(MpirunJob, given, context.meta[_SAID]))


def _sbatch(wished: JobRequest[SlurmJob]) -> None:
    interactive, submits = wished.given["salloc"], wished.given["submit"]
    job, written = _settled(wished)
    validate.check(job, interactive=interactive)
    known = partition.partitions(os.environ)
    asked = partition.wished(job, os.environ, interactive=interactive)
    candidates = partition.chosen(asked, known) if known else []
    partition.check_limits(asked, candidates)
    _notes(job, written)
    _note(
        [
            *partition.defaults(asked, candidates),
            *([] if interactive else local_defaults.overriding_variables(os.environ)),
        ]
    )
    text = render_slurm.render(job, written, interactive=interactive)
    _hand_over(text, wished, prints=not submits)
    if submits and interactive:
        submit.allocate(render_slurm.allocation(job), text, os.environ)
    elif submits:
        local_defaults.make_log_folder(job.log_dir)
        click.echo(submit.submit(text, os.environ, lambda line: _note([line])))


def _mpirun(wished: JobRequest[MpirunJob]) -> None:
    job, written = _settled(wished)
    validate.check(job)
    _notes(job, written)
    _hand_over(by_mpirun.render(job, written), wished, prints=True)


def _settled(wished: JobRequest[T]) -> tuple[T, Provenance]:
    """With what is not said taken from this shell."""
    running = shutil.which(sys.argv[0]) or sys.argv[0]
    job = local_defaults.with_defaults(wished.job, os.environ, running)
    return job, Provenance(wished.written.command, found_venv=job.venv != wished.job.venv)


def _notes(job: LaunchSpec, written: Provenance) -> None:
    if written.found_venv:
        _note([f"no environment is named: {job.venv}, which is active here"])
    _note([*local_defaults.check_files(job), *validate.notes(job)])


def _hand_over(text: str, wished: JobRequest[T], *, prints: bool) -> None:
    """To a file, or to standard output."""
    if wished.given["output"]:
        local_defaults.write(text, wished.given["output"], force=wished.given["force"])
        local_defaults.make_log_folder(wished.job.log_dir)
    elif prints:
        click.echo(text, nl=False)
