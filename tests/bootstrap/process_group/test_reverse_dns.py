"""A name server that does not answer is not asked, and so delays nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, ROOT, missing, tool
from tests.support.starting import LONG, bare, write

FILES = {
    # Short limits: the stock store waits for them.
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
    # Some machines have services that would answer in the name server's place.
    "nsswitch.conf": "hosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n",
}


@pytest.fixture
def behind_a_mute_name_server(tmp_path: Path) -> list[str]:
    """How a command line begins that runs in a network of its own, with these files in /etc."""
    apart = [tool("unshare"), "--net", "--mount"]
    if os.geteuid() != 0 or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        missing("namespaces need root")
    mounts = [f"mount --bind '{write(tmp_path / name, text)}' /etc/{name}" for name, text in FILES.items()]
    return [*apart, "sh", "-ec", "\n".join((f"{tool('ip')} link set lo up", *mounts, 'exec "$@"')), "sh"]


def test_the_store_is_joined_without_a_query_to_the_name_server(behind_a_mute_name_server: list[str]) -> None:
    command = [*behind_a_mute_name_server, sys.executable, str(PROGRAMS / "name_lookups.py")]
    variables = bare({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)
    assert (sent["server"], sent["quiet"]) == (0, 0), done.stderr
    # Torch alone does ask: the name server is there, and is counted right.
    assert sent["stock"] >= 1, done.stderr
