"""What each rank does when rank 0 asks: look at itself, connect, send, receive, and add up with the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from srunddp._version import __version__
from srunddp.bootstrap.process_group.store import ProcessGroupContext
from srunddp.bootstrap.rendezvous.protocol import RendezvousInfo
from srunddp.check import allreduce, bandwidth
from srunddp.check.checks import CHECKS
from srunddp.check.connectivity import Prober
from srunddp.check.coordinator import half_open
from srunddp.check.finding import CheckContext
from srunddp.util.timeouts import call_in_daemon_thread


@dataclass
class Responder:
    """This rank.

    Attributes:
        subject: of the checks.
        backend: for the collective; store_fd: on rank 0 the store's listening socket, once there is one.
    """

    subject: CheckContext
    backend: str = "auto"
    store_fd: int | None = None
    prober: Prober = field(init=False)

    def __post_init__(self) -> None:
        self.prober = Prober(self.subject.interface.address if self.subject.interface else "")

    def act(self, question: Mapping[str, Any]) -> Any:
        """The answer to one of rank 0's questions."""
        match question.get("do"):
            case "facts":
                return facts(self.subject, question["checks"])
            case "clock":
                return time.time()
            case "listen":
                return self.prober.listen()
            case "connect":
                return self.prober.connect(question["targets"])
            case "half open":
                return half_open([self.prober.listener] if self.prober.listener else [])
            case "send":
                return bandwidth.send(self.prober.address, question["to"])
            case "receive":
                return bandwidth.receive(self.prober.listener) if self.prober.listener else 0.0
            case "collective":
                return self._collective(RendezvousInfo(**question["meeting"]), question["within"])
        return None

    def _collective(self, meeting: RendezvousInfo, within: float) -> dict[str, Any]:
        assert self.subject.interface is not None
        place = ProcessGroupContext(
            self.subject.environment, self.subject.interface, meeting, self.store_fd, within, self.backend
        )
        return allreduce.run(place, within)


def facts(subject: CheckContext, names: Sequence[str]) -> dict[str, Any]:
    """What the checks of these names collect, all at once and each within its time; where one fails, why.

    Each in a thread of its own: a file system or a driver that hangs must not hide what the others see.
    """
    asked = {
        check.name: (check, call_in_daemon_thread(partial(check.collected, subject)))
        for check in CHECKS
        if check.name in names
    }
    began = time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    for name, (check, answer) in asked.items():
        try:
            found[name] = {"facts": answer.result(max(0.0, began + check.within - time.monotonic()))}
        except TimeoutError:
            found[name] = {"failed": f"no answer within {check.within:g} s: a file system, a look-up or a driver hangs"}
        except Exception as error:  # one check that fails must not hide what the others see
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
    return {"version": __version__, "checks": found}
