"""``srunddp check`` on the real cluster with faults planted on some of its nodes, and what it made
of them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.network import etc_file, tool
from tests.cluster.nodes import Node
from tests.cluster.slurm import over_tmp
from tests.conftest import PROGRAMS
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner

NODES = 6
TIMEOUT = 180  # seconds, for ranks that come; two cores start them all, and may have other work
SHORT = 20  # where some never come, and are waited for


@dataclass(frozen=True)
class Checked:
    """How a check ended: its exit code, what it printed, and the findings of its JSON file."""

    code: int
    text: str
    errors: str
    findings: list[dict[str, Any]]
    folder: Path

    def named(self) -> set[tuple[str, str, str]]:
        """Level, check, and where, of each finding."""
        return {
            (each["level"], each["check"], each["between"] or ",".join(each["nodes"]))
            for each in self.findings
        }

    def about(self, check: str) -> str:
        """The one finding of a check, in its words."""
        (found,) = [each for each in self.findings if each["check"] == check]
        assert found["expected"], found
        assert found["hint"], found
        return str(found["found"])


def checked(
    runner: SlurmJobRunner,
    *words: str,
    faults: Mapping[str, str] = {},
    srun: tuple[str, ...] = (f"-N{NODES}", "--ntasks-per-node=2"),
    ifaces: Path | None = None,
    timeout: int = TIMEOUT,
) -> Checked:
    """Run it on two ranks of each node.

    Args:
        words: its own, after ``srunddp check``.
        faults: for each node, shell commands before it starts there.
        srun: its options; timeout: seconds for all ranks to come.
    """
    folder = runner.cluster.shared / f"checked-{len(list(runner.cluster.shared.glob('checked-*')))}"
    folder.mkdir()
    lines = [
        f'[ "$SLURMD_NODENAME" = {node} ] && {{ {commands}; }}' for node, commands in faults.items()
    ]
    starter = folder / "start.sh"
    starter.write_text("\n".join(["#!/bin/bash", *lines, 'exec "$@"\n']))
    starter.chmod(0o755)
    command = (
        *srun,
        str(starter),
        SRUNDDP,
        "check",
        f"--output-dir={folder}",
        f"--timeout={timeout}",
        *words,
    )
    done = runner.srun(*command, ifaces=ifaces)
    # One, or more where the run was repeated.
    reports = sorted(folder.glob("preflight.[0-9]*.json"))
    if reports:
        findings = json.loads(reports[-1].read_text())["findings"]
    else:
        findings = []
    return Checked(done.code, done.output, done.errors, findings, folder)


def hidden(path: Path) -> str:
    """Commands after which the node does not see what is in a folder, for this process and those it
    starts.
    """
    return _below_mount(f"mount -t tmpfs tmpfs {shlex.quote(str(path))}")


def full_tmp(runner: SlurmJobRunner) -> str:
    """Commands after which the node's /tmp has no room."""
    mounts = [
        shlex.join(("mount", *mount)) for mount in over_tmp(runner.cluster.folder, "-o", "size=1M")
    ]
    return _below_mount(" && ".join((*mounts, "head -c 2M /dev/zero >/tmp/full 2>/dev/null")))


def _below_mount(commands: str) -> str:
    # exec: srun has to have started srunddp itself.
    return f'exec unshare --mount sh -c \'{commands}; exec "$0" "$@"\' "$@"'


def with_clock_off() -> str:
    return f"export PYTHONPATH={PROGRAMS / 'clock'}"


def with_other_torch() -> str:
    return f"export PYTHONPATH={PROGRAMS / 'other_torch'}"


def with_gpus(folder: Path, *uuids: str) -> str:
    """Commands after which the node has these GPUs, by a simulated NVML."""
    gpus = folder / f"gpus-{'-'.join(uuids)}.json"
    known = {"driver": "580.95.05", "cuda": 13000, "gpus": [{"uuid": uuid} for uuid in uuids]}
    gpus.write_text(json.dumps(known))
    return f"export PYTHONPATH={PROGRAMS / 'nvml'} FAKE_NVML={gpus}"


@contextmanager
def mtu(node: Node, size: int) -> Iterator[None]:
    """The node's data interface has another MTU."""
    words = ("ip", "-n", node.namespace, "link", "set", node.data_interface, "mtu")
    tool(*words, str(size))
    try:
        yield
    finally:
        tool(*words, "1500")


@contextmanager
def slowed(node: Node, rate: str, interface: str = "") -> Iterator[None]:
    """What the node sends over an interface, by default the data network's, is held back to a rate,
    such as ``50mbit``.
    """
    device = interface or node.data_interface
    words = ("tc", "-n", node.namespace, "qdisc")
    tool(
        *words,
        "add",
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        "64kb",
        "latency",
        "50ms",
    )
    try:
        yield
    finally:
        tool(*words, "del", "dev", device, "root")


@contextmanager
def own_name_on_loopback(node: Node) -> Iterator[None]:
    """The node's own name leads to 127.0.1.1 on it, as some installers write it."""
    hosts = etc_file(node, "hosts")
    before = hosts.read_text()
    hosts.write_text(
        f"127.0.1.1 {node.name}\n" + before.replace(f"{node.management} {node.name}\n", "")
    )
    try:
        yield
    finally:
        hosts.write_text(before)


@contextmanager
def one_way_dropped(sender: Node, receiver: Node) -> Iterator[None]:
    """What one node sends to another over the data network is lost."""
    rule = f"ip saddr {sender.data} ip daddr {receiver.data} drop"
    table = (
        "table inet planted {\nchain input {\ntype filter hook input priority"
        f" -10;\n{rule}\n}}\n}}\n"
    )
    nft = ("ip", "netns", "exec", receiver.namespace, "nft")
    tool(*nft, "-f", "-", text=table)
    try:
        yield
    finally:
        tool(*nft, "delete", "table", "inet", "planted")
