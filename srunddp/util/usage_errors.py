"""Turns click's usage errors into srunddp's, which are written as "found; expected -> hint". This
module is imported only after such an error.
"""

import re
from pathlib import Path

import click
import yaml
from click.core import ParameterSource

from srunddp.errors import ConfigError, SrunddpError, UsageError, did_you_mean, one_of

_FOREIGN = Path(__file__).with_name("foreign_options.yaml")


def usage_error(refused: click.UsageError, command: str) -> SrunddpError:
    """Turn an error of click into an error of srunddp: a ConfigError if the value of an environment
    variable is wrong, else a UsageError.

    Args:
        refused: What click raised.
        command: The name of the command, used if click's error has no context.
    """
    context = refused.ctx
    path = context.command_path if context else f"srunddp {command}"
    see = f"see {path} --help"
    if context:
        usage = " ".join([path, *context.command.collect_usage_pieces(context)])
    else:
        usage = path
    match refused:
        case click.NoSuchOption() if context:
            return _no_such_option(refused.option_name, context, see)
        case click.BadOptionUsage(option_name=name) if "does not take" in refused.message:
            return UsageError(f"{name} with a value", expected=name, hint="remove the value")
        case click.BadOptionUsage(option_name=name):
            return UsageError(f"{name} without a value", expected=f"{name} VALUE", hint=see)
        case click.MissingParameter(param=click.Option() as param):
            return UsageError(
                f"no {param.opts[-1]}", expected=f"{param.opts[-1]} {param.metavar}", hint=see
            )
        case click.MissingParameter(param=click.Parameter() as param):
            return UsageError(f"no {param.metavar or param.name}", expected=usage, hint=see)
        case click.BadParameter(param=click.Parameter() as param):
            return _bad_value(refused, param, see)
    message = refused.format_message().rstrip(".")
    if match := re.search(r"unexpected extra arguments? \((.+)\)", message):
        return UsageError(f"unexpected argument {match[1]}", expected=usage, hint=see)
    if context and isinstance(context.command, click.Group):
        return _no_such_command(message, context.command.list_commands(context), see)
    return UsageError(message, hint=see)


def _no_such_command(message: str, known: list[str], see: str) -> UsageError:
    # If no command was given, click 8.2 and newer use the whole help text as the message.
    match = re.match(r"No such command '(.+?)'", message)
    if match is None:
        return UsageError("no command", expected=one_of(known), hint=see)
    name = match[1]
    hint = did_you_mean(name, known) or see
    return UsageError(f"no command {name!r}", expected=one_of(known), hint=hint)


def foreign(option: str) -> tuple[str, str] | None:
    """Find the launcher that has an option, such as torchrun.

    Returns:
        The launcher's name, and a hint that says what to use in srunddp instead. None if no known
        launcher has the option.
    """
    for launcher, rows in yaml.safe_load(_FOREIGN.read_text(encoding="utf-8")).items():
        for names, answer in rows.items():
            if option in names.split():
                return launcher, answer
    return None


def _no_such_option(name: str, context: click.Context, see: str) -> UsageError:
    known = [
        each
        for option in context.command.get_params(context)
        for each in option.opts
        if each.startswith("--")
    ]
    command = see.removeprefix("see ").removesuffix(" --help")
    if context.info_name == "run":
        known.append("--version")
        if name == "-V":  # as in python
            return UsageError(
                f"no option {name}",
                expected=f"an option of {command}",
                hint="did you mean --version?",
            )
    found = f"no option {name}"
    hint = did_you_mean(name, known, 0.7) or see
    if any(each.name == "script" for each in context.command.params) and (other := foreign(name)):
        found = f"{name} is an option of {other[0]}"
        hint = other[1]
        if other[0] == "srun" and "--srun-arg" in known:
            hint = f"write --srun-arg={name}[=VALUE]"
    return UsageError(found, expected=f"an option of {command}", hint=hint)


def _bad_value(refused: click.BadParameter, param: click.Parameter, see: str) -> SrunddpError:
    """Return the error for a bad value. It names the environment variable if the value is from one,
    else the option or argument.
    """
    value, _, expected = refused.message.rstrip(".").partition("; expected ")
    if choices := param.type.choices if isinstance(param.type, click.Choice) else ():
        value = value.partition(" is not one of")[0]
        expected = one_of(choices)
    elif match := re.match(r"(File|Directory|Path) '(.*)' (.*)", value):
        value = f"{match[2]}, which {match[3]}"
        expected = f"a {match[1].lower()}"
        see = "correct the path"
    elif match := re.match(r"('?)(.*?)\1 is not (.+)", value):
        value = match[2]
        expected = "a whole number"
        if isinstance(param.type, click.IntRange):
            expected += f", {param.type.min} or more"
    value = value.strip("'\"")
    by_variable = (
        refused.ctx
        and refused.ctx.get_parameter_source(param.name or "") is ParameterSource.ENVIRONMENT
    )
    if by_variable and isinstance(param.envvar, str):
        return ConfigError(
            f"{param.envvar}={value}", expected=expected, hint="correct the variable or unset it"
        )
    if isinstance(param, click.Option):
        found = f"{param.opts[0]}={value}"
    else:
        found = repr(value)
    return UsageError(found, expected=expected, hint=did_you_mean(value, choices) or see)
