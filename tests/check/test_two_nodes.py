"""The commands for before a job on two nodes: a draft is made, found right, and used."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from srunddp.bootstrap.network.ifaces_conf import parse
from tests.conftest import PROGRAMS
from tests.support.facts import tells
from tests.support.namespaces import NODES, address, rule
from tests.support.starting import SRUNDDP, bare, ended, write

pytestmark = pytest.mark.slow

WEST, EAST = (address(node, "data0") for node in NODES)
AS_NODE = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
QUICK = str(PROGRAMS / "other_torch")


def together(names: dict[str, str], *words: str, folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of a rank on each node."""
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": WEST,
        "MASTER_PORT": "29400",
        "PYTHONPATH": QUICK,
    }
    null = subprocess.DEVNULL
    pipe = subprocess.PIPE
    ranks = []
    for rank, (node, name) in enumerate(names.items()):
        command = ("ip", "netns", "exec", name, *AS_NODE, node, *SRUNDDP, *words)
        own = bare(world | {"RANK": str(rank)})
        ranks.append(
            subprocess.Popen(
                command, cwd=folder, env=own, text=True, stdin=null, stdout=pipe, stderr=pipe
            )
        )
    every = [ended(rank) for rank in ranks]
    assert not any("Traceback" in errors for _, _, errors in every), every
    return every


def test_a_scan_drafts_what_both_nodes_then_pass_with(
    names: dict[str, str], tmp_path: Path
) -> None:
    drafted = together(names, "ifaces", "scan", "-o", "ifaces.conf", folder=tmp_path)
    (code, out, errors), other = drafted
    assert (code, out, other) == (0, "", (0, "", ""))
    assert errors.count("\n") == 1
    assert tells(errors, "srunddp: ", "2 nodes", "each")
    entries = parse((tmp_path / "ifaces.conf").read_bytes(), "x")
    covered = {node: entry for entry in entries for node in NODES if entry.matches(node)}
    assert {node: entry.interfaces for node, entry in covered.items()} == dict.fromkeys(
        NODES, ("data0",)
    )
    assert {node: entry.address for node, entry in covered.items()} == {"west": WEST, "east": EAST}

    again, _ = together(names, "ifaces", "scan", "-o", "ifaces.conf", folder=tmp_path)
    assert again[0] == 78
    assert again[2].startswith("srunddp: error: ")
    assert again[2].count("\n") == 1
    assert tells(again[2], "ifaces.conf", "; expected ", "new file", " -> ", "-o")
    assert parse((tmp_path / "ifaces.conf").read_bytes(), "x") == entries

    judged, other = together(names, "ifaces", "check", "ifaces.conf", folder=tmp_path)
    assert (judged[0], judged[2], other) == (0, "", (0, "", ""))
    assert tells(judged[1], "ok  reach", "2 endpoints", "2 ways")


def test_a_draft_goes_to_standard_output_or_to_the_named_file(
    names: dict[str, str], tmp_path: Path
) -> None:
    (code, out, errors), _ = together(names, "ifaces", "scan", folder=tmp_path)
    assert code == 0
    assert errors.count("\n") == 1
    assert tells(errors, "srunddp: ", "2 nodes", "each")
    assert len(parse(out.encode(), "x")) == 2
    assert "# Not chosen: data1 on " in out
    assert list(tmp_path.iterdir()) == []
    ranks = together(names, "ifaces", "scan", "-o", "no/folder.conf", folder=tmp_path)
    words = (
        "no/folder.conf cannot be written: No such file or directory; expected a file that rank 0"
        " may write"
    )
    assert ranks == [(78, "", f"srunddp: error: {words} -> name another with -o\n"), (69, "", "")]


def test_a_check_names_the_way_on_which_packets_get_lost(
    names: dict[str, str], tmp_path: Path
) -> None:
    """All but rank 0's own port is closed in one direction, as a firewall of one node has it."""
    conf = write(tmp_path / "ifaces.conf", '- nodes: "*"\n  interface: data0\n')
    words = ("check", f"--ifaces={conf}", "--timeout=10")
    with rule(
        names["west"],
        "input",
        f"ip saddr {EAST} tcp flags & (syn | ack) == syn tcp dport != 29400 drop",
    ):
        ranks = together(names, *words, folder=tmp_path)
    assert [code for code, _, _ in ranks] == [69, 69]
    (found,) = json.loads((tmp_path / "preflight.local.json").read_text())["findings"]
    assert (found["level"], found["check"], found["between"]) == ("FAIL", "reach", "east -> west")
    assert found["found"] == f"no TCP from {EAST} to {WEST}: no answer"
    healthy = together(names, *words, folder=tmp_path)
    assert [code for code, _, _ in healthy] == [0, 0], healthy
