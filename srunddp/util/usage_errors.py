"""What click refuses, in the form of all errors: found; expected -> hint. Imported when there is
one.
"""

import re
from pathlib import Path

import click
import yaml
from click.core import ParameterSource

from srunddp.errors import ConfigError, SrunddpError, UsageError, did_you_mean, one_of

_FOREIGN = Path(__file__).with_name("foreign_options.yaml")


def usage_error(refused: click.UsageError, command: str) -> SrunddpError:
    """The error of srunddp for one of click's; of another kind where an environment variable is
    wrong.

    ``command`` is the command's name, for errors of click that do not say of which command they
    are.
    """
    context = refused.ctx
    path = context.command_path if context else f"srunddp {command}"
    see = f"see {path} --help"
    usage = " ".join([path, *context.command.collect_usage_pieces(context)]) if context else path
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
        match, known = (
            re.match(r"No such command '(.+?)'", message),
            context.command.list_commands(context),
        )
        # click 8.2 and newer have the whole help as the message if there is none.
        name = match[1] if match else ""
        found = " ".join(["no command", *([repr(name)] if name else [])])
        return UsageError(found, expected=one_of(known), hint=did_you_mean(name, known) or see)
    return UsageError(message, hint=see)


def foreign(option: str) -> tuple[str, str] | None:
    """The launcher that an option belongs to, and what to write here; None if no launcher's."""
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
    known += ["--version"] if context.info_name == "run" else []
    found, hint = f"no option {name}", did_you_mean(name, known, 0.7) or see
    if any(each.name == "script" for each in context.command.params) and (other := foreign(name)):
        found, hint = f"{name} is an option of {other[0]}", other[1]
        hint = (
            f"write --srun-arg={name}[=VALUE]"
            if other[0] == "srun" and "--srun-arg" in known
            else hint
        )
    return UsageError(found, expected=f"an option of {command}", hint=hint)


def _bad_value(refused: click.BadParameter, param: click.Parameter, see: str) -> SrunddpError:
    """Found: the option as it was written; or the environment variable that stands for it."""
    value, _, expected = refused.message.rstrip(".").partition("; expected ")
    if choices := param.type.choices if isinstance(param.type, click.Choice) else ():
        value, expected = value.partition(" is not one of")[0], one_of(choices)
    elif match := re.match(r"(File|Directory|Path) '(.*)' (.*)", value):
        value, expected, see = (
            f"{match[2]}, which {match[3]}",
            f"a {match[1].lower()}",
            "correct the path",
        )
    elif match := re.match(r"('?)(.*?)\1 is not (.+)", value):
        value, expected = match[2], "a whole number"
        expected += f", {param.type.min} or more" if isinstance(param.type, click.IntRange) else ""
    value = value.strip("'\"")
    by_variable = (
        refused.ctx
        and refused.ctx.get_parameter_source(param.name or "") is ParameterSource.ENVIRONMENT
    )
    if by_variable and isinstance(param.envvar, str):
        return ConfigError(
            f"{param.envvar}={value}", expected=expected, hint="correct the variable or unset it"
        )
    found = f"{param.opts[0]}={value}" if isinstance(param, click.Option) else repr(value)
    return UsageError(found, expected=expected, hint=did_you_mean(value, choices) or see)
