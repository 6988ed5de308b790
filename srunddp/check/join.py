"""How the ranks of a check come together: rank 0 becomes the coordinator, the others find it by whichever way works."""

import itertools
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.network.ifaces_conf import DEFAULT, entry_for
from srunddp.bootstrap.network.interface import list_interfaces, why_unusable
from srunddp.bootstrap.rendezvous import auth, client, discovery, protocol
from srunddp.bootstrap.rendezvous.protocol import Address, Hello, listen, listen_where_possible
from srunddp.check.coordinator import Coordinator, Handler, gather, serve
from srunddp.check.finding import CheckContext, call_in_daemon_thread
from srunddp.errors import RendezvousError, SrunddpError
from srunddp.util.click_types import limit
from srunddp.util.console import write_stderr
from srunddp.util.kernel_file import raise_open_files_limit

_A_HOST = 1.0
come_within = limit("--timeout", 30.0, "How long rank 0 waits for the others.")


def coordinate(context: CheckContext, handle: Handler, timeout: float, ports: range | None = None) -> Coordinator:
    """On rank 0: become the coordinator of all ranks that come in time; ``handle`` is what it does for a question.

    Raises:
        SrunddpError: this rank cannot be found by the others.
    """
    environment, deadline = context.environment, time.monotonic() + timeout
    token = discovery.token(environment)
    if environment.world_size == 1:
        return Coordinator({0: discovery.hello(environment, token)}, handle)
    raise_open_files_limit()
    listening = _listen(context, ports)
    published = protocol.encode_advertisement(token, [Address(*each.getsockname()[:2]) for each in listening])
    own, trust, _ = discovery.introduce(environment, _published(context, published, timeout))
    return gather(own, listening, trust, handle, deadline)


def join(
    command: str, context: CheckContext, handle: Handler, timeout: float, ports: range | None = None
) -> tuple[int, bool]:
    """On another rank: find rank 0 and answer its questions, or say why the command does not find it.

    Returns:
        This rank's exit code, and whether rank 0 was found. Where it was not, that is 0: rank 0 misses this rank, and
        its exit code is the job's, whereas another one here would have the launcher end rank 0 before it has reported.

    Raises:
        CoordinatorLostError: rank 0 was found, and is gone.
    """
    environment, deadline = context.environment, time.monotonic() + timeout
    try:
        hello, own, addresses = discovery.introduce(environment, _published(context, None, timeout))
        connection = _find(addresses or _candidates(context, ports), hello, deadline, own)
    except SrunddpError as error:
        write_stderr(f"srunddp: {command} on {environment.node}: error: {error}\n")
        return 0, False
    return serve(connection, handle), True


def _find(candidates: Sequence[Address], hello: Hello, deadline: float, own: auth.Authenticator) -> socket.socket:
    """The connection to rank 0, each of its hosts in turn: one that swallows packets must not hold up the others."""
    hosts = dict.fromkeys(address.host for address in candidates)
    turns = ((1 + turn, host) for turn in itertools.count() for host in hosts)
    while True:
        turn, host = next(turns)
        until = min(deadline, time.monotonic() + turn * _A_HOST)
        try:
            return client.join([each for each in candidates if each.host == host], hello, until, own)[0]
        except RendezvousError as error:
            if time.monotonic() < until:
                raise  # rank 0 itself refuses this rank
            if until == deadline:
                hint = "see whether it started; `srun --mpi=pmi2` tells all addresses of its node to the others"
                raise RendezvousError(error.found, expected=error.expected, hint=hint) from None


def _own_addresses(context: CheckContext) -> list[str]:
    """All by which others may reach this node, that of the training's interface first."""
    if context.environment.one_node:
        return ["127.0.0.1"]
    others = [address for link in list_interfaces() if not why_unusable(link) for address in link.addresses]
    return list(dict.fromkeys([*([context.interface.address] if context.interface else []), *others]))


def _listen(context: CheckContext, ports: range | None) -> list[socket.socket]:
    environment, hosts = context.environment, _own_addresses(context)
    if not hosts:
        found = f"node {environment.node} has no interface that is up and has an address"
        raise RendezvousError(found, expected="one by which other nodes reach it", hint="see `ip addr` there")
    entry = entry_for(context.loaded.entries, environment.node, or_default=True)
    candidates = discovery.rendezvous_ports(environment, entry, ports)
    return listen_where_possible(hosts, candidates) or [listen(hosts[0], candidates)]


def _candidates(context: CheckContext, ports: range | None) -> list[Address]:
    """Where rank 0 may listen: at each address to which its name in ifaces.conf leads, and to which its own does."""
    found, wrong, entries = [], [], context.loaded.entries
    for known in (entries, (*(replace(entry, address="") for entry in entries), DEFAULT)):
        try:
            found += discovery.candidate_addresses(context.environment, None, known, ports)
        except SrunddpError as error:
            wrong.append(error)
    if not found:
        raise wrong[0]
    return list(dict.fromkeys(found))


def _published(context: CheckContext, message: str | None, timeout: float) -> str:
    """What rank 0 publishes, by ``message``; MPI, which waits for ever where a rank is missing, is given up in time."""
    environment, name = context.environment, context.interface.name if context.interface else None

    def broadcast(message: str | None) -> str:
        try:
            return call_in_daemon_thread(partial(mpi.broadcast, message, environment.world_size, name)).result(timeout)
        except TimeoutError:
            raise RendezvousError(
                f"rank {environment.rank} on {environment.node} is still in MPI_Init after {timeout:g} s",
                expected="all ranks to reach it, and MPI to reach all nodes",
                hint="look for ranks that did not start; start with `srun --mpi=pmi2`, which needs no MPI",
            ) from None

    return discovery.discover(environment, message, timeout, broadcast, lambda _: None)[1]
