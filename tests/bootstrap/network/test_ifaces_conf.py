from __future__ import annotations

import os
import string
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.network import ifaces_conf
from srunddp.bootstrap.network.ifaces_conf import IfacesConfig, load, parse
from srunddp.bootstrap.network.ifaces_entry import DEFAULT, OURS, IfacesEntry, entry_for
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.process_group.store import ProcessGroupContext
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.errors import ConfigError, ConfigFileError
from tests.support.facts import tells
from tests.support.starting import write

KEYS = ("nodes", "interface", "network", "address", "env", "ports", "metrics")
SHIPPED = Path(__file__).parents[3] / "etc" / "ifaces.conf"
NODE = "- nodes: node1\n  interface: "
STRANGER = 61234  # a user id that nothing here belongs to
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")


def entries(text: str) -> tuple[IfacesEntry, ...]:
    return parse(text.encode(), "ifaces.conf")


def refused(text: str | bytes) -> str:
    """The message with which a file is refused: one line with what was found, expected, and the
    hint.
    """
    with pytest.raises(ConfigError) as caught:
        parse(text.encode() if isinstance(text, str) else text, "ifaces.conf")
    message = str(caught.value)
    assert message.isprintable()
    assert "; expected " in message
    assert " -> " in message
    return message


# The format.


def test_an_entry_has_all_that_the_format_knows() -> None:
    first, second, last = entries(
        "# site\n"
        "- nodes: master-node,node[01,03]\n"
        "  interface: ens1f1\n"
        "- nodes: gpu[001-128]\n"
        "  interface: [ib0, ib1]\n"
        '  address: "{node}-ib0"\n'
        "  env: {NCCL_IB_HCA: mlx5_0, NCCL_IB_TC: 106}\n"
        "  ports: 40000-40100\n"
        "  metrics: /run/srunddp metrics\n"
        '- nodes: "*"\n'
        "  interface: auto\n"
    )
    assert first == IfacesEntry("master-node,node[01,03]", ("ens1f1",), where="ifaces.conf:2:3")
    assert second == IfacesEntry(
        nodes="gpu[001-128]",
        interfaces=("ib0", "ib1"),
        address="{node}-ib0",
        env={"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_TC": "106"},
        ports=range(40000, 40101),
        metrics="/run/srunddp metrics",
        where="ifaces.conf:4:3",
    )
    assert last == IfacesEntry("*", ("auto",), where="ifaces.conf:10:3")


def test_values_are_text_and_anchors_work() -> None:
    """YAML would read these as a boolean, numbers in base 8, 16 and 60, a date."""
    (entry,) = entries(
        "- nodes: 010\n  interface: on\n"
        "  env: {A: 0x10, B: 12:30:45, C: 010, D: 2026-01-01, E: 1e3}\n"
    )
    assert (entry.nodes, entry.interfaces) == ("010", ("on",))
    assert entry.env == {
        "A": "0x10",
        "B": "12:30:45",
        "C": "010",
        "D": "2026-01-01",
        "E": "1e3",
    }
    (entry,) = entries(NODE + 'b\n  env: {A: "yes", B: \'null\', C: "1_000", D: !!str no}\n')
    assert entry.env == {"A": "yes", "B": "null", "C": "1_000", "D": "no"}
    one, two = entries("- &ib {nodes: a, interface: ib0}\n- *ib\n")
    assert one == two


@pytest.mark.parametrize(
    "name",
    ["ib0", "bond0.2973", "enp0s31f6", "wlp3s0", "a", "veth-very-long1", "eth_0", "ens1f1np1"],
)
def test_any_name_that_linux_allows_is_an_interface(name: str) -> None:
    assert entries(NODE + name)[0].interfaces == (name,)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# only\n# comments\n", "---\n", "   \n", "\ufeff# with a mark\n", "[]\n"]
)
def test_a_file_without_entries_has_none(text: str) -> None:
    assert entries(text) == ()


def test_networks_and_patterns_are_read() -> None:
    one, two, three = entries(
        "- nodes: a\n  network: 10.20.0.0/16\n- {nodes: b, network: [10.2.3.4/8, fd00:20::/64]}\n"
        '- {nodes: c, interface: [ib*, "enp[0-9]*s0f1np?"]}\n'
    )
    assert (one.networks, one.interfaces, one.rule, one.exact) == (
        ("10.20.0.0/16",),
        (),
        "network 10.20.0.0/16",
        False,
    )
    assert two.networks == ("10.0.0.0/8", "fd00:20::/64")
    assert (three.interfaces, three.exact) == (("ib*", "enp[0-9]*s0f1np?"), False)
    assert [IfacesEntry("a", (name,)).exact for name in ("ib0", "auto", "nearest", "ib?")] == [
        True,
        *[False] * 3,
    ]


def test_the_shipped_files_examples_are_right() -> None:
    text = SHIPPED.read_text()
    assert entries(text) == ()
    code = [line[2:] for line in text.splitlines() if line.startswith(("# - ", "#   "))]
    assert [entry.nodes for entry in entries("\n".join(code))] == [
        "master-node,node[01,03-16]",
        "gpu[001-128]",
        "*",
    ]
    assert len(text.splitlines()) <= 24  # a terminal's screen
    assert max(map(len, text.splitlines())) <= 120


# Which entry is a node's.


@pytest.mark.parametrize(
    ("nodes", "node", "fits"),
    [
        ("node[01-03]", "node02", True),
        ("node[01-03]", "node2", False),
        ("node[01-03]", "node021", False),
        ("node1", "node1.site.org", True),
        ("node1.site.org", "node1.site.org", True),
        ("node1.site.org", "node1", False),
        ("gpu*", "gpu17", True),
        ("gpu?", "gpu17", False),
        ("*", "anything", True),
        ("a,b*", "b7", True),
        ("Node1", "node1", False),
    ],
)
def test_an_entry_matches_whole_names(nodes: str, node: str, fits: bool) -> None:
    assert IfacesEntry(nodes, ("auto",)).matches(node) is fits


def test_the_first_match_counts_and_without_one_it_is_said() -> None:
    some = entries(
        "- {nodes: node1, interface: a}\n- {nodes: 'node*', interface: b}\n- {nodes: node1,"
        " interface: c}\n"
    )
    assert entry_for(some, "node1").interfaces == ("a",)
    assert entry_for(some, "node2").interfaces == ("b",)
    text = "^ifaces.conf: no entry matches node login7; expected .*add `- nodes: login7`"
    with pytest.raises(ConfigError, match=text):
        entry_for(entries("- {nodes: node1, interface: a}\n"), "login7")


# Which file counts.


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkout's own etc/ifaces.conf, moved to a folder of the test's."""
    module = write(
        tmp_path / "checkout" / "srunddp" / "bootstrap" / "network" / "ifaces_conf.py", ""
    )
    write(tmp_path / "checkout" / "setup.py", "")
    monkeypatch.setattr(ifaces_conf, "__file__", str(module))
    return write(tmp_path / "checkout" / "etc" / "ifaces.conf", "# comments\n")


def interface_of(found: IfacesConfig) -> str:
    return found.entries[0].interfaces[0]


def test_an_installed_srunddp_looks_into_its_prefix(own: Path) -> None:
    assert ifaces_conf.default_files() == [own, Path("/etc/srunddp/ifaces.conf")]
    (own.parents[1] / "setup.py").unlink()
    *own_prefix, last = ifaces_conf.default_files()
    assert Path(sys.prefix, "etc", "srunddp", "ifaces.conf") in own_prefix
    assert last == Path("/etc/srunddp/ifaces.conf")


def test_each_file_wins_over_those_after_it(tmp_path: Path, own: Path) -> None:
    """One of comments alone leaves it to the next; a later one may be wrong."""
    named = str(write(tmp_path / "named.conf", NODE + "from-option"))
    variables = {"SRUNDDP_IFACES": str(write(tmp_path / "variable.conf", NODE + "from-variable"))}
    comments = str(write(tmp_path / "comments.conf", "# nothing\n"))
    write(own, NODE + "from-checkout")
    assert interface_of(load(named, variables)) == "from-option"
    assert interface_of(load(None, variables)) == "from-variable"
    for none in ({}, {"SRUNDDP_IFACES": ""}, {"SRUNDDP_IFACES": comments}):
        assert interface_of(load(comments, none)) == "from-checkout"
    write(own, "nonsense: [")
    assert interface_of(load(named, {})) == "from-option"


def test_the_first_file_with_entries_counts_whole(tmp_path: Path, own: Path) -> None:
    """No entry of a later file is mixed in, not even for a node that the first file leaves out."""
    named = write(tmp_path / "named.conf", NODE + "ib0")
    write(own, '- nodes: "*"\n  interface: eth0\n')
    found = load(str(named), {}).entries
    assert [entry.where for entry in found] == [f"{named}:1:3"]
    with pytest.raises(ConfigError, match="node2"):
        entry_for(found, "node2")


@pytest.mark.skipif(
    Path("/etc/srunddp/ifaces.conf").exists(), reason="this machine has a site's file"
)
def test_where_no_file_has_entries_every_node_chooses_by_itself(own: Path) -> None:
    assert (load(None, {}).entries, load(None, {}).path) == ((DEFAULT,), "")
    assert (DEFAULT.nodes, DEFAULT.interfaces) == ("*", ("auto",))
    own.unlink()
    assert load(None, {}).entries == (DEFAULT,)


@pytest.mark.parametrize(
    "spelling", ["missing.conf", "./missing.conf", "folder//missing.conf", "folder/./missing.conf"]
)
def test_a_file_that_was_asked_for_and_is_not_there_is_named(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for origin, named, variables in (
        ("--ifaces", spelling, {}),
        ("SRUNDDP_IFACES", None, {"SRUNDDP_IFACES": spelling}),
    ):
        with pytest.raises(ConfigError, match=f"^{origin}: .*missing.conf .*; expected .*{origin}"):
            load(named, variables)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, "is not there") for name in ("x" * 300, "x/" * 3000, "with\0nul")),
        (
            "/",
            "--ifaces: / is not a file; expected a file of interface entries -> correct --ifaces",
        ),
        # Root may read any file but this one, whose first page is never there.
        (
            "/proc/self/mem",
            "/proc/self/mem: cannot be read: Input/output error; expected a readable file -> ",
        ),
    ],
    ids=["long", "deep", "nul", "folder", "unreadable"],
)
def test_a_name_that_leads_to_no_file_says_why(own: Path, name: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        load(name, {})


def test_a_file_without_read_permission_says_so() -> None:
    """Root, who may read any file, looks as nobody, who may not look into a test's own folder."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = write(Path(folder, "ifaces.conf"), NODE + "ib0")
        file.chmod(0)
        try:
            os.seteuid(user or 65534)
            with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
                load(str(file), {})
        finally:
            os.seteuid(user)


def test_env_may_not_set_what_every_rank_is_given() -> None:
    place = ProcessGroupContext(
        detect({}),
        SelectedInterface("lo", "127.0.0.1", {}, ""),
        RendezvousInfo(
            master_addr="127.0.0.1", master_port=1, store_port=2, run="run", master_node="node01"
        ),
        None,
        1.0,
    )
    interfaces = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}
    assert {*place.variables()} | interfaces == set(OURS)


@as_root
def test_a_file_that_the_user_names_is_read_whoever_owns_it(own: Path, tmp_path: Path) -> None:
    """A project account owns the folders on many clusters; the script in them is run unchecked as
    well.
    """
    named = write(tmp_path / "project" / "named.conf", NODE + "ib0")
    os.chown(named.parent, STRANGER, STRANGER)
    named.parent.chmod(0o2777)
    for mode in (0o644, 0o666):
        named.chmod(mode)
        os.chown(named, STRANGER, -1)
        assert interface_of(load(str(named), {})) == "ib0"
        assert interface_of(load(None, {"SRUNDDP_IFACES": str(named)})) == "ib0"


@as_root
@pytest.mark.parametrize("up", [0, 1])
def test_a_default_file_of_somebody_else_is_refused(own: Path, up: int) -> None:
    place = write(own, NODE + "ib0") if up == 0 else write(own, NODE + "ib0").parent
    os.chown(place, STRANGER, -1)
    with pytest.raises(ConfigError) as caught:
        load(None, {})
    assert caught.value.exit_code == 78
    text = str(caught.value)
    assert tells(text, own, place, STRANGER, "; expected ", "root", "yours", " -> ", "--ifaces")
    os.chown(ifaces_conf.__file__, STRANGER, -1)  # a software folder of a service account
    assert interface_of(load(None, {})) == "ib0"


@pytest.mark.parametrize("up", [0, 1])
def test_a_default_file_that_everybody_may_write(own: Path, up: int) -> None:
    place = write(own, NODE + "ib0") if up == 0 else write(own, NODE + "ib0").parent
    place.chmod(place.stat().st_mode | 0o002)
    with pytest.raises(ConfigError, match=f"{place} .*every user; expected .*--ifaces$"):
        load(None, {})


@pytest.mark.parametrize("up", [0, 1])
def test_a_default_file_that_a_group_may_write(own: Path, up: int) -> None:
    """On many sites all users are in one group. A group that may write the code needs no file."""
    place = write(own, NODE + "ib0") if up == 0 else write(own, NODE + "ib0").parent
    place.chmod(place.stat().st_mode | 0o020)
    code = Path(ifaces_conf.__file__).parent
    code.chmod(code.stat().st_mode & ~0o020)
    with pytest.raises(ConfigError, match=f"{place} .*group id {place.stat().st_gid}; expected "):
        load(None, {})
    code.chmod(code.stat().st_mode | 0o020)
    assert interface_of(load(None, {})) == "ib0"


def test_a_default_place_that_holds_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO or a dangling link where the site's file belongs is no reason to go without it."""
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "link", tmp_path / "fifo"):
        monkeypatch.setattr(ifaces_conf, "default_files", lambda path=path: [path])
        with pytest.raises(ConfigError, match=f"{path}: {path} is (a link|not a file).*remove it"):
            load(None, {})


def test_an_alias_in_a_thousand_entries_costs_no_more_than_one() -> None:
    variables = ", ".join(f"V{number}: 1" for number in range(300))
    first = f"- {{nodes: n0, interface: b, env: &all {{{variables}}}}}\n"
    others = "".join(
        f"- {{nodes: n{number}, interface: b, env: *all}}\n" for number in range(1, 300)
    )
    entries = ifaces_conf.parse((first + others).encode(), "ifaces.conf")
    assert [len(entry.env) for entry in entries] == [300] * 300
    assert len({id(entry.env) for entry in entries}) == 1


# What is wrong with a file: each message has the file, line and column, what was found, what was
# expected, the hint.

WRONG = {
    "not-yaml": ("# 1\n# 2\n- nodes: [a\n  interface: b\n", "4:12", "this is not YAML", "YAML"),
    "two-documents": ("- {nodes: a}\n---\n- {nodes: c}\n", "2:1", "another document", "YAML"),
    "star-in-front": (
        "- nodes: *gpu\n  interface: b\n",
        "1:10",
        "this is not YAML: a * without quotes",
        "YAML",
    ),
    "bracket-in-braces": (
        "- {nodes: a[1-2], interface: b}\n",
        "1:12",
        "this is not YAML: a [ without quotes",
        "YAML",
    ),
    "indentation": (
        "- nodes: a\n   interface: b\n",
        "2:13",
        "this is not YAML: a colon or an indentation",
        "YAML",
    ),
    "space-after-colon": (
        "- nodes:a\n  interface: b\n",
        "2:12",
        "this is not YAML: a colon or an indentation",
        "YAML -> give all keys of an entry the same indentation, with a space after each colon",
    ),
    "open-brace": (
        "- nodes: a\n  interface: b\n  env: {A: 1, B: c\n- nodes: d\n  interface: e\n",
        "4:8",
        "this is not YAML: a { in line 3 that is not closed",
        "YAML -> write {A: 1, B: 2}",
    ),
    "open-bracket": (
        "- nodes: a\n  interface: [b, c\n- nodes: d\n  interface: e\n",
        "3:8",
        "this is not YAML: a [ in line 2 that is not closed",
        "YAML -> write [a, b]",
    ),
    "escape-beyond-unicode": (
        '- nodes: a\n  interface: "\\UFFFFFFFF"\n',
        "1:1",
        "this is not YAML",
        "YAML",
    ),
    "nested-too-deep": (
        "# 1\n" + "[" * 5000,
        "2:51",
        "this is not YAML: too many brackets, braces",
        "YAML",
    ),
    "nested-in-braces": (
        NODE + "b\n  env: " + "{a: " * 5000,
        "3:197",
        "this is not YAML: too many brackets, braces",
        "YAML",
    ),
    "nested-and-closed": (
        NODE + "b\n  env: " + "[" * 60 + "]" * 60,
        "3:56",
        "this is not YAML: too many brackets, braces",
        "YAML",
    ),
    "entry-is-text": ("- {nodes: a, interface: b}\n- eth0\n", "2:3", "'eth0'", "keys with values"),
    "entry-is-list": ("- [a, b]\n", "1:3", "a list", "keys with values"),
    "unknown-key": (
        "- nodes: a\n  interfaces: b\n",
        "2:3",
        "unknown key 'interfaces'",
        "one of nodes, interface, ",
    ),
    "key-twice": (
        "- nodes: a\n  interface: b\n  nodes: c\n",
        "3:3",
        "nodes twice in one entry",
        "each key once",
    ),
    "key-is-list": ("- nodes: a\n  [b]: c\n", "2:3", "a list", "a single value"),
    "no-nodes": (
        "\n- interface: b\n",
        "2:3",
        "an entry without nodes",
        "nodes, and interface or network",
    ),
    "nodes-empty": ("- nodes:\n  interface: b\n", "1:9", "''", "a single value"),
    "interface-no-names": (NODE + "[]\n", "2:14", "an empty list", "one value or a list"),
    "interface-empty": ("- nodes: a\n  interface:\n", "2:13", "''", "a single value"),
    "auto-among-names": (
        NODE + "[b, auto]\n",
        "2:14",
        "interface ['b', 'auto']",
        "one name, a list",
    ),
    "nearest-among-names": (
        NODE + "[nearest, ib*]\n",
        "2:14",
        "interface ['nearest', 'ib*']",
        "one name, a list",
    ),
    "interface-keys": (
        "- nodes: a\n  interface: {b: c}\n",
        "2:14",
        "keys with values",
        "a single value",
    ),
    "interface-text": (
        "- nodes: a\n  interface: ib0 ib1\n",
        "2:14",
        "interface 'ib0 ib1'",
        "a name as `ip link`",
    ),
    "interface-nul": (
        '- nodes: a\n  interface: "a\\0"\n',
        "2:14",
        r"interface 'a\x00'",
        "a name as `ip link`",
    ),
    "address-field": (
        NODE + 'b\n  address: "{host}-ib0"\n',
        "3:12",
        "address '{host}-ib0'",
        "a name with {node}",
    ),
    "address-brace": (
        NODE + 'b\n  address: "{node-ib0"\n',
        "3:12",
        "address '{node-ib0'",
        "a name with {node}",
    ),
    "address-empty-field": (
        NODE + 'b\n  address: "{}-ib0"\n',
        "3:12",
        "address '{}-ib0'",
        "a name with {node}",
    ),
    "address-format": (
        NODE + 'b\n  address: "{node:d}"\n',
        "3:12",
        "address '{node:d}'",
        "a name with {node}",
    ),
    "env-nested": (
        NODE + "b\n  env:\n    A: {B: c}\n",
        "4:8",
        "keys with values",
        "a single value",
    ),
    "ports-low": (NODE + "b\n  ports: 80-90\n", "3:10", "ports '80-90'", "two ports or more"),
    "ports-high": (
        NODE + "b\n  ports: 60000-70000\n",
        "3:10",
        "ports '60000-70000'",
        "two ports or more",
    ),
    "env-name": (NODE + "b\n  env: {A-B: 1}\n", "3:9", "env 'A-B'", "a variable's name"),
    "env-no-name": (NODE + "b\n  env: {'': 1}\n", "3:9", "''", "a single value"),
    "env-value": (
        NODE + 'b\n  env: {A: "a\\0b"}\n',
        "3:9",
        r"env 'A': 'a\x00b'",
        "a variable's name",
    ),
    "env-surrogate": (
        NODE + 'b\n  env: {A: "\\uD800"}\n',
        "3:9",
        r"env 'A': '\ud800'",
        "a variable's name",
    ),
    "ports-open": (NODE + "b\n  ports: 40000-\n", "3:10", "ports '40000-'", "two ports or more"),
    "nul": ("- nodes: a\n  interface: b\0\n", "2:15", "this is not YAML", "YAML"),
    "control-character": ("# 1\n# 2\n# \x1b[31m\n", "3:3", "this is not YAML", "YAML"),
    "after-umlauts": ("# äöüäöüäöü\n# 2\n- nodes: \x07\n", "3:10", "this is not YAML", "YAML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_told_of_with_its_place(case: str) -> None:
    text, place, found, expected = WRONG[case]
    message = refused(text)
    assert message.startswith(f"ifaces.conf:{place}: ")
    assert found in message.partition("; expected ")[0]
    assert message.partition("; expected ")[2].startswith(expected)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("yes", "1"),
        ("True", "1"),
        ("on", "1"),
        ("no", "0"),
        ("FALSE", "0"),
        ("off", "0"),
        ("1_000", "1000"),
        ("-1_0", "-10"),
        ("0b11", "3"),
        ("0o17", "15"),
        ("010_0", "100"),
    ],
)
def test_a_value_that_programs_read_as_another_is_refused(value: str, number: str) -> None:
    """NCCL takes ``yes`` for 0, and ``1_000`` for 1. Both values of the hint are right."""
    before = NODE + "b\n  env: {NCCL_IB_DISABLE: "
    message = refused(f"{before}{value}}}\n")
    assert message.startswith(f"ifaces.conf:3:26: env NCCL_IB_DISABLE: {value}, a ")
    assert tells(message.partition(" -> ")[2], number, f'"{value}"')
    assert entries(f"{before}{number}}}\n")[0].env == {"NCCL_IB_DISABLE": number}
    assert entries(f'{before}"{value}"}}\n')[0].env == {"NCCL_IB_DISABLE": value}


@pytest.mark.parametrize("nothing", ["~", "null", "Null"])
@pytest.mark.parametrize("line", ["interface: {}", "address: {}", "env: {{A: {}}}", "nodes: {}"])
def test_no_value_is_not_taken_for_a_text(line: str, nothing: str) -> None:
    message = refused(f"- {line.format(nothing)}\n")
    assert message.partition(": ")[2].startswith(f"{nothing}, which is no value in YAML; expected ")


@pytest.mark.parametrize(
    "value", ["!!binary aGk=", "!site x", "!!set x", "!!python/name:os.system x"]
)
def test_a_value_with_a_tag_is_refused(value: str) -> None:
    for line in (f"interface: {value}", f"nodes: {value}", f"env: {{A: {value}}}"):
        message = refused(f"- {line}\n")
        assert tells(message, "a value with the tag", value.split()[0], "remove the tag")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("=ib0", "ib0"),
        ('"=ib0,ib1"', "[ib0, ib1]"),
        ("ib0 ib1", "[ib0, ib1]"),
        ('"ib0,ib1"', "[ib0, ib1]"),
    ],
)
def test_the_hint_for_an_interface_is_right_itself(given: str, meant: str) -> None:
    hint = refused(f"{NODE}{given}\n").partition(" -> ")[2]
    assert hint.partition("write ")[2].startswith(meant)
    entries(f"{NODE}{meant}\n")


@pytest.mark.parametrize(
    ("given", "network"),
    [
        ("10.20.3.4", "10.20.0.0/16"),
        ("10.20.3.4/8", "10.0.0.0/8"),
        ('"fd00:20::9"', "fd00:20::/64"),
        ("fd00:20::/56", "fd00:20::/56"),
    ],
)
def test_an_address_for_an_interface_is_told_its_network(given: str, network: str) -> None:
    hint = refused(f"{NODE}{given}\n").partition(" -> ")[2]
    assert f"`network: {network}`" in hint
    entries(f"- nodes: a\n  network: {network}\n")


@pytest.mark.parametrize(
    "given", ["00:11:22:33:44:55", "80:00:02:08:fe:80:0:0:0:0:0:0:0:11:22:33:44:55:66:77"]
)
def test_a_hardware_address_is_no_network(given: str) -> None:
    """Of Ethernet, and of InfiniBand with its twenty bytes."""
    hint = refused(f'{NODE}"{given}"\n').partition(" -> ")[2]
    assert tells(hint, "ip -brief link")
    assert "network" not in hint


@pytest.mark.parametrize("given", ["0000:41:00.0", "10.0.0.0/99", "a:b", "a/b"])
def test_what_is_no_network_is_not_proposed_as_one(given: str) -> None:
    assert "network:" not in refused(f'{NODE}"{given}"\n')


@pytest.mark.parametrize("depth", [10_000, 200_000])
def test_a_file_nested_deeply_is_refused_soon(depth: int) -> None:
    began = time.process_time()
    for text in ("[" * depth, "- {nodes: a, env: " + "{a: " * depth, "\n".join("[" * depth)):
        assert tells(refused(text), "too many brackets")
    assert time.process_time() - began < 1


def test_nesting_is_refused_where_a_file_is_read_deep_in_calls() -> None:
    """Fifty levels are read, also with few calls of Python left."""

    def deep(levels: int) -> str:
        return deep(levels - 1) if levels else refused("[" * 5000)

    assert "1:51: " in deep(400)
    assert tells(refused("[" * 40 + "]" * 40), "a list", "keys with values")


def test_a_long_value_is_cut_in_its_message() -> None:
    long = "x" * 100_000
    for line in (
        f"{long}: b",
        f"interface: {long}",
        f"network: {long}",
        f'address: "{{{long}}}"',
        f"ports: {long}",
        f"nodes: {long} b",
        f"nodes: [{', '.join([long] * 3)}]",
        f"nodes: a[{long}]",
        f"nodes: {long}+",
        f'env: {{"{long}-": 1}}',
        f'env: {{A: "{long}\\0"}}',
        f"interface: !{long} b",
        f"{long}: b, {long}: c",
    ):
        for message in refused(f"- {{{line}}}\n").splitlines():
            assert len(message) < 700, line


def test_the_names_of_a_whole_file_are_bounded() -> None:
    """In a list, in all lists together, and if an alias repeats them. Every rank reads the file."""
    full = "nodes: 'n[1-65536]', interface: ib0"
    assert len(entries(f"- {{{full}}}\n" * 4)) == 4
    for text in (f"- {{{full}}}\n" * 5, f"- &a {{{full}}}\n" + "- *a\n" * 4):
        message = refused(text)
        assert tells(message, "more than 262144 names", "gpu*")
    # Not a name of them is made, and one message tells of all.
    began = time.process_time()
    assert len(refused(f"- &a {{{full}}}\n" + "- *a\n" * 1000)) < 300
    assert time.process_time() - began < 1
    for ranges, why in (
        ("0-99999999", "more than 65536 names: 0-99999999"),
        ("1-256]b[1-257", "more than 65536 names"),
        ("9-1", "the range 9-1, which runs backwards"),
        ("0-999999999999999999", "more than 65536 names"),
    ):
        assert why in refused(f"- nodes: node[{ranges}]\n  interface: b\n")


def test_all_errors_of_a_file_are_told_at_once() -> None:
    text = (
        "- nodes: a, b\n  interface: [ib0, =ib1]\n- nodse: c\n- nodes: d\n- {nodes: e, interface:"
        " ib0}\n"
    )
    with pytest.raises(ConfigFileError) as caught:
        parse(text.encode(), "f")
    lines = f"srunddp: error: {caught.value}".splitlines()
    places = [line.removeprefix("srunddp: error: f:").partition(": ")[0] for line in lines]
    assert places == ["1:10", "2:20", "3:3", "4:3"]
    assert all(" -> " in line and line.isprintable() for line in lines)
    assert caught.value.found.startswith("f:1:10: ")
    assert tells(caught.value.hint, "3 more")
    assert (len(caught.value.each), caught.value.exit_code) == (4, 78)


def test_a_binary_file_is_told_of_with_its_place() -> None:
    assert refused(b"# 1\n# 2\n\xff\xfe\x80").startswith("ifaces.conf:3:1: this is not YAML")
    assert refused(b"\x7fELF\x02\x01\x01\0\0").startswith("ifaces.conf:1:1: this is not YAML")
    assert refused(b"\x89PNG\r\n\x1a\n").startswith("ifaces.conf:1:1: this is not YAML")


def one_edit(word: str) -> set[str]:
    """All that one slip of a finger makes of a word: a letter lost, added or wrong, two letters
    swapped.
    """
    cuts = [(word[:at], word[at:]) for at in range(len(word) + 1)]
    lost = {left + right[1:] for left, right in cuts if right}
    swapped = {left + right[1] + right[0] + right[2:] for left, right in cuts if len(right) > 1}
    wrong = {left + letter + right[1:] for left, right in cuts if right for letter in NAMED}
    added = {left + letter + right for left, right in cuts for letter in NAMED}
    return (lost | swapped | wrong | added) - set(KEYS)


NAMED = string.ascii_lowercase + "S0_-"


@pytest.mark.parametrize("key", KEYS)
def test_a_typo_of_letters_in_a_key_is_told_the_right_key(key: str) -> None:
    """And not that a key is missing."""
    typos = sorted(one_edit(key))
    assert len(typos) > 200
    messages = [refused(f"- {typo}: x\n") for typo in typos]
    for typo, message in zip(typos, messages, strict=True):
        assert message.startswith(f"ifaces.conf:1:3: unknown key {typo!r}")
    assert sum(f"did you mean {key}?" in message for message in messages) >= 0.95 * len(typos)


@pytest.mark.parametrize("typo", ["Nodes", "NODE", "ifaces", "Interfaces", "iface", "addr", "port"])
def test_what_people_would_write_is_told_the_right_key(typo: str) -> None:
    right = {"n": "nodes", "i": "interface", "a": "address", "e": "env", "p": "ports"}[
        typo[0].lower()
    ]
    assert f"did you mean {right}?" in refused(f"- {typo}: x\n")


# Whatever is in the file: entries or the one error.

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["*", "node[1-3]", "node[1-", "ib0", "auto", "{node}-ib", "{node!r}", "40000-40100", "1-2"]
    ),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_SCALARS, inner, max_size=3)
    ),
    max_leaves=4,
)
_ENTRIES = st.dictionaries(st.one_of(st.sampled_from(KEYS), _SCALARS), _VALUES, max_size=5)
_WHOLE = st.fixed_dictionaries({"nodes": st.just("node[1-3]"), "interface": st.just("ib0")})
_LISTS = st.one_of(
    st.lists(_ENTRIES, max_size=3), st.lists(st.builds(dict.__or__, _WHOLE, _ENTRIES), max_size=2)
)
_YAML = st.one_of(_VALUES, _LISTS).map(
    lambda data: yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")
)
_TEXT = st.text(
    alphabet=st.sampled_from("abn:-[]{},*&!|>'\"%@`#?~ \n\t\\x0{node}\u0085\u2028ä🙂"), max_size=60
)


@example(b"\x00")
@example(b"\xef\xbb\xbf- nodes: a")
@example(b"\xff\xfe-\x00 \x00")
@example(b"%YAML 9" + b"9" * 5000 + b".1\n--- a")
@example(b"&a [*a]")
@example(b"- &a {nodes: *a, interface: b}")
@example(b"- {nodes: n, interface: b, <<: {env: {}}}")
@example(b"- !!python/object/apply:os.system [ls]")
@given(st.one_of(st.binary(max_size=200), _TEXT.map(str.encode), _YAML))
def test_any_file_gives_entries_or_the_one_error(data: bytes) -> None:
    try:
        found = parse(data, "ifaces.conf")
    except ConfigError:
        return
    for entry in found:
        entry.matches("node1")
        assert isinstance(entry.address.format(node="node1"), str)
        for name, value in entry.env.items():
            assert "=" not in name
            assert "\0" not in name + value
            os.fsencode(name + value)
