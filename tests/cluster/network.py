"""Builds and removes the network of the cluster: namespaces, cables and firewalls."""

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
# The range is above the kernel's ephemeral ports (up to 60999), because the firewall of the
# management network lets it through, and must not let through ports that the kernel chooses.
SRUN_PORTS = "61001-65000"

Mount = tuple[str, ...]
"""The arguments of a mount command."""

_ETC_NETNS = Path("/etc/netns")
_NAMESPACES = Path("/run/netns")
# /sys shows the interfaces of the network namespace in which it was mounted, so each machine mounts
# it again. The new mount would hide the control groups, by which Slurm tracks and limits job steps,
# so they are moved aside before and put back after it.
_OWN_SYS: tuple[Mount, ...] = (
    ("--rbind", "/sys/fs/cgroup", "/mnt"),
    ("-t", "sysfs", "sysfs", "/sys"),
    ("--move", "/mnt", "/sys/fs/cgroup"),
)
_END_SECONDS = 120.0  # nothing takes this long unless it is broken


def tool_environment() -> dict[str, str]:
    """Return the environment variables for the cluster's tools. PATH contains the sbin folders,
    where distributions keep most of these tools.
    """
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin",
        "LC_ALL": "C.UTF-8",
    }


def tool(*argv: str, text: str | None = None) -> str:
    """Run a tool of the system with `text` as its input, and return what it prints.

    Raises:
        RuntimeError: The tool has failed.
    """
    done = subprocess.run(
        argv, input=text or "", text=True, capture_output=True, env=tool_environment(), check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def etc_file(owner: Machine, name: str) -> Path:
    """Return the path of the file that a machine sees as /etc/`name`: hosts or resolv.conf.

    To change the file, overwrite it in place. It is bind-mounted, so the machine would not see a
    file that replaces it.
    """
    return _ETC_NETNS / owner.namespace / name


def command(
    owner: Machine, *argv: str, mounts: Sequence[Mount] = (), first: Sequence[str] = ()
) -> list[str]:
    """Return a command line that enters a machine's network in new namespaces, and then becomes
    `argv`.

    Args:
        owner: The machine.
        argv: The command.
        mounts: What to mount before the command starts.
        first: Shell commands to run after the mounts and before the command.
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
    """Create all namespaces with their cables, addresses and firewalls.

    Args:
        open_management: Whether the nodes have no firewall in the management network.
    """
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
    """End every process in the cluster's namespaces, and remove the namespaces and their files,
    even if they are left over from a run that was killed.
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
    """Unplug a node's cables to the management and data networks if `state` is `down`; plug them in
    again if it is `up`.
    """
    for interface in (nodes.MANAGEMENT_INTERFACE, owner.data_interface):
        tool("ip", "-n", owner.namespace, "link", "set", interface, state)


def end_processes(namespaces: Sequence[str]) -> None:
    """Kill all processes in some namespaces, again and again until none is left, because a process
    may fork after the processes were listed.

    The processes are found by their namespace, because pid files may be out of date or missing.

    Raises:
        RuntimeError: Processes do not end.
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
    # No DNS server listens at this address, so the look-up of a name that is not in the hosts file
    # fails at once instead of after a timeout.
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
    """Return for each interface of a machine the bridge to which its cable leads, empty for none,
    and the name of the cable's other end.
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
        # Without nodad, no process could bind to the address for a second or more, while the kernel
        # looks for duplicates of the address.
        yield f"addr add {owner.six}/64 dev {nodes.SIX_INTERFACE} nodad"
        yield f"link set {nodes.SIX_INTERFACE} up"
        # This interface must have no address. Without `addrgenmode none` it would get a link-local
        # address when it comes up.
        yield f"link set {nodes.BARE_INTERFACE} addrgenmode none"
        yield f"link set {nodes.BARE_INTERFACE} up"
        yield f"link add {nodes.BRIDGE_INTERFACE} type bridge"
        yield f"addr add {nodes.BRIDGE_ADDRESS}/16 dev {nodes.BRIDGE_INTERFACE}"
        yield f"link set {nodes.BRIDGE_INTERFACE} up"


def _firewall() -> str:
    """Return rules of nftables that let only Slurm's traffic pass over the management network, as
    on sites that have a separate data network.
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
