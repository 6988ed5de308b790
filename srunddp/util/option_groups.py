"""Commands whose ``--help`` shows options by group, and which tell of their options behind
SCRIPT.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import click


class GroupedCommand(click.Command):
    """A command that takes SCRIPT and its arguments; ``--help`` shows its options by group.

    ``groups`` has each heading and the names of its options' parameters: ``{"Network": "ifaces
    channel port"}``. Options that no group names come last, under "Other", or "Options" if there
    are no groups.
    """

    # Everything behind SCRIPT belongs to the script, even what is spelled like one of our options.
    allow_interspersed_args = False

    def __init__(self, *args: Any, groups: Mapping[str, str] | None = None, **given: Any) -> None:
        super().__init__(*args, **given)
        self.context_settings["help_option_names"] = ["-h", "--help"]
        self.groups = groups or {}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """See click; when a shell asks what may stand after SCRIPT, there are no options."""
        params = super().get_params(ctx)
        after = ctx.resilient_parsing and ctx.params.get("script")
        return [each for each in params if not (after and isinstance(each, click.Option))]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
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
    """Note each argument of SCRIPT that is spelled like an option of the command.

    One with a value that the command would not take is certainly the script's own.

    Args:
        context: Of the command.
        arguments: Those behind SCRIPT.
    """
    known = {
        name: each for each in context.command.params for name in each.opts if name.startswith("--")
    }
    # A user who wrote "--" has told the two apart already.
    ending = arguments.index("--") if "--" in arguments else len(arguments)
    notes = []
    for argument in arguments[:ending]:
        name, given, value = argument.partition("=")
        option = known.get(name.replace("_", "-"))
        if option and (not given or _takes(option, value, context)):
            notes.append(
                f"{argument} stands after SCRIPT and goes to it -> put it before SCRIPT if it is"
                " srunddp's"
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
