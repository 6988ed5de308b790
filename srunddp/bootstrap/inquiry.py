"""Rank 0 asks the nodes that came what they see of those that did not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping

from srunddp.bootstrap import absent
from srunddp.bootstrap.door import Door
from srunddp.bootstrap.line import Hello, send

_ANSWERS_WITHIN = absent.LOOK_WITHIN + 1.0
_MOST_ASKED = 8

Nodes = Mapping[str, tuple[str, int]]


def inquire(door: Door, nodes: Nodes, own: Hello, present: Mapping[str, socket.socket]) -> dict[str, dict[str, str]]:
    """Have the first few present nodes, and this one, look at the missing ones.

    Args:
        door: where the answers come in.
        nodes: for each missing node its name on the data network, and a port on which nobody need listen.
        own: rank 0's hello; present: one line to each other node.

    Returns:
        For each missing node, and each that looked at it, why it does not answer; empty where it does.
    """
    found: dict[str, dict[str, str]] = {node: {} for node in nodes}
    looking = threading.Thread(target=_look, args=(nodes, own, found), daemon=True)
    looking.start()
    asked = dict(sorted(present.items())[:_MOST_ASKED])
    for line in asked.values():
        send(line, {"look": nodes})
    waiting, deadline = set(asked), time.monotonic() + _ANSWERS_WITHIN
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for hello, _, message in door.events(remaining):
            answers = message.get("looked", {}) if message else {}
            if message is None or answers:
                waiting.discard(hello.node)
            _note(found, hello.node, answers)
    looking.join(max(0.0, deadline - time.monotonic()))
    return found


def _look(nodes: Nodes, own: Hello, found: dict[str, dict[str, str]]) -> None:
    _note(found, own.node, absent.look(nodes, own.address))


def _note(found: dict[str, dict[str, str]], by: str, answers: object) -> None:
    for node, seen in found.items():
        if isinstance(answers, dict) and isinstance(answers.get(node), str):
            seen[by] = answers[node]
