"""Reads settings from YAML files and the command line into a dataclass, and writes them as YAML."""

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import yaml

from srunddp.config import schema
from srunddp.config.schema import ConfigField, config_error, expected, fields_of, is_null
from srunddp.errors import ConfigError, Scope, did_you_mean, file_errors
from srunddp.util.atomic_file import replace_file
from srunddp.util.excepthook import install_excepthook
from srunddp.util.yaml_source import compose, shown, yaml_position

T = TypeVar("T")
Keys = Mapping[str, ConfigField]
Removed = Mapping[str, str]  # the hint for each removed key, by the key's name


@dataclass(frozen=True)
class _Given:
    """A value that was given for a key, not yet converted.

    Attributes:
        name: The key as it was written, with dashes before it if it is from the command line.
        node: The value as a YAML node, which also has its position in the file.
        path: The path of the file; empty for the command line.
    """

    name: str
    node: yaml.Node
    path: str = ""

    def error(
        self, found: str, expected: str, hint: str, node: yaml.Node | None = None
    ) -> ConfigError:
        """Return an error about this key.

        Args:
            found: What is wrong; it follows the key's name.
            expected: What would be right.
            hint: What to do.
            node: The node whose position in the file the error names; None for the node of the
                value.
        """
        if self.path:
            where = yaml_position(self.path, node or self.node)
        else:
            where = ""
        return ConfigError(
            f"{self.name} {found}", expected=expected, hint=hint, where=where, scope=Scope.JOB
        )


def read_config(kind: type[T], arguments: Sequence[str] | None = None) -> T:
    """Fill a dataclass, which may be nested or frozen, from ``--config=FILE.yaml`` and
    ``--key=value``.

    ``--key value`` means the same. A later file wins over an earlier one, and the command line wins
    over files. Keys of nested dataclasses are written with dots, or in files as nested mappings; in
    a key ``-`` and ``_`` are equivalent. A list is ``a,b`` or ``[a, b]``; None is ``null``,
    ``none``, ``~`` or nothing. ``--help`` prints all keys with their defaults, on rank 0, and ends
    the program.

    Args:
        kind: ``Config``, a dataclass derived from it, or any other dataclass. The type of a field
            is bool, int, float, str, Path, Literal, a tuple or list of these, one of these or None,
            or a dataclass.
        arguments: The arguments to read; None for those of the program.

    Raises:
        ConfigError: A key is unknown, is given twice in a file, or is missing; a value has the
            wrong type; a file cannot be read or is not YAML.
        SystemExit: With exit code 0, after ``--help``.
    """
    # srunddp.init() installs this hook too, but a script reads its settings earlier, and an error
    # in them must already be one line with its own exit code.
    install_excepthook()
    options = list(_options(sys.argv[1:] if arguments is None else arguments))
    if any(name == "help" for name, _ in options):
        # Every rank gets the same arguments, so only rank 0 prints the help. RANK was set before
        # the script began; without RANK this is the only process.
        if os.environ.get("RANK", "0") == "0":
            print(schema.usage(fields_of(kind), Path(sys.argv[0]).name))
        raise SystemExit(0)
    keys = fields_of(kind)
    nodes = [(name, schema.scalar_node(text)) for name, text in options]
    given = parse_values(keys, nodes, schema.removed_settings(kind))
    for name, key in keys.items():
        if key.default is MISSING and name not in given:
            raise config_error(f"{name} is not given", expected(key.kind), f"add --{name}=VALUE")
    filled: T = schema.build(kind, {name: setting.value for name, setting in given.items()})
    return filled


class Setting(NamedTuple):
    """The value that a file or the command line gives for a key.

    Attributes:
        value: The value, already converted to the key's type.
        path: The path of the file that gives the value; empty for the command line.
    """

    value: Any
    path: str


Split = Callable[[Setting], Iterable[tuple[str, yaml.Node]]]


def parse_values(
    keys: Keys,
    options: Sequence[tuple[str, yaml.Node]],
    removed: Removed,
    splits: Mapping[str, Split] = MappingProxyType({}),
) -> dict[str, Setting]:
    """Return the values that options and files give, by key. An option ``config`` names a file.

    A later file wins over an earlier one, and options win over files.

    Args:
        keys: All keys.
        options: The options' names, without dashes before them, and their values.
        removed: The hint for each removed key, by the key's name.
        splits: A function for each key whose value stands for values of other keys, by the name of
            this key. The function returns the names and values of the other keys. A value that the
            same file, or the command line, gives under the name of such an other key wins over the
            function's value.

    Raises:
        ConfigError: A key is unknown, or given twice in a file; a value has the wrong type; a file
            cannot be read or is not YAML.
    """
    # Read the files first, because an option wins even if --config comes after it.
    layers = [
        _from_file(str(node.value), keys, removed) for name, node in options if name == "config"
    ]
    by_option: dict[str, _Given] = {}
    for name, node in options:
        if name != "config":
            one = _Given(f"--{name}", node)
            by_option[_known(name, keys, removed, one)] = one
    layers.append(by_option)
    for name, split in splits.items():
        _split(name, split, keys, layers)
    given: dict[str, _Given] = {}
    for layer in layers:
        given |= layer
    # Convert only the values that win, so that a value of a wrong type in a file is no error if the
    # command line replaces it.
    return {name: Setting(_value(one, keys[name]), one.path) for name, one in given.items()}


def _split(name: str, split: Split, keys: Keys, layers: Sequence[dict[str, _Given]]) -> None:
    """Replace a key by the keys for which its value stands.

    The value is taken from the last of the layers that have the key; in the other layers the key is
    removed.

    Args:
        name: The key to replace.
        split: Returns the names and values of the keys for which its value stands.
        keys: All keys.
        layers: The values of each file and then of the command line, in the order in which a later
            one wins. They are changed in place.
    """
    found = [(layer, layer.pop(name)) for layer in layers if name in layer]
    if not found:
        return
    layer, one = found[-1]
    others = split(Setting(_value(one, keys[name]), one.path))
    stood_for = {other: _Given(f"--{other}", node, one.path) for other, node in others}
    for other in stood_for.keys() - layer.keys():
        layer[other] = stood_for[other]


def save_config(path: str | os.PathLike[str], config: Any) -> None:
    """Write a dataclass as YAML, so that :func:`read_config` reads an equal one from the file.

    Args:
        path: The path of the file. A file that exists is replaced by a new one.
        config: An instance of a dataclass.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full. A file that exists
            stays as it is.
    """
    replace_file(
        Path(path),
        yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode(),
    )


class _Dumper(yaml.SafeDumper):
    """Writes YAML, with quotes around each text that would otherwise be read as another type.

    PyYAML alone would write the texts 1e-3 and none without quotes, because YAML 1.1 reads them as
    texts, but :func:`read_config` reads them as a number and as null.
    """

    # Without this method, PyYAML would write &id001 and *id001 if two settings have the same tuple.
    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that PyYAML writes a value that occurs again in full and not as an
        alias.
        """
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        """Return the YAML node for a text, with quotes if it needs them.

        Args:
            data: The text.
        """
        return self.represent_scalar(
            "tag:yaml.org,2002:str", data, style="'" if schema.is_ambiguous(data) else None
        )


_Dumper.add_representer(str, _Dumper.text)


def _plain(value: Any) -> Any:
    """Convert a value to what YAML can hold: dataclasses to mappings, tuples to lists, paths to
    texts.
    """
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options' names, without dashes before them, and their texts. ``-h`` and ``--help``
    are ``help`` with an empty text.

    Raises:
        ConfigError: An argument is no option, or an option has no value.
    """
    left = list(arguments)
    while left:
        option = left.pop(0)
        if option in ("-h", "--help"):
            yield "help", ""
            continue
        if not option.startswith("--") or option == "--":
            raise config_error(
                f"the argument {option!r}",
                "--key=value",
                "write --key=value; --help lists the keys",
            )
        name, equals, text = option[2:].partition("=")
        if not equals:
            # Take a next word that begins with a single dash as the value, because it may be a
            # negative number.
            if not left or left[0].startswith("--"):
                raise config_error(f"{option} without a value", "one", f"write {option}=VALUE")
            text = left.pop(0)
        yield name, text


def _from_file(path: str, keys: Keys, removed: Removed) -> dict[str, _Given]:
    hint = "correct --config"
    if "RANK" in os.environ:
        hint += "; every node must see the file"
    # Scope.NODE, because the file may be missing on one node only: one rank of each node that lacks
    # the file prints the error.
    with file_errors(path, expected="a file of settings", hint=hint, scope=Scope.NODE):
        text = Path(path).read_bytes()
    root = compose(
        text, path, expected="lines such as `epochs: 3`", hint="correct it", scope=Scope.JOB
    )
    if root is None or is_null(root):
        return {}
    return dict(_pairs(_Given("the file", root, path), "", keys, removed, set()))


def _pairs(
    group: _Given, prefix: str, keys: Keys, removed: Removed, seen: set[str]
) -> Iterator[tuple[str, _Given]]:
    """Yield the values in a mapping and in the mappings nested in it, by dotted name.

    Args:
        group: The mapping.
        prefix: The prefix of the names in the mapping, with its dot; empty at the top.
        keys: All keys.
        removed: The hint for each removed key, by the key's name.
        seen: The names found in the file so far. This function adds the names that it finds.

    Raises:
        ConfigError: A key is unknown or occurs twice, or a group of keys is not a mapping.
    """
    if not isinstance(group.node, yaml.MappingNode):
        raise group.error(
            f"is {shown(group.node)}", "keys with values", f"write {_example(prefix, keys)}: VALUE"
        )
    for key, node in group.node.value:
        written = _Given(
            prefix + (key.value if isinstance(key, yaml.ScalarNode) else shown(key)),
            node,
            group.path,
        )
        name = _known(
            written.name, keys, removed, dataclasses.replace(written, node=key), groups=True
        )
        # Compare the names with "_" for "-", because batch-size and batch_size are the same key.
        # Without this check the last of the two would win without a word.
        if name in seen:
            raise written.error("twice in one file", "each key once", "remove one of the two", key)
        seen.add(name)
        if name in keys:
            yield name, written
        # A group without keys, whose lines may all be commented out, changes nothing.
        elif not is_null(node):
            yield from _pairs(written, name + ".", keys, removed, seen)


def _known(
    written: str, keys: Keys, removed: Removed, given: _Given, *, groups: bool = False
) -> str:
    """Return the name of a key as ``keys`` has it, with ``_`` for ``-``.

    Args:
        written: The key as it is written in a file or on the command line.
        keys: All keys.
        removed: The hint for each removed key, by the key's name.
        given: The value and the place that an error names.
        groups: Whether ``written`` may be the name of a group of keys.

    Raises:
        ConfigError: There is no such key.
    """
    name = written.replace("-", "_")
    is_group = any(key.startswith(name + ".") for key in keys)
    if name in keys or (is_group and groups):
        return name
    if is_group:
        raise given.error(
            "stands for several keys",
            f"one of them, such as {_example(name + '.', keys)}",
            "write that",
        )
    # Compare with a dot at the end, so that a removed key "hook" does not match "hooks", but a
    # removed group "hook" matches all of its keys, such as "hook.path".
    for gone, hint in removed.items():
        if f"{name}.".startswith(f"{gone}."):
            raise given.error("is no longer a setting", "a key that --help lists", hint)
    near = _nearest(name, keys if given.path else [*keys, *schema.RESERVED])
    if near:
        hint = f"did you mean {near}?"
    else:
        hint = "remove it; --help lists the keys"
    raise given.error("is an unknown key", "a key that --help lists", hint)


def _nearest(name: str, keys: Iterable[str]) -> str:
    """Return the key whose last part, after the last dot, equals or resembles the last part of an
    unknown name; empty if there is no such key.
    """
    # Go through the keys in reverse order, so that of several keys with the same last part the
    # first one stays in the dict.
    by_tail = {key.rpartition(".")[2]: key for key in reversed(list(keys))}
    tail = name.rpartition(".")[2]
    if tail in by_tail:
        near = [tail]
    else:
        near = difflib.get_close_matches(tail, by_tail, n=1)
    if near:
        return by_tail[near[0]]
    return ""


def _value(given: _Given, key: ConfigField) -> Any:
    try:
        return schema.value_of(given.node, key.kind)
    except schema.TypeMismatchError as mismatch:
        (found,) = mismatch.args
        words = expected(key.kind)
        raise given.error(
            f"is {shown(found)}",
            words,
            did_you_mean(getattr(found, "value", ""), words.replace(",", "").split())
            or "correct it",
            found if found.start_mark else given.node,
        ) from None


def _example(prefix: str, keys: Keys) -> str:
    return next(key for key in keys if key.startswith(prefix))
