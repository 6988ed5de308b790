"""Commands whose ``--help`` shows options in groups, and notes on options that follow SCRIPT."""

from collections.abc import Mapping, Sequence
from typing import Any

import click


class GroupedCommand(click.Command):
    """A command that takes SCRIPT and its arguments; ``--help`` shows its options in groups.

    ``groups`` maps the heading of each group to the parameter names of its options, separated by
    spaces: ``{"Network": "ifaces channel port"}``. Options in no group come last, under "Other", or
    under "Options" if there are no groups.
    """

    # Everything after SCRIPT belongs to the script, even if it looks like an option of srunddp.
    allow_interspersed_args = False

    def __init__(self, *args: Any, groups: Mapping[str, str] | None = None, **given: Any) -> None:
        super().__init__(*args, **given)
        self.context_settings["help_option_names"] = ["-h", "--help"]
        self.groups = groups or {}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return click's parameters, but no options if a shell asks for completions of a word after
        SCRIPT: there an option would be the script's.
        """
        params = super().get_params(ctx)
        after = ctx.resilient_parsing and ctx.params.get("script")
        return [each for each in params if not (after and isinstance(each, click.Option))]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options for ``--help``, group by group."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        rows = {each.name: row for each in options if (row := each.get_help_record(ctx))}
        sections = {
            title: [rows.pop(name) for name in names.split()]
            for title, names in self.groups.items()
        }
        for title, section in {
            **sections,
            "Other" if self.groups else "Options": [*rows.values()],
        }.items():
            with formatter.section(title):
                formatter.write_dl(section)


def after_script(context: click.Context, arguments: Sequence[str]) -> list[str]:
    """Return a note for each argument of SCRIPT that looks like an option of the command.

    There is no note for an argument with a value that the command's option would reject, because
    such an argument is certainly meant for the script.

    Args:
        context: The command's context.
        arguments: The words after SCRIPT.
    """
    known = {
        name: each for each in context.command.params for name in each.opts if name.startswith("--")
    }
    # Leave out the arguments after a "--", by which the user marks them as the script's.
    ending = arguments.index("--") if "--" in arguments else len(arguments)
    notes = []
    for argument in arguments[:ending]:
        name, given, value = argument.partition("=")
        option = known.get(name.replace("_", "-"))
        if option and (not given or _takes(option, value, context)):
            notes.append(
                f"{argument} comes after SCRIPT, so the script gets it -> put it before SCRIPT"
                " if it is meant for srunddp"
            )
    return notes


def _takes(option: click.Parameter, value: str, context: click.Context) -> bool:
    if getattr(option, "is_flag", False):
        return False
    try:
        option.type.convert(value, option, context)
    except click.UsageError:
        return False
    return True
