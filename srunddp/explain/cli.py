"""The commands for before a job: they may print and exit, as ``cli`` does."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from srunddp.bootstrap.environment.detect import CHANNELS
from srunddp.bootstrap.network import ifaces_conf
from srunddp.bootstrap.process_group.device import BACKENDS
from srunddp.bootstrap.rendezvous.meet import DEFAULT_TIMEOUT
from srunddp.stage.paths import enter
from srunddp.supervisor.clock import STALL_TIMEOUT
from srunddp.util.click_types import FILE, ifaces_option, json_option, json_text, limit, module_option
from srunddp.util.option_groups import GroupedCommand


@click.command(cls=GroupedCommand)
@module_option
@click.option("--env", "env_file", type=FILE, help="What `srun --label env` or `env -0` printed elsewhere.")
@ifaces_option
@click.option("--channel", type=click.Choice(CHANNELS), help="As for run.")
@click.option("--port", metavar="N-M", help="As for run.")
@click.option("--backend", type=click.Choice(BACKENDS), help="As for run.")
@limit("--timeout", DEFAULT_TIMEOUT, "As for run.", "SRUNDDP_TIMEOUT")
@limit("--stall-timeout", STALL_TIMEOUT, "As for run.", "SRUNDDP_STALL_TIMEOUT", positive=False)
@click.option("--bind", type=click.Choice(("none", "auto")), default="none", help="As for run.")
@click.option("--offline", is_flag=True, help="As for run.")
@click.option("--staged", is_flag=True, help="As for run.")
@json_option
@click.argument("script", type=FILE, required=False)
@click.argument("arguments", nargs=-1, type=FILE, metavar="[ARGUMENTS]...")
def explain(env_file: str | None, **given: Any) -> None:
    """Print every value, what decided it, and what was not chosen. SCRIPT is not looked at.

    \b
    srun srunddp explain                       # on each rank
    srun --label env > FILE; srunddp explain --env FILE     # later, on a login node

    The exit code is 78 where the run would be refused.
    """
    explained(given, env_file)


def explained(given: Mapping[str, Any], env_file: str | None = None) -> None:
    """Print the explanation of this process, or of those in ``env_file``, and exit.

    Raises:
        SrunddpError: an option is wrong.
    """
    from srunddp.bootstrap.network.interface import list_interfaces
    from srunddp.explain import environ_dump
    from srunddp.explain.explain import ExplainOptions, explain

    staged = enter() if given["staged"] and env_file is None else None
    asked = ExplainOptions(
        backend=given["backend"],
        bind=given["bind"],
        ifaces=staged.here(given["ifaces"]) if staged and given["ifaces"] else given["ifaces"],
        channel=given["channel"],
        ports=ifaces_conf.port_range(given["port"], where="--port") if given["port"] else None,
        limits=_limits(given),
        offline=given["offline"],
        staged=staged,
    )
    if env_file is None:
        found = [explain(os.environ, asked, list_interfaces())]
    else:
        found = [explain(variables, asked, None) for variables in environ_dump.read(env_file)]
    records = json_text(*(one.record for one in found), indent=None)
    # One write, so that the ranks' tables do not mix.
    click.echo(f"{records}\n" if given.get("as_json") else "".join(one.text for one in found), nl=False)
    sys.exit(max(one.exit_code for one in found))


def _limits(given: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """Each time limit, and the option or variable that set it."""
    context, limits = click.get_current_context(), {}
    for name in ("timeout", "stall_timeout"):
        option, variable = f"--{name.replace('_', '-')}", f"SRUNDDP_{name.upper()}"
        setters = {ParameterSource.COMMANDLINE: option, ParameterSource.ENVIRONMENT: variable}
        source = context.get_parameter_source(name) or ParameterSource.DEFAULT
        limits[name] = (given[name], setters.get(source, "the default"))
    return limits
