"""The check of ifaces.conf asks the real Slurm for its nodes."""

from __future__ import annotations

import json
import sys

import pytest

from tests.cluster.nodes import NODES
from tests.conftest import ROOT
from tests.slurm.conftest import SlurmJobRunner

pytestmark = pytest.mark.slurm

CHECK = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from srunddp.ifaces.lint import check_file
report = check_file(sys.argv[1], os.environ)
found = [(finding.found, finding.nodes) for finding in report.findings]
print(json.dumps([report.summary, report.notes, found]))
"""


@pytest.mark.gate
def test_the_nodes_of_the_cluster_are_known_on_its_login_node(runner: SlurmJobRunner) -> None:
    short = runner.write_ifaces(
        "short.conf", f"- nodes: {NODES[0].name},nosuch\n  interface: auto\n"
    )
    answers = [
        runner.cluster.run(sys.executable, "-c", CHECK, str(path)).stdout
        for path in (runner.ifaces, short)
    ]
    every = [node.name for node in NODES]
    for summary, notes, _ in map(json.loads, answers):
        assert (summary.endswith(f", {len(every)} nodes in the cluster"), notes) == (True, [])
    assert [found for _, _, found in map(json.loads, answers)] == [
        [],
        [
            [f"{short}:1:3: names that are not nodes of the cluster", ["nosuch"]],
            [f"{short} has no entry", every[1:]],
        ],
    ]
