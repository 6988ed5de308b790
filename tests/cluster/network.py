"""Namespaces, cables and firewalls: the network of the cluster, without Slurm."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import nodes
from .nodes import LOGIN, MACHINES, NODES, SWITCH, Machine, Node

SLURMD_PORT = 6818
# Above the kernel's ephemeral ports (up to 60999): a listener on a port of the kernel's choice must
# never fall into the range that the management firewall lets through.
SRUN_PORTS = "61001-65000"

Mount = tuple[str, ...]
"""The arguments of a mount command."""

_ETC_NETNS = Path("/etc/netns")
_NAMESPACES = Path("/run/netns")
# The interfaces below /sys are those of the namespace that mounts it. `ip netns exec` would mount
# it as well, and hide the control groups, by which Slurm tracks and limits steps: they are put
# aside, and back.
_OWN_SYS: tuple[Mount, ...] = (
    ("--rbind", "/sys/fs/cgroup", "/mnt"),
    ("-t", "sysfs", "sysfs", "/sys"),
    ("--move", "/mnt", "/sys/fs/cgroup"),
)
_END_SECONDS = 120.0  # only what is broken takes so long


def tool_environment() -> dict[str, str]:
    """The environment for the cluster's own tools, which distributions keep in sbin."""
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin",
        "LC_ALL": "C.UTF-8",
    }


def tool(*argv: str, text: str | None = None) -> str:
    """Runs one of the system's tools with `text` as its input and returns what it prints."""
    done = subprocess.run(
        argv, input=text or "", text=True, capture_output=True, env=tool_environment(), check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def etc_file(owner: Machine, name: str) -> Path:
    """What `owner` sees as /etc/`name`, such as hosts and resolv.conf.

    Overwrite it in place: it is bind-mounted, so a file moved over it would stay invisible to the
    daemons.
    """
    return _ETC_NETNS / owner.namespace / name


def command(
    owner: Machine, *argv: str, mounts: Sequence[Mount] = (), first: Sequence[str] = ()
) -> list[str]:
    """`argv` as a command line that starts in new namespaces of `owner`, as the same process.

    `first` are shell commands for before that.
    """
    mounting = [shlex.join(("mount", *mount)) for mount in (*_own_files(owner), *_OWN_SYS, *mounts)]
    steps = ['hostname "$0"', *mounting, *first, 'exec "$@"']
    script = " && ".join(steps)
    unshare = ["unshare", "--uts", "--mount", "sh", "-c", script, owner.name]
    return ["nsenter", f"--net={_NAMESPACES / owner.namespace}", *unshare, *argv]


def _own_files(owner: Machine) -> list[Mount]:
    return [
        ("--bind", str(etc_file(owner, name)), f"/etc/{name}") for name in ("hosts", "resolv.conf")
    ]


def build(*, open_management: bool) -> None:
    """Creates all namespaces with their cables, addresses and firewalls."""
    for namespace in (SWITCH, *(m.namespace for m in MACHINES)):
        tool("ip", "netns", "add", namespace)
    for owner in MACHINES:
        _write_etc(owner)
    tool("ip", "-batch", "-", text="\n".join(line for m in MACHINES for line in _cables(m)))
    _configure(SWITCH, _switch_lines())
    for owner in MACHINES:
        _configure(owner.namespace, _machine_lines(owner))
    for owner in () if open_management else NODES:
        tool("ip", "netns", "exec", owner.namespace, "nft", "-f", "-", text=_firewall())


def demolish() -> None:
    """Ends every process in the cluster's namespaces and removes these, also those of a killed
    run.
    """
    ours = _existing()
    end_processes(ours)
    for namespace in ours:
        tool("ip", "netns", "del", namespace)
    if _ETC_NETNS.is_dir():
        for folder in _ETC_NETNS.glob(nodes.PREFIX + "*"):
            shutil.rmtree(folder)
        if not any(_ETC_NETNS.iterdir()):
            _ETC_NETNS.rmdir()


def _existing() -> list[str]:
    names = (line.split()[0] for line in tool("ip", "netns", "list").splitlines() if line.strip())
    return [name for name in names if name.startswith(nodes.PREFIX)]


def set_links(owner: Node, state: str) -> None:
    """Takes a node's cables off, `down`, or plugs them in again, `up`."""
    for interface in (nodes.MANAGEMENT_INTERFACE, owner.data_interface):
        tool("ip", "-n", owner.namespace, "link", "set", interface, state)


def end_processes(namespaces: Sequence[str]) -> None:
    """Kills until nothing is left, since a process may fork between the listing and the signal.

    The namespaces know their processes even where pid files are stale or were never written.
    """
    deadline = time.monotonic() + _END_SECONDS
    while pids := [pid for namespace in namespaces for pid in _pids(namespace)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes that do not end: {pids}")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _pids(namespace: str) -> list[int]:
    return [
        int(pid)
        for pid in tool("ip", "netns", "pids", namespace).split()
        if int(pid) != os.getpid()
    ]


def _write_etc(owner: Machine) -> None:
    hosts = etc_file(owner, "hosts")
    hosts.parent.mkdir(parents=True, exist_ok=True)
    hosts.write_text("\n".join(_host_lines()) + "\n")
    # Nothing listens there, so a name that is not in the hosts file fails at once instead of after
    # a timeout.
    etc_file(owner, "resolv.conf").write_text("nameserver 127.0.0.1\n")


def _host_lines() -> Iterable[str]:
    yield "127.0.0.1 localhost"
    yield "::1 localhost ip6-localhost ip6-loopback"
    for owner in MACHINES:
        yield f"{owner.management} {owner.name}"
    for node in NODES:
        yield f"{node.data} {node.data_name}"
        yield f"{node.six} {node.six_name}"


def _cable_names(owner: Machine) -> dict[str, tuple[str, str]]:
    """Per interface of `owner`: the bridge that its cable leads to ("" for none) and the other
    end's name.
    """
    number = owner.number
    plugs = {nodes.MANAGEMENT_INTERFACE: ("br-mgmt", f"m{number}")}
    if isinstance(owner, Node):
        plugs[owner.data_interface] = ("br-data", f"d{number}")
        plugs[nodes.SIX_INTERFACE] = ("br-six", f"s{number}")
        plugs[nodes.DOWN_INTERFACE] = ("", f"x{number}")
        plugs[nodes.BARE_INTERFACE] = ("", f"b{number}")
    return plugs


def _cables(owner: Machine) -> Iterable[str]:
    for interface, (_, plug) in _cable_names(owner).items():
        yield (
            f"link add {plug} netns {SWITCH} type veth peer name {interface} netns"
            f" {owner.namespace}"
        )


def _configure(namespace: str, lines: Iterable[str]) -> None:
    tool("ip", "-n", namespace, "-batch", "-", text="\n".join(lines))


def _switch_lines() -> Iterable[str]:
    for bridge in ("br-mgmt", "br-data", "br-six"):
        yield f"link add {bridge} type bridge"
        yield f"link set {bridge} up"
    for owner in MACHINES:
        for bridge, plug in _cable_names(owner).values():
            yield f"link set {plug} master {bridge} up" if bridge else f"link set {plug} up"


def _machine_lines(owner: Machine) -> Iterable[str]:
    yield "link set lo up"
    yield f"addr add {owner.management}/24 dev {nodes.MANAGEMENT_INTERFACE}"
    yield f"link set {nodes.MANAGEMENT_INTERFACE} up"
    if isinstance(owner, Node):
        yield f"addr add {owner.data}/24 dev {owner.data_interface}"
        yield f"link set {owner.data_interface} up"
        # Without nodad the address is tentative for a second or more, and nothing can bind to it.
        yield f"addr add {owner.six}/64 dev {nodes.SIX_INTERFACE} nodad"
        yield f"link set {nodes.SIX_INTERFACE} up"
        # An interface that comes up gives itself a link-local address unless told otherwise.
        yield f"link set {nodes.BARE_INTERFACE} addrgenmode none"
        yield f"link set {nodes.BARE_INTERFACE} up"
        yield f"link add {nodes.BRIDGE_INTERFACE} type bridge"
        yield f"addr add {nodes.BRIDGE_ADDRESS}/16 dev {nodes.BRIDGE_INTERFACE}"
        yield f"link set {nodes.BRIDGE_INTERFACE} up"


def _firewall() -> str:
    """Lets Slurm pass over the management network and nothing else, as sites with a data network
    do.
    """
    interface = f'iifname "{nodes.MANAGEMENT_INTERFACE}"'
    rules = (
        f"{interface} ct state established,related accept",
        f"{interface} tcp dport {{ {SLURMD_PORT}, {SRUN_PORTS} }} accept",
        f"{interface} ip saddr {LOGIN.management} accept",
        f"{interface} icmp type echo-request accept",
        f"{interface} drop",
    )
    body = "\n".join(("type filter hook input priority 0;", *rules))
    return f"table inet cluster {{\nchain input {{\n{body}\n}}\n}}\n"
