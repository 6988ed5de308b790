"""Settings from YAML files and the command line, into any dataclass; and back into YAML."""

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
Removed = Mapping[str, str]  # by name, the hint what to do instead


@dataclass(frozen=True)
class _Given:
    """What was given for a key.

    Attributes:
        name: As it was written: with its dashes on the command line.
        node: What was given, with its place in the file.
        path: Of the file; empty for the command line.
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
            node: At which the error points; None for the value.
        """
        if self.path:
            where = yaml_position(self.path, node or self.node)
        else:
            where = ""
        return ConfigError(
            f"{self.name} {found}", expected=expected, hint=hint, where=where, scope=Scope.JOB
        )


def read_config(kind: type[T], arguments: Sequence[str] | None = None) -> T:
    """Fill a dataclass, also a nested or a frozen one, from ``--config=FILE.yaml`` and
    ``--key=value``.

    ``--key value`` is the same. A later file wins over an earlier one, and the command line over
    files. Keys of nested dataclasses are written with dots, in files also as nested mappings; ``-``
    and ``_`` are the same in them. A list is ``a,b`` or ``[a, b]``; None is ``null``, ``none``,
    ``~`` or nothing. ``--help`` prints all keys with their defaults, on rank 0, and ends the
    program.

    Args:
        kind: ``Config``, a dataclass derived from it, or any other. Its fields are bool, int,
            float, str, Path, Literal, a tuple or list of these, one of these or None, or a
            dataclass.
        arguments: None for those of the program.

    Raises:
        ConfigError: a key is unknown, given twice in a file, or missing; a value is of another
            type; a file is wrong.
        SystemExit: with 0, after ``--help``.
    """
    # A script reads its settings before srunddp.init(), which installs the same: an error is one
    # line and has its exit code from the beginning.
    install_excepthook()
    options = list(_options(sys.argv[1:] if arguments is None else arguments))
    if any(name == "help" for name, _ in options):
        # Every rank reads the same arguments, and would print the same. The launcher has set RANK
        # before the script began.
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
    """A value that was given.

    Attributes:
        value: Of the key's type.
        path: The file that it is from; empty for the command line.
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
    """Return what the options, and the files of each ``config`` among them, give by key.

    A later file wins, and options win over files.

    Args:
        keys: That there are.
        options: Names without dashes, and values.
        removed: By the name of a key that there was once, the hint what to do instead.
        splits: By the name of a key whose value stands for values of other keys, what returns
            these. A key that is given there and by its own name has the latter value.

    Raises:
        ConfigError: A key is unknown, or given twice in a file; a value is of another type; a file
            is wrong.
    """
    # Two passes: --config may stand after an option, which still wins.
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
    # Converted last: a value in a file that the command line replaces may be of a wrong type.
    return {name: Setting(_value(one, keys[name]), one.path) for name, one in given.items()}


def _split(name: str, split: Split, keys: Keys, layers: Sequence[dict[str, _Given]]) -> None:
    """Replace a key by those that its value stands for, in the last layer that has it; in the
    others it does not count.
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
    """Write the YAML from which :func:`read_config` makes an equal object.

    Args:
        path: Of the file, which is replaced as a whole.
        config: A dataclass.

    Raises:
        OSError: The folder is missing, not writable, or the disk is full; an old file is untouched.
    """
    replace_file(
        Path(path),
        yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode(),
    )


class _Dumper(yaml.SafeDumper):
    """Quotes each text that would else be read as something else.

    YAML 1.1 alone would not quote 1e-3 or none.
    """

    # PyYAML would write &id001 and *id001 where two settings are one and the same tuple.
    def ignore_aliases(self, data: Any) -> bool:
        """Return whether a value is written out where it occurs again; see PyYAML."""
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        """Return the node of a text.

        Args:
            data: The text.
        """
        return self.represent_scalar(
            "tag:yaml.org,2002:str", data, style="'" if schema.is_ambiguous(data) else None
        )


_Dumper.add_representer(str, _Dumper.text)


def _plain(value: Any) -> Any:
    """Return a value as YAML has it: dataclasses as mappings, tuples as lists, paths as texts."""
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
    """Yield the options' names, without dashes in front, and their texts.

    Raises:
        ConfigError: Something else is among the arguments, or an option has no value.
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
            # A value may begin with one dash, as a negative number does.
            if not left or left[0].startswith("--"):
                raise config_error(f"{option} without a value", "one", f"write {option}=VALUE")
            text = left.pop(0)
        yield name, text


def _from_file(path: str, keys: Keys, removed: Removed) -> dict[str, _Given]:
    hint = "correct --config"
    if "RANK" in os.environ:
        hint += "; every node must see the file"
    # Scope.NODE: a file may be missing on one node alone, and one of its ranks says so.
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
    """Yield the leaves of a mapping, and of those nested in it, by dotted name.

    Args:
        group: The mapping.
        prefix: Of the names in it.
        keys: That there are.
        removed: As in :func:`parse_values`.
        seen: The names that were in the file before; those that are found are added.

    Raises:
        ConfigError: A key is unknown or there twice, or something is no mapping.
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
        # By its own spelling, as batch-size and batch_size are one key. PyYAML would let the last
        # win.
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
    """Return a key's own spelling.

    Args:
        written: As it stands in a file or on the command line.
        keys: That there are.
        removed: As in :func:`parse_values`.
        given: What an error points at.
        groups: Whether it may be the name of a group of keys.

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
    # With the dot, so that "hook" is not taken for the beginning of "hooks"; and a key in a group
    # that was removed as a whole has the group's hint.
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
    """Return the key that is like a name, be it by its last part alone; empty where none is."""
    # Reversed: where two keys have the same last part, the first one is to be proposed.
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
