"""Ranks that do not come: whether their nodes answer the nodes that came, and how all that is said."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

LOOK_WITHIN = 2.0
SAY_EVERY = 30.0
_MOST_NODES = 8


def named(ranks: Iterable[int], layout: Mapping[int, str]) -> str:
    """``ranks 4-5 on node03`` for ranks 4 and 5, folded; without nodes where the layout is not known."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
    from ClusterShell.RangeSet import RangeSet

    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(layout.get(rank, ""), []).append(rank)
    parts = []
    for node, theirs in by_node.items():
        where = f" on {NodeSet(node, resolver=RESOLVER_NOGROUP)}" if node else ""
        parts.append(f"rank{'s' if len(theirs) > 1 else ''} {RangeSet.fromlist(map(str, theirs))}{where}")
    return ", ".join(parts)


def nodes_to_look_at(missing: Iterable[int], layout: Mapping[int, str], present: Iterable[str]) -> list[str]:
    """The first few nodes from which no rank has come."""
    nodes = dict.fromkeys(layout[rank] for rank in missing if rank in layout)
    return [node for node in nodes if node not in set(present)][:_MOST_NODES]


def look(nodes: Mapping[str, tuple[str, int]], source: str, within: float = LOOK_WITHIN) -> dict[str, str]:
    """Try a TCP connection to each node; one that is refused shows that the node answers.

    Args:
        nodes: for each its name or address on the data network, and a port.
        source: this rank's own address, to bind.
        within: seconds for all of them together.

    Returns:
        For each node why it does not answer; empty where it does.
    """
    found = dict.fromkeys(nodes, "no answer")

    def one(node: str, address: tuple[str, int]) -> None:
        found[node] = _try(address, source, within)

    # Threads, for a look-up of a name has no limit of its own.
    threads = [threading.Thread(target=one, args=item, daemon=True) for item in nodes.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _try(address: tuple[str, int], source: str, within: float) -> str:
    try:
        socket.create_connection(address, timeout=within, source_address=(source, 0)).close()
    except ConnectionRefusedError:
        return ""
    except TimeoutError:
        return "no answer"
    except (socket.gaierror, UnicodeError):
        return "unknown name"
    except (OSError, OverflowError) as error:
        return os.strerror(getattr(error, "errno", None) or 0).lower()
    return ""


def asked(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A rank's answer to rank 0's ``look``."""
    try:
        nodes = {str(node): (str(host), int(port)) for node, (host, port) in dict(message["look"]).items()}
    except (TypeError, ValueError):
        nodes = {}
    return {"looked": look(dict(list(nodes.items())[:_MOST_NODES]), source)}


def seen(found: Mapping[str, Mapping[str, str]]) -> str:
    """What to do, from what the present nodes saw.

    Args:
        found: for each node that is missing, and each that looked at it, why it does not answer; empty where it does.
    """
    return "; ".join(_seen(node, by) for node, by in found.items() if by)


def _seen(node: str, by: Mapping[str, str]) -> str:
    answered = [name for name, reason in sorted(by.items()) if not reason]
    silent = ", ".join(f"{name} ({reason})" for name, reason in sorted(by.items()) if reason)
    if not silent:
        return f"{node} answers {_and(answered)}: see whether srunddp started there"
    if not answered:
        return f"{node} does not answer {silent}: the node or its interface is down"
    return f"{node} answers {_and(answered)}, but not {silent}: see the network between them"


def _and(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


@contextlib.contextmanager
def saying(say: Callable[[str], None], line: str, every: float) -> Iterator[None]:
    """Say the line again and again while something blocks; ``{}`` in it is the time so far in seconds."""
    over, began = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not over.wait(every):
            say(line.format(f"{time.monotonic() - began:.0f}"))

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
