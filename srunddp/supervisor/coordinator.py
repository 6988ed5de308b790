"""Rank 0's guard: it hears from all ranks, judges who failed first, and ends the run with one verdict.

The order of failures is that of their arrival here, not of clocks on different nodes. Those that are likely the
echo of another wait a moment for it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.down_nodes import DownNodes
from srunddp.supervisor.failure import Failure, FailureKind, by_launcher
from srunddp.supervisor.participant import RankContext
from srunddp.supervisor.root_cause import LOST, RootCause, find_root_cause, report, write
from srunddp.supervisor.stall import StallDetector, may_be_of_a_hang

_ECHO_WAITS = 0.7
_ASKED_WAITS = 300.0  # who handles the launcher's signal may be saving a checkpoint
_SLURM_IS_ASKED_AFTER = 10.0  # seconds without a sign of a node
_LAST_WORD = 1.2  # one message that was lost on the way can be sent again
_WITNESS_PORT = 9  # nobody listens there, and its refusal is the answer


class State(Enum):
    """Where a rank is in its life."""

    WORKING = "working"
    DONE = "done"  # its script is over, and its goodbye said
    LEFT = "left"
    FAILED = "failed"


@dataclass
class _Rank:
    """What rank 0 knows of another rank."""

    wire: SupervisorConnection
    state: State = State.WORKING
    heard: float = 0.0


class Coordinator:
    """The guard of rank 0.

    Attributes:
        verdict: once there is one, all leave with its code; released: the worker may end; finished: and so may we.
    """

    def __init__(self, post: RankContext, lines: Mapping[int, socket.socket]) -> None:
        self.verdict: RootCause | None = None
        self._post = post
        self._ranks = {rank: _Rank(SupervisorConnection(line, post.lost_after)) for rank, line in lines.items()}
        self._by_line = {line: rank for rank, line in lines.items()}
        self._own = State.WORKING
        self._is_late = False
        self._ended: set[int] = set()  # the ranks whose worker has, after the verdict, or whose supervisor has
        self._over_at: float | None = None
        self._tellers: set[int] = set()  # the ranks that have told of their own failure
        self._failures: list[Failure] = []
        self._left_before: dict[int, str] = {}
        self._judge_at: float | None = None
        self._pinged = 0.0
        self._down = DownNodes()
        self._deputies: dict[int, dict[str, Any]] = {}
        self._stall, self._hang = StallDetector(post.stall_timeout), StallDetector(0.0)
        self._order = sorted(lines)
        self._deputy = self._away = self._third = 0  # places in it of the next deputies and their witness
        self._appointed = False
        self._working = self._open = len(lines)

    @property
    def released(self) -> bool:
        """Rank 0's worker hosts the store, and leaves when the others have said goodbye."""
        return self._own is not State.WORKING and not self._working

    @property
    def finished(self) -> bool:
        """Rank 0's supervisor leaves last."""
        return ((self._own is State.LEFT or self.verdict is not None) and not self._open) or self._is_late

    def lines(self) -> Iterable[socket.socket]:
        """What to watch for :meth:`on_line`."""
        return self._by_line.keys()

    def on_line(self, line: socket.socket, now: float) -> bool:
        """Read what a rank says; False when its line has ended."""
        number = self._by_line[line]
        rank = self._ranks[number]
        rank.heard = now
        for message in rank.wire.read():
            self._hear(number, message, now)
        if not rank.wire.open:
            self._open -= 1
            self._ended.add(number)
            self._on_end(number, now)
        return rank.wire.open

    def _hear(self, number: int, message: Mapping[str, Any], now: float) -> None:
        rank = self._ranks[number]
        if "goodbye" in message:
            self._turn(number, State.DONE)
        elif "left" in message:
            self._turn(number, State.LEFT)
        elif "failure" in message:
            try:
                failure = Failure.parse(message["failure"])
            except (TypeError, ValueError):
                failure = Failure(number, "", "it has failed, and its message cannot be read", 1)
            self._tellers.add(number)
            self._fail_of(number, replace(failure, rank=number, node=self._post.nodes[number]), now)
        elif isinstance(message.get("ping"), int) and rank.state is State.WORKING:
            self._stall.note(number, message["ping"], now)
        elif "ended" in message:
            self._ended.add(number)
        elif isinstance(message.get("stacks"), str):
            self._stall.hear(number, message["stacks"])
            self._hang.hear(number, message["stacks"])

    def _turn(self, number: int, state: State) -> None:
        rank = self._ranks[number]
        self._working -= rank.state is State.WORKING
        if rank.state is not State.FAILED:
            rank.state = state
        self._stall.forget(number)
        self._appointed = False

    def _fail_of(self, number: int, failure: Failure, now: float) -> None:
        self._turn(number, State.FAILED)
        self.fail(failure, now)

    def _on_end(self, number: int, now: float) -> None:
        rank = self._ranks[number]
        if rank.state is State.DONE and rank.wire.reset:
            # Its last word crossed one of ours on the way, upon which its kernel took it back.
            self._turn(number, State.LEFT)
        if self.verdict or rank.state in (State.LEFT, State.FAILED):
            return
        if rank.wire.lost:
            self._end_with(self._lost(number, now))
            return
        killed = Failure(number, self._post.nodes[number], "srunddp itself was killed", 137)
        if asked := self._post.asked(now):  # as we have been, and so is whoever handles that signal for too long
            killed = replace(killed, cause=by_launcher(asked), exit_code=128 + asked, weight=FailureKind.ASKED)
        self._fail_of(number, killed, now)

    def _lost(self, number: int, now: float) -> RootCause:
        """The node of a rank that does not answer; where none does, or our own link is down, it is our own."""
        away = {other for other in self._ranks if self._post.nodes[other] != self._post.node}
        silent = self._unheard(now, self._post.lost_after / 2)
        silent |= {other for other, rank in self._ranks.items() if rank.wire.lost}
        ours = silent >= away and len({self._post.nodes[other] for other in away}) > 1
        node = self._post.node if ours or not self._post.link_is_up() else self._post.nodes[number]
        return self._lost_node(node, f"no answer for {self._post.lost_after:g} s")

    def _lost_node(self, node: str, cause: str) -> RootCause:
        ranks = tuple(number for number, where in self._others().items() if where == node)
        return RootCause(ranks, node, cause, LOST, how="lost")

    def _unheard(self, now: float, seconds: float) -> set[int]:
        """The ranks whose line is open, but of which nothing has come for so long."""
        ranks = self._ranks.items()
        return {number for number, rank in ranks if rank.wire.open and now - (rank.heard or now) > seconds}

    def fail(self, failure: Failure, now: float) -> None:
        """A rank has failed, this one or another."""
        if failure.rank == self._post.rank:
            self._own = State.FAILED
            self._tellers.add(failure.rank)
            self._stall.forget(failure.rank)
        if not self._failures:
            self._left_before = {number: self._post.nodes[number] for number in self._through()}
        self._failures.append(failure)
        if failure.weight is FailureKind.PRIMARY:
            self._judge()
        elif any(each.weight >= FailureKind.STOPPED for each in self._failures):
            self._judge_at = now + _ASKED_WAITS
        elif self._judge_at is None:
            self._judge_at = now + _ECHO_WAITS

    def _through(self) -> list[int]:
        states = {self._post.rank: self._own} | {number: rank.state for number, rank in self._ranks.items()}
        return [number for number, state in states.items() if state in (State.DONE, State.LEFT)]

    def _judge(self) -> None:
        if not self.verdict:
            self._end_with(find_root_cause(self._failures, self._left_before))

    def _end_with(self, verdict: RootCause) -> None:
        self.verdict = verdict
        # Said before the others are told: a launcher kills all at the first bad end.
        report(verdict, self._others())
        for rank in self._ranks.values():
            rank.wire.send({"verdict": {"ranks": verdict.ranks, "exit_code": verdict.exit_code}})
        write(verdict, self._others(), self._post.folder)

    def _see_off(self, now: float) -> float:
        """After the verdict: end all lines when the scripts that are to end by themselves have done so."""
        assert self.verdict
        culprits = {each.rank for each in self._failures if each.weight >= FailureKind.STOPPED} | {*self.verdict.ranks}
        if self._over_at is None and culprits & self._tellers <= self._ended:
            self._over_at = now
            for rank in self._ranks.values():
                rank.wire.end()
        # The others close first: what is lost on the way to them can be sent again only while our end is there.
        self._is_late = self._over_at is not None and now >= self._over_at + _LAST_WORD
        return _LAST_WORD

    def _others(self) -> dict[int, str]:
        gone = [number for number, rank in self._ranks.items() if rank.state is State.LEFT]
        return {number: node for number, node in sorted(self._post.nodes.items()) if number not in gone}

    def done(self) -> None:
        """The script is over, without an error."""
        self._own = State.DONE
        self._stall.forget(self._post.rank)

    def left(self) -> None:
        """The worker has ended with 0."""
        self._own = State.LEFT
        self._stall.forget(self._post.rank)

    def ended(self) -> None:
        """The worker has ended after the verdict."""
        self._ended.add(self._post.rank)

    def tick(self, now: float) -> float:
        """Do what is due; returns the seconds until something is."""
        if self.verdict:
            return self._see_off(now)
        if not self._appointed:
            self._appoint()
        if now >= self._pinged + self._post.ping_every:
            self._pinged = now
            self._ping(now)
        if self.verdict:
            return 0.0
        if self._failures and (now >= (self._judge_at or 0.0) or not self._are_working()):
            self._judge_late(now)
        elif not self._failures:
            self._watch_steps(now)
        due = [self._pinged + self._post.ping_every, self._hang.due or self._judge_at]
        due += [] if self._failures else [self._stall.due]
        return max(0.0, min(each for each in due if each is not None) - now) if not self.verdict else 0.0

    def _are_working(self) -> bool:
        states = [self._own, *(rank.state for rank in self._ranks.values())]
        return any(state in (State.WORKING, State.DONE) for state in states)

    def _ping(self, now: float) -> None:
        if self._own is State.WORKING:
            self._stall.note(self._post.rank, self._post.step(), now)
        for number, rank in self._ranks.items():
            if not rank.wire.open:
                continue
            if rank.state is State.WORKING:
                rank.wire.send({"ping": True})
            rank.heard = rank.heard or now  # nothing is expected before the first ping
            if now - rank.heard > self._post.silent_after and rank.state is not State.FAILED:
                self._fail_of(number, Failure(number, self._post.nodes[number], self._post.starved, LOST), now)
        self._ask_slurm(now)

    def _ask_slurm(self, now: float) -> None:
        silent = {self._post.nodes[number] for number in self._unheard(now, _SLURM_IS_ASKED_AFTER)}
        if down := silent & self._down.names:
            self._end_with(self._lost_node(min(down), "Slurm says that the node is down"))
        elif silent:
            self._down.ask(silent)

    def _watch_steps(self, now: float) -> None:
        if self._stall.is_new(now):
            self._ask_where(self._stall, now)
        if self._stall.is_told(now):
            through = {number: self._post.nodes[number] for number in self._through()}
            self._end_with(self._stall.verdict(self._post.nodes, through))

    def _ask_where(self, stall: StallDetector, now: float) -> None:
        working = [number for number, rank in self._ranks.items() if rank.state is State.WORKING]
        for number in working:
            self._ranks[number].wire.send({"stacks": True})
        stall.gather([self._post.rank, *working] if self._own is State.WORKING else working, now)
        if self._own is State.WORKING:
            stall.hear(self._post.rank, self._post.stacks())

    def _judge_late(self, now: float) -> None:
        """No failure is more than an echo: it may be of a rank that hangs, and has not failed."""
        if self._left_before or not may_be_of_a_hang(self._failures):
            self._judge()
        elif self._hang.due is None:
            self._ask_where(self._hang, now)
        if not self.verdict and self._hang.is_told(now):
            if found := self._hang.verdict_upon(self._failures, self._post.nodes):
                self._end_with(found)
            self._judge()

    def _appoint(self) -> None:
        """Tell the lowest ranks that work, and may have to speak for us, when they are others than before."""
        self._appointed = True
        self._deputy = self._next(self._deputy)
        self._away = self._next(max(self._away, self._deputy), self._post.node)
        deputies: dict[int, dict[str, Any]] = {}
        if self._deputy < len(self._order):
            deputies[self._order[self._deputy]] = {"here": True}
        if self._away < len(self._order):
            number = self._order[self._away]
            deputies[number] = deputies.get(number, {}) | {"elsewhere": True, "witness": self._witness(number)}
        for number, task in deputies.items():
            if self._deputies.get(number) != task:
                self._ranks[number].wire.send({"deputy": task})
        self._deputies = deputies

    def _next(self, place: int, *nodes: str) -> int:
        """From this place on the next rank that works, on none of these nodes; a rank that is through stays so."""
        while place < len(self._order):
            number = self._order[place]
            if self._ranks[number].state is State.WORKING and self._post.nodes[number] not in nodes:
                break
            place += 1
        return place

    def _witness(self, away: int) -> tuple[str, int] | None:
        """An address on a third node, by which the deputy tells whether it is its own node that is cut off."""
        self._third = self._next(max(self._third, self._away), self._post.node, self._post.nodes[away])
        if self._third == len(self._order):
            return None
        return self._ranks[self._order[self._third]].wire.line.getpeername()[0], _WITNESS_PORT
