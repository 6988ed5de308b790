"""Finds out whether this machine has what the cluster needs."""

import os
import shutil
import sys
from pathlib import Path

from .network import tool, tool_environment

_COMMANDS = (
    "ip",
    "nft",
    "ss",
    "nsenter",
    "unshare",
    "ldconfig",
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
)


_ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults")


def cgroup_version() -> int:
    """Return the version of this machine's control groups: 2 if the machine has only version 2,
    else 1.
    """
    return 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1


def requirements(*, accounting: bool = False) -> str | None:
    """Return why this machine cannot run the cluster, in one line; None if it can."""
    if not sys.platform.startswith("linux"):
        return "the cluster needs Linux"
    if os.geteuid() != 0:
        return "the cluster needs root"
    path = tool_environment()["PATH"]
    if missing := [name for name in _COMMANDS if shutil.which(name, path=path) is None]:
        return f"not in PATH: {', '.join(missing)} (Debian: slurm-wlm munge iproute2 nftables)"
    if accounting and (
        missing := [name for name in _ACCOUNTING if shutil.which(name, path=path) is None]
    ):
        return (
            f"not in PATH: {', '.join(missing)} (Debian: slurmdbd mariadb-server-core"
            " mariadb-client-core)"
        )
    if cgroup_version() == 1 and (
        missing := [
            kind for kind in ("freezer", "memory") if not Path("/sys/fs/cgroup", kind).is_dir()
        ]
    ):
        return f"no control groups of the kinds {', '.join(missing)}"
    try:
        tool("unshare", "--net", "--uts", "--mount", "true")
    except RuntimeError as error:
        return f"namespaces are not allowed here: {error}"
    return None
