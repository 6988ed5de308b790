"""A node that was cut off keeps its tasks until this step's srun can hear of their end."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

import pytest

from srunddp.spare_nodes.srun import await_srun


@dataclass
class Srun:
    """An srun that can be reached after some tries.

    Attributes:
        unreachable: how many tries get no answer.
        then: what the next one gets, None for a connection.
        tried: where it was looked for.
        waits: seconds between two tries.
    """

    unreachable: int = 0
    then: OSError | None = None
    tried: list[tuple[str, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def connect(self, address: tuple[str, int], _: float) -> socket.socket:
        self.tried.append(address)
        if len(self.tried) <= self.unreachable:
            raise TimeoutError
        if self.then:
            raise self.then
        return socket.socket()


@pytest.fixture
def srun(monkeypatch: pytest.MonkeyPatch) -> Srun:
    """One that can be reached at once."""
    made = Srun()
    monkeypatch.setenv("SLURM_SRUN_COMM_HOST", "10.0.0.1")
    monkeypatch.setenv("SLURM_SRUN_COMM_PORT", "40123")
    monkeypatch.setattr(socket, "create_connection", made.connect)
    monkeypatch.setattr(time, "sleep", made.waits.append)
    return made


@pytest.mark.parametrize(
    "then", [None, ConnectionRefusedError()], ids=["it answers", "it has ended"]
)
def test_it_is_tried_until_it_can_be_reached(srun: Srun, then: OSError | None) -> None:
    srun.unreachable = 3
    srun.then = then
    await_srun()
    assert srun.tried == [("10.0.0.1", 40123)] * 4
    assert len(srun.waits) == 3
    assert min(srun.waits) > 0


def test_without_an_srun_nothing_is_awaited(srun: Srun, monkeypatch: pytest.MonkeyPatch) -> None:
    srun.unreachable = 1
    monkeypatch.delenv("SLURM_SRUN_COMM_PORT")
    await_srun()
    assert (srun.tried, srun.waits) == ([], [])


def test_an_srun_that_never_answers_is_given_up(
    srun: Srun, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun.unreachable = 1_000_000
    began = time.monotonic()

    def monotonic() -> float:
        return began + 600 * len(srun.waits)

    monkeypatch.setattr(time, "monotonic", monotonic)
    await_srun()
    assert 1 < len(srun.waits) < 100
