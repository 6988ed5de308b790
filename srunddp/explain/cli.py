"""Provides the command ``srunddp explain``, and reads the files of its option ``--env``."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from srunddp.bootstrap.environment.detect import CHANNELS
from srunddp.bootstrap.network import ifaces_entry
from srunddp.bootstrap.process_group.device import BACKENDS
from srunddp.bootstrap.rendezvous.rank_setup import DEFAULT_TIMEOUT
from srunddp.errors import ConfigError, file_errors
from srunddp.stage.paths import enter
from srunddp.supervisor.limits import STALL_TIMEOUT
from srunddp.util.click_types import (
    FILE,
    ifaces_option,
    json_option,
    json_text,
    limit,
    module_option,
)
from srunddp.util.hostlist import group_by_key
from srunddp.util.option_groups import GroupedCommand

# The beginning of a line of `env` that has a new variable, such as `HOME=/root`, or bash's
# `BASH_FUNC_module%%=() {` for an exported function. Any other line continues the value before it.
_BEGINS = re.compile(r"[A-Za-z_][\w.%()-]*=")
# A line of `srun --label env`, such as ` 3: HOME=/root`; srun pads the ranks to one width.
_LABEL = re.compile(r"( *\d+): (.*)")


@click.command(cls=GroupedCommand)
@module_option
@click.option(
    "--env", "env_file", type=FILE, help="Output of `srun --label env` or `env -0`, from elsewhere."
)
@ifaces_option
@click.option("--channel", type=click.Choice(CHANNELS), help="As in srunddp run.")
@click.option("--port", metavar="N-M", help="As in srunddp run.")
@click.option("--backend", type=click.Choice(BACKENDS), help="As in srunddp run.")
@limit("--timeout", DEFAULT_TIMEOUT, "As in srunddp run.", "SRUNDDP_TIMEOUT")
@limit(
    "--stall-timeout", STALL_TIMEOUT, "As in srunddp run.", "SRUNDDP_STALL_TIMEOUT", positive=False
)
@click.option(
    "--bind", type=click.Choice(("none", "auto")), default="none", help="As in srunddp run."
)
@click.option("--offline", is_flag=True, help="As in srunddp run.")
@click.option("--staged", is_flag=True, help="As in srunddp run.")
@json_option
@click.argument("script", type=FILE, required=False)
@click.argument("arguments", nargs=-1, type=FILE, metavar="[ARGUMENTS]...")
def explain(env_file: str | None, **given: Any) -> None:
    """Print every value, what decided it, and what was not chosen. SCRIPT is not read.

    \b
    srun srunddp explain                       # on each rank
    srun --label env > FILE; srunddp explain --env FILE     # later, on a login node

    Exit code 78 if the run would be refused.
    """
    explained(given, env_file)


def explained(given: Mapping[str, Any], env_file: str | None = None) -> None:
    """Print the explanation of one process or of several, and exit.

    Args:
        given: The values of the options of :func:`explain`, by their names.
        env_file: A file with the variables of processes on other machines; None to explain this
            process.

    Raises:
        SrunddpError: An option is wrong, or the file cannot be read.
    """
    from srunddp.bootstrap.network.interface import list_interfaces
    from srunddp.explain.explain import ExplainOptions, explain

    # The staged copies are on this node, so they say nothing about a rank of another node.
    if given["staged"] and env_file is None:
        staged = enter()
    else:
        staged = None
    asked = ExplainOptions(
        backend=given["backend"],
        bind=given["bind"],
        ifaces=staged.here(given["ifaces"]) if staged and given["ifaces"] else given["ifaces"],
        channel=given["channel"],
        ports=ifaces_entry.port_range(given["port"], where="--port") if given["port"] else None,
        limits=_limits(given),
        offline=given["offline"],
        staged=staged,
    )
    if env_file is None:
        found = [explain(os.environ, asked, list_interfaces())]
    else:
        found = [explain(variables, asked, None) for variables in read_environments(env_file)]
    records = json_text(*(one.record for one in found), indent=None)
    # Write all lines at once, so that the tables of several ranks do not mix.
    click.echo(
        f"{records}\n" if given.get("as_json") else "".join(one.text for one in found), nl=False
    )
    sys.exit(max(one.exit_code for one in found))


def _limits(given: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """Return by the names ``timeout`` and ``stall_timeout`` the limit in seconds, and the option or
    variable that set it; ``the default`` if neither did.
    """
    context = click.get_current_context()
    limits = {}
    for name in ("timeout", "stall_timeout"):
        setters = {
            "COMMANDLINE": f"--{name.replace('_', '-')}",
            "ENVIRONMENT": f"SRUNDDP_{name.upper()}",
        }
        source = context.get_parameter_source(name)
        limits[name] = (given[name], setters.get(source.name if source else "", "the default"))
    return limits


def read_environments(path: str) -> list[dict[str, str]]:
    """Read a file with the output of ``env``, and return the environment of each process in it.

    Raises:
        ConfigError: The file cannot be read, or has no line with a variable.
    """
    expected = "what env or env -0 printed"
    hint = "srun --label env > FILE"
    with file_errors(f"--env: {path}", expected=expected, hint=hint):
        content = Path(path).read_bytes()
    # Decode bytes that are not UTF-8 as os.environ does.
    if environments := parse_environments(content.decode(errors="surrogateescape")):
        return environments
    raise ConfigError(f"--env: {path}: no line with a variable", expected=expected, hint=hint)


def parse_environments(text: str) -> list[dict[str, str]]:
    """Return the environment of each process in the output of ``env``.

    If a variable occurs again, it begins the environment of the next process. In the output of
    ``srun --label env`` each line begins with a rank: the lines of different ranks may then be
    mixed, and the environments are returned in the order of the ranks.
    """
    if "\0" in text:
        return _split(text.split("\0"))
    # Not splitlines(), which also splits at other separators that a value may contain.
    lines = text.removesuffix("\n").split("\n")
    labelled = [_LABEL.fullmatch(line) for line in lines]
    # Numbers before lines are labels only if every line has one, because srun --label labels all
    # lines. Without it, a line within a variable's value may look like a labelled one.
    if all(labelled):
        by_label = group_by_key((int(found[1]), found[2]) for found in labelled if found)
        return [
            environment
            for _, own in sorted(by_label.items())
            for environment in _split(_joined(own))
        ]
    return _split(_joined(lines))


def _joined(lines: Iterable[str]) -> list[str]:
    """Return a text for each variable, in which the lines of a value with several lines are joined:
    a line that does not look like the beginning of a variable belongs to the variable before it.
    """
    items: list[str] = []
    for line in lines:
        if items and not _BEGINS.match(line):
            items[-1] += f"\n{line}"
        else:
            items.append(line)
    return items


def _split(items: Iterable[str]) -> list[dict[str, str]]:
    environments: list[dict[str, str]] = []
    # Skip an item without `=`: it is not a variable, but something that the task printed before.
    for name, equals, value in (item.partition("=") for item in items):
        if equals and (not environments or name in environments[-1]):
            environments.append({})
        if equals:
            environments[-1][name] = value
    return environments
