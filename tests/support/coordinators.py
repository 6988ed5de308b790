"""Starts many ranks, has one of its ranks fail, and tells what it cost and how long it took."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from tests.conftest import ROOT

PROCESSES = 4


@dataclass(frozen=True)
class Seen:
    """What many ranks showed.

    Attributes:
        took: seconds from the failure until the last rank knew the verdict; informed: how many knew it.
        codes: the exit codes that they received; code: of rank 0's supervisor; errors: what it said.
        cost: CPU, as a part of one core, and memory of rank 0's supervisor while idle.
    """

    took: float
    informed: int
    codes: list[int]
    code: int
    errors: str
    cost: dict[str, float]


def fail_one_of_many(ranks: int, culprit: int, idle: float = 0.5) -> Seen:
    head = _start("head", ranks, idle)
    parts = []
    try:
        port = _read(head)["port"]
        bounds = [1 + ranks * part // PROCESSES for part in range(PROCESSES + 1)]
        parts = [_start("members", port, *pair, culprit) for pair in itertools.pairwise(bounds)]
        assert _read(head)["ready"]
        cost = _read(head)
        began = time.monotonic()
        for part in parts:
            part.stdin.write("fail\n")
            part.stdin.flush()
        answers = [_read(part) for part in parts]
        errors = head.communicate(timeout=30)[1]
    finally:
        for process in (head, *parts):
            process.kill()
            process.wait()
    took = max(answer["at"] for answer in answers) - began
    codes = sorted({code for answer in answers for code in answer["codes"]})
    return Seen(took, sum(answer["informed"] for answer in answers), codes, head.returncode, errors, cost)


def _start(*words: object) -> Any:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.support.fake_ranks", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _read(process: Any) -> dict[str, Any]:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return dict(json.loads(line))
