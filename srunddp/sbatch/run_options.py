"""Reads the options of ``srunddp run`` for a job. ``srunddp sbatch`` takes them by their own names,
and as words of ``--run-options``. Either way, they are checked as ``srunddp run`` would check them.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import click

from srunddp.config.schema import ConfigField
from srunddp.errors import ConfigError, SrunddpError, UsageError
from srunddp.run.options import OPTIONS as ALL
from srunddp.util.click_types import MONITOR_SECONDS
from srunddp.util.usage_errors import usage_error

# The options of srunddp run that srunddp sbatch refuses, each with a hint what to use instead.
REFUSED = {
    "staged": "write --stage, which copies the environment and starts the ranks in the copies",
    "explain": "start srunddp explain by srun in a job or an allocation",
}
# All other options of srunddp run, by key, such as stall_timeout.
OPTIONS = {name: option for name, option in ALL.items() if name not in REFUSED}
# For these options ``none`` is a value; for all others it means that the option is not given.
TAKE_NONE = ("bind", "show_ranks")


def key_of(option: click.Option) -> ConfigField:
    """Return the key that an option has in a YAML file. Unless the option is a flag, the key's
    value is a string: :func:`check` validates it, but does not convert it.
    """
    text = option.help or ""
    if option.is_flag:
        return ConfigField(bool, False, text)
    if option.name in TAKE_NONE:
        return ConfigField(Literal["none"] | str | None, None, text)
    return ConfigField(str | None, None, text)


def check(key: str, value: object, path: str) -> None:
    """Refuse a value that ``srunddp run`` would refuse.

    Args:
        key: The key of the option.
        value: The value. None and bools are always accepted.
        path: The file that has the value; empty for the command line.

    Raises:
        ConfigError: The option does not accept the value.
    """
    if value is None or isinstance(value, bool):
        return
    try:
        OPTIONS[key].type.convert(str(value), OPTIONS[key], None)
    except click.BadParameter as refused:
        error = usage_error(refused, "sbatch")
        if not path:
            raise error from None
        raise _in_file(error, path) from None


def words(key: str, value: str | bool | None) -> list[str]:
    """Return an option as one word of the command line, in a list. The list is empty if the option
    is not given.
    """
    name = OPTIONS[key].opts[-1]
    if value is True:
        return [name]
    return [f"{name}={value}"] if value else []


def parse(given: Sequence[str], path: str) -> Iterator[tuple[str, str | bool]]:
    """Yield the keys and values of the words of ``--run-options``.

    Args:
        given: The words.
        path: The file that has the words; empty for the command line.

    Raises:
        UsageError: ``srunddp run`` does not have such an option, or the option has no value.
        ConfigError: Such an option is in a file, or a word is no option.
    """
    context = _run_context()
    for word in given:
        if not word.startswith("-"):
            raise _no_option(word, path, f"write --run-options=--{word}")
        try:
            values, _, _ = context.command.make_parser(context).parse_args([_with_value(word)])
        except click.UsageError as refused:
            error = usage_error(refused, "run")
            if path:
                raise _in_file(error, path) from None
            raise UsageError(
                error.found, expected=error.expected, hint=error.hint, where="--run-options"
            ) from None
        named = {key: value for key, value in values.items() if key in ALL}
        if not named:  # the word is - or --
            raise _no_option(word, path, "remove it")
        for key, value in named.items():
            if key in REFUSED:
                raise ConfigError(
                    f"--run-options {word!r}",
                    expected="an option that a job script can have",
                    hint=REFUSED[key],
                    where=path,
                )
            yield key, value


def _no_option(word: str, path: str, hint: str) -> ConfigError:
    return ConfigError(
        f"--run-options {word!r}", expected="an option of srunddp run", hint=hint, where=path
    )


def _with_value(word: str) -> str:
    return f"{word}={MONITOR_SECONDS}" if word == "--monitor" else word


def _run_context() -> click.Context:
    """Return the context in which click parses the options of ``srunddp run``."""
    group = click.Context(
        click.Group("srunddp"),
        info_name="srunddp",
        token_normalize_func=lambda name: name.replace("_", "-"),
    )
    script = click.Argument(["script"])
    # Leave out --help, because in a job nobody would read its output.
    command = click.Command("run", params=[*ALL.values(), script], add_help_option=False)
    return click.Context(command, info_name="run", parent=group)


def _in_file(error: SrunddpError, path: str) -> ConfigError:
    return ConfigError(error.found, expected=error.expected, hint=error.hint, where=path)
