"""Read the entries of an ifaces.conf from its YAML.

All errors are reported together, each with line and column.
"""

import contextlib
import re
import string
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from srunddp.bootstrap.network.ifaces_entry import (
    AUTO,
    NEAREST,
    OURS,
    IfacesEntry,
    is_pattern,
    port_range,
)
from srunddp.errors import ConfigError, ConfigFileError, Scope, did_you_mean
from srunddp.util.hostlist import LONGEST_LIST, count, shortened
from srunddp.util.yaml_source import shown, yaml_position

_ENTRY = "write `- nodes: …` and `interface: …`"
_ENV = "write env: {NCCL_IB_HCA: mlx5_0}"
# The most node names in a whole file, four times as many as in one list. There is a limit because
# every rank reads all of them.
LONGEST_FILE = 4 * LONGEST_LIST
# The tags that YAML 1.1 gives to a value for which the file writes no tag.
_TAG = "tag:yaml.org,2002:"
_IMPLICIT = frozenset(
    _TAG + name for name in ("str", "bool", "int", "float", "null", "timestamp", "merge", "value")
)
_TRUE = ("yes", "true", "on")
_LONGEST = 200  # letters of the text that a message quotes
_HINT_SCALAR = "write one value, quoted if it has [ or *"


class Reader:
    """Reads the entries of one file; ``path`` is for messages."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._errors: list[ConfigError] = []
        self._names = 0  # names of nodes in the entries so far
        # The env of entries, by the id() of the YAML node that it was read from.
        self._variables: dict[int, dict[str, str]] = {}
        self._keys: dict[str, Callable[[yaml.Node], Any]] = {
            "nodes": self._nodes,
            "interface": self._interfaces,
            "network": self._networks,
            "address": self._address,
            "env": self._env,
            "ports": lambda node: port_range(self._scalar(node), where=yaml_position(path, node)),
            "metrics": self._metrics,
        }

    def entries(self, root: yaml.Node) -> tuple[IfacesEntry, ...]:
        """Read all entries of the file.

        Raises:
            ConfigError: the file has an error; a ConfigFileError if it has several.
        """
        if not isinstance(root, yaml.SequenceNode):
            raise self._wrong(
                root, "not a list", "a list of entries", "begin each entry with `- nodes:`"
            )
        found = tuple(filter(None, map(self._entry, root.value)))
        if self._errors:
            raise self._errors[0] if len(self._errors) == 1 else ConfigFileError(self._errors)
        return found

    def _wrong(self, node: yaml.Node, found: str, expected: str, hint: str) -> ConfigError:
        where = yaml_position(self._path, node)
        return ConfigError(
            # If the file is no ifaces.conf, a single value may be as long as the file.
            _readable(found),
            expected=expected,
            hint=_readable(hint),
            where=where,
            scope=Scope.NODE,
        )

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self._errors.append(error)

    def _entry(self, node: yaml.Node) -> IfacesEntry | None:
        before = len(self._errors)
        given: dict[str, Any] = {}
        with self._collecting():
            pairs = self._mapping(node, _ENTRY)
            for name, (key, value) in pairs.items():
                with self._collecting():
                    if name not in self._keys:
                        raise self._wrong(
                            key,
                            f"unknown key {name!r}",
                            f"one of {', '.join(self._keys)}",
                            did_you_mean(name.lower(), self._keys, 0.5) or "remove it",
                        )
                    given[name] = self._keys[name](value)
            if before == len(self._errors):
                self._check_keys(node, pairs)
        if before == len(self._errors):
            return IfacesEntry(
                nodes=given["nodes"],
                interfaces=given.get("interface", ()),
                networks=given.get("network", ()),
                address=given.get("address", ""),
                env=given.get("env", {}),
                ports=given.get("ports"),
                metrics=given.get("metrics", ""),
                where=yaml_position(self._path, node),
            )
        return None

    def _check_keys(self, node: yaml.Node, pairs: dict[str, tuple[yaml.Node, yaml.Node]]) -> None:
        decides = {"interface", "network"} & pairs.keys()
        if len(decides) > 1:
            raise self._wrong(
                pairs["network"][0],
                "interface and network in one entry",
                "one of them",
                "remove one; network is for nodes whose interfaces have different names",
            )
        if "nodes" not in pairs:
            missing = "nodes"
        elif not decides:
            missing = "interface"
        else:
            return
        raise self._wrong(
            node,
            f"an entry without {missing}",
            "nodes, and interface or network",
            f"add `{missing}: …`",
        )

    def _nodes(self, node: yaml.Node) -> str:
        listed = isinstance(node, yaml.SequenceNode)
        if listed:
            nodes = ",".join(map(self._scalar, node.value))
        else:
            nodes = self._scalar(node).strip()
        if listed or re.search(r"\s", nodes):
            joined = ",".join(re.findall(r"[^\s,]+", nodes))
            if listed and re.fullmatch(r"[\d,-]+", joined):
                meant = f'"[{joined}]"'
            else:
                meant = joined
            found = "a list" if listed else f"nodes {nodes!r}"
            raise self._wrong(node, found, "a single value without spaces", f"write nodes: {meant}")
        names = count(nodes, where=yaml_position(self._path, node))
        self._bound(names, node)
        if not names:
            raise self._wrong(
                node, "an entry for no nodes", "a host list", 'write node[01-04] or "*"'
            )
        return nodes

    def _bound(self, names: int, node: yaml.Node) -> None:
        """Count further names of nodes in the file.

        Raises:
            ConfigError: the file now has too many. The error is raised once, not for each further
                entry.
        """
        before = self._names
        self._names += names
        if before <= LONGEST_FILE < self._names:
            raise self._wrong(
                node,
                f"more than {LONGEST_FILE} names of nodes in all entries up to this one",
                "fewer",
                "correct a range, or write a pattern such as gpu*",
            )

    def _interfaces(self, node: yaml.Node) -> tuple[str, ...]:
        children = self._several(node)
        names = tuple(self._scalar(child) for child in children)
        for child, name in zip(children, names, strict=True):
            # Linux allows an IP address as an interface's name, but who writes one here means the
            # interface that has this address, or its network.
            if not _is_interface(name) or _network_of(name):
                self._errors.append(self._wrong(child, f"interface {name!r}", *_meant(name)))
        if {AUTO, NEAREST} & {*names} and len(names) > 1:
            raise self._wrong(
                node,
                f"interface {list(names)}",
                "one name, a list of names, or auto or nearest alone",
                "remove auto and nearest, or all others",
            )
        return names

    def _networks(self, node: yaml.Node) -> tuple[str, ...]:
        import ipaddress  # few files name a network

        found = []
        for child in self._several(node):
            text = self._scalar(child)
            # ip_network() would accept a text without a prefix length, as a single address. It
            # refuses an empty text.
            network = text if "/" in text else ""
            with self._collecting():
                try:
                    # Not strict, so that a node's own address with the prefix length is accepted,
                    # as `ip address` shows it.
                    found.append(str(ipaddress.ip_network(network, strict=False)))
                except ValueError:
                    raise self._wrong(
                        child,
                        f"network {text!r}",
                        "a network with its prefix length, such as 10.20.0.0/16",
                        "see `ip route` on the node; for a name write `interface: …`",
                    ) from None
        return tuple(found)

    def _several(self, node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.SequenceNode):
            children = list(node.value)
        else:
            children = [node]
        if not children:
            raise self._wrong(node, "an empty list", "one value or a list", "write a value")
        return children

    def _address(self, node: yaml.Node) -> str:
        address = self._scalar(node)
        try:
            parts = string.Formatter().parse(address)
            # The fields that format() would replace. Anything but a plain {node}, such as
            # {node.upper}, is refused.
            fields = {
                f"{name}{form}{kind or ''}" for _, name, form, kind in parts if name is not None
            }
        except ValueError:
            fields = {"?"}
        if fields - {"node"} or not address.isprintable():
            raise self._wrong(
                node, f"address {address!r}", "a name with {node} in it", 'write "{node}-ib0"'
            )
        return address

    def _metrics(self, node: yaml.Node) -> str:
        folder = self._scalar(node)
        # A relative path would mean another folder in each run, because the working directories
        # differ.
        if not folder.startswith("/") or not folder.isprintable():
            raise self._wrong(
                node,
                f"metrics {folder!r}",
                "the absolute path of a folder",
                "write the one of node_exporter's --collector.textfile.directory",
            )
        return folder

    def _env(self, node: yaml.Node) -> dict[str, str]:
        # With an alias (env: *name), many entries have the same YAML node: read it only once.
        if id(node) not in self._variables:
            self._variables[id(node)] = self._read_env(node)
        return self._variables[id(node)]

    def _read_env(self, node: yaml.Node) -> dict[str, str]:
        variables = {}
        for name, (key, given) in self._mapping(node, _ENV).items():
            with self._collecting():
                variables[name] = value = self._scalar(given)
                self._check_type(name, given)
                if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not value.isprintable():
                    raise self._wrong(
                        key, f"env {name!r}: {value!r}", "a variable's name and its text", _ENV
                    )
                if name in OURS:
                    raise self._wrong(
                        key,
                        f"env {name}",
                        "variables that srunddp does not set itself",
                        "remove it",
                    )
        return variables

    def _check_type(self, name: str, node: yaml.Node) -> None:
        """Refuse a value of ``env`` whose meaning in YAML differs from what most programs read from
        the same text in the variable.

        For example, NCCL reads ``yes`` as 0, and ``1_000`` as 1.

        Raises:
            ConfigError: the value is a boolean, or a number in a notation that C does not read.
        """
        # A value in quotes is text.
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return
        text = str(node.value)
        if node.tag == f"{_TAG}bool":
            number = int(text.lower() in _TRUE)
            raise self._wrong(
                node,
                f"env {name}: {text}, a boolean in YAML",
                "a number or a text",
                f'write {name}: {number}, or {name}: "{text}" for the text',
            )
        whole = _only_pythons(text)
        if whole is not None:
            raise self._wrong(
                node,
                f"env {name}: {text}, a number that most programs read as another",
                "a number as C writes it, or a text",
                f'write {name}: {whole}, or {name}: "{text}" for the text',
            )

    def _mapping(self, node: yaml.Node, hint: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong(node, shown(node), "keys with values", hint)
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            with self._collecting():
                name = self._scalar(key)
                if name in pairs:
                    raise self._wrong(
                        key, f"{name} twice in one entry", "each key once", "remove one of the two"
                    )
                pairs[name] = (key, value)
        return pairs

    def _scalar(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
            raise self._wrong(node, shown(node), "a single value", _HINT_SCALAR)
        # Without quotes, `null` and `~` are no texts: they stand for nothing.
        if node.tag == f"{_TAG}null":
            raise self._wrong(
                node,
                f"{node.value}, which is no value in YAML",
                "a single value",
                f'remove the key, or write "{node.value}" in quotes for the text',
            )
        if node.tag not in _IMPLICIT:
            tag = node.tag.replace(_TAG, "!!")
            raise self._wrong(
                node, f"a value with the tag {shortened(tag)}", "a plain value", "remove the tag"
            )
        return str(node.value)


def _readable(text: str) -> str:
    """Shorten a text that is too long to be quoted in a message."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _only_pythons(text: str) -> int | None:
    """Return a whole number that is written as YAML and Python write it, but not C, such as
    ``1_000``, ``0b11`` or ``0o17``; None for any other text.
    """
    # At most 20 letters: int() refuses more than 4,300 digits with an error of its own.
    if not re.fullmatch(r"[-+]?(0[bo][0-9_]+|[0-9][0-9_]*_[0-9_]*)", text) or len(text) > 20:
        return None
    try:
        # Read 010_000 as decimal, although YAML reads it as octal: only its underscore is wrong.
        return int(text, 0 if re.match(r"[-+]?0[bo]", text) else 10)
    except ValueError:
        return None


def _meant(name: str) -> tuple[str, str]:
    """Return the expectation and the hint for the error about a text that names no interface."""
    if name.startswith("^"):
        return (
            "names to use, not to exclude",
            "write auto, which never takes loopback, bridges or containers' links",
        )
    plain = name.removeprefix("=")
    parts = re.findall(r"[^\s,]+", plain)
    if len(parts) > 1:
        return (
            "a name as `ip link` shows it",
            f"for one interface per rank write [{shortened(', '.join(parts))}]",
        )
    if plain != name and _is_interface(plain):
        return "a plain name", f"write {plain}; srunddp adds the = for NCCL"
    if re.fullmatch("[0-9a-fA-F]{1,2}(:[0-9a-fA-F]{1,2}){5,}", name):
        return (
            "a name as `ip link` shows it",
            "`ip -brief link` on the node shows the interface that has this address",
        )
    if network := _network_of(name):
        return (
            "a name as `ip link` shows it",
            f"for a network write `network: {network}` instead of interface",
        )
    return "a name as `ip link` shows it", "see `ip -brief address` on the node"


def _is_interface(name: str) -> bool:
    """Return whether Linux allows a text as an interface's name, or may allow one that it matches
    as a pattern.
    """
    # In Linux an interface's name has at most 15 bytes and a zero byte (IFNAMSIZ). A pattern such
    # as `en[op][0-9]*` may be longer than the names that it matches.
    length = 60 if is_pattern(name) else 15
    return name.isprintable() and bool(re.fullmatch(rf"[^\s/:,^=][^\s/:,]{{0,{length - 1}}}", name))


def _network_of(text: str) -> str:
    """Return the network that a text names, or that contains the address in the text; else an empty
    text.

    The prefix length for an address is not known, so the one that most clusters use is proposed.
    """
    import ipaddress  # only for this message

    try:
        address, _, length = text.partition("/")
        if not length:
            length = "64" if ipaddress.ip_address(address).version == 6 else "16"
        return str(ipaddress.ip_network(f"{address}/{length}", strict=False))
    except ValueError:
        return ""
