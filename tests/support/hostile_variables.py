"""Changes launchers' variables at random by the thousand, and tries srunddp with them. Run it as a
program, with the number of values and a seed.

It prints the result as JSON, for :mod:`tests.bootstrap.environment.test_hostile_variables`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

from srunddp.bootstrap.environment import slurm
from srunddp.bootstrap.environment.detect import CHANNELS, detect, likely_ranks
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.ifaces_entry import DEFAULT
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.rendezvous import discovery
from srunddp.errors import SrunddpError
from srunddp.util import hostlist
from tests.support import launchers
from tests.support.no_process import watch

CANARY = "canary"
SHELL = (
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f";touch {CANARY}",
    f"| touch {CANARY}",
    f"a\ntouch {CANARY}\n",
)
ODD: tuple[str, ...]
ODD = (
    "",
    " ",
    "-1",
    "0",
    "1",
    "4294967295",
    "9" * 30,
    "٣",
    "1e3",
    "0x1",
    "\x1b[2J",
    "\udcff",
    "'",
    '"',
    "\\",
    "%s",
)
ODD += (
    "{0}",
    "node[1-",
    "2(x3)",
    "999999999",
    "9(x999999)",
    "9(x60000)," * 9000,
    "../..",
    "a" * 5000,
)
SLOW = ("node[01-65536]", "[1-9]" * 9, "n[1-60000],m[1-60000]")
LETTERS = "0123456789abcnx[](),-*?.:;$`'\"\\|&<>{}!# \t\n\r\x1b\x7f\x85\u2028\udc80é"
EXPLICIT = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
EXPLICIT["LOCAL_WORLD_SIZE"] = "2"
REAL = [
    launchers.step(),
    launchers.step(3, SLURM_STEP_RESV_PORTS="12021-12022", SLURM_HET_SIZE=""),
    launchers.step(1, PMI_FD="9", PMI_RANK="1", PMI_SIZE="4"),
    launchers.step(2, SLURM_DISTRIBUTION="cyclic", SLURM_RESTART_COUNT="1", PMIX_RANK="2"),
    launchers.batch_body(),
    launchers.interactive_step(),
    launchers.pty_shell(),
    launchers.daemon_step() | launchers.open_mpi(1),
    launchers.open_mpi(0),
    launchers.hydra(1),
    EXPLICIT,
    launchers.step() | EXPLICIT,
    launchers.step(1) | {"MASTER_ADDR": "node02", "MASTER_PORT": "29500"},
]
INTERFACE = SelectedInterface("ib0", "10.0.0.7", {}, "")


@dataclass
class Campaign:
    """The state and the result of all tries.

    Attributes:
        draw: The random numbers.
        values: How many values have been changed.
        ends: How often each function has ended in which way.
        faults: What should not have happened, each with the variables that led to it.
    """

    draw: random.Random
    values: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def variables(self) -> dict[str, str]:
        """Return the variables of a launcher, of which one to four are changed or removed."""
        variables = dict(self.draw.choice(REAL))
        for name in self.draw.sample(
            sorted(variables), min(len(variables), self.draw.randrange(1, 5))
        ):
            if self.draw.random() < 0.1:
                del variables[name]
            else:
                variables[name] = self.value(variables[name])
        return variables

    def value(self, text: str) -> str:
        """Return a changed value. It may contain anything but a NUL, which no environment can
        contain.
        """
        self.values += 1
        kind = self.draw.random()
        if kind < 0.002:
            return self.draw.choice(SLOW)
        if kind < 0.2:
            return self.draw.choice(ODD)
        if kind < 0.4:
            return text + self.draw.choice(SHELL)
        for _ in range(self.draw.randrange(1, 4)):
            at = self.draw.randrange(len(text) + 1)
            text = text[:at] + self.draw.choice(LETTERS) + text[at + self.draw.randrange(3) :]
        return text

    def throw(self, what: Callable[..., None], *given: object) -> None:
        """Call a function, which must end well or with a SrunddpError of one line. Note how it has
        ended.

        Args:
            what: The function.
            given: Its arguments.
        """
        message = ""
        try:
            what(*given)
            end = f"{what.__name__} fine"
        except SrunddpError as error:
            end = f"{what.__name__} {type(error).__name__}"
            message = str(error)
        except Exception as error:
            end = f"{what.__name__} crash"
            self.faults.append(f"{error!r} of {given!r:.1000}")
        self.ends[end] += 1
        if not message.isprintable():
            self.faults.append(f"{message!r:.500} of {given!r:.1000}")

    def run(self, number: int) -> None:
        """Try the functions until this number of values has been changed."""
        while self.values < number:
            self.throw(
                detected, self.variables(), self.draw.choice((None, None, None, None, *CHANNELS))
            )
            self.throw(
                expanded,
                self.value(self.draw.choice(("node[01-03]", "a,b[1-2]", "rack[1-2]n[3,7]"))),
            )


def expanded(host_list: str) -> None:
    hostlist.expand(host_list)


def detected(variables: dict[str, str], channel: str | None) -> None:
    """Do everything that srunddp does with the variables before it opens a socket."""
    likely_ranks(variables)
    found = detect(variables, channel=channel, pid=launchers.PID)
    for way in found.discoveries:
        way.source(found, variables)
    if found.discoveries and not found.discovery.publishes:
        located(found)


def located(found: Environment) -> None:
    discovery.token(found)
    discovery.rendezvous_ports(found, DEFAULT, None)
    discovery.candidate_addresses(found, INTERFACE, (DEFAULT,), None)
    if found.step:
        found.step.layout()


def main() -> None:
    number, seed = map(int, sys.argv[1:])
    starts: list[str] = []
    campaign = Campaign(random.Random(seed))
    watch(starts.append)
    with (
        mock.patch.object(discovery, "addresses_of", return_value={"10.0.0.7"}),  # no network
        mock.patch.object(slurm, "is_interactive_shell", lambda task: task == "4000"),
    ):
        campaign.run(number)
    before = list(starts)
    os.system("true")
    result = {
        "values": campaign.values,
        "ends": campaign.ends,
        "faults": campaign.faults[:20],
        "starts": before,
    }
    hook = starts[len(before) :]
    print(json.dumps(result | {"hook": hook, "canary": os.path.exists(CANARY)}))


if __name__ == "__main__":
    main()
