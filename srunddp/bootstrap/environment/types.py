"""Data classes for what the launcher tells a process, and for the ways to find rank 0.

The other modules of this package fill them in.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from srunddp.util.quick_dataclass import dataclass

NO_LAUNCHER = "none"
"""The launcher's name for a process that no launcher started."""


@dataclass(frozen=True)
class LauncherVariables:
    """The name of a launcher, and the names of the variables by which it tells a process its
    numbers.

    Attributes:
        name: the launcher's name.
        rank: the variable for the process's number among all ranks.
        world_size: the variable for the number of ranks.
        local_rank: the variable for the process's number among the ranks of its node.
        local_world_size: the variable for the number of ranks on the node; None if the launcher has
            no such variable.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None = None


@dataclass(frozen=True)
class SlurmStep:
    """One task of a running job step, as Slurm's variables describe it.

    Attributes:
        job: the job id, ``SLURM_JOB_ID``.
        step: the step id, ``SLURM_STEP_ID``.
        restarts: how often Slurm has requeued the job, ``SLURM_RESTART_COUNT``.
        rank: the number of the task, ``SLURM_PROCID``.
        world_size: the number of tasks of the step, ``SLURM_STEP_NUM_TASKS``.
        nodes: the step's nodes in Slurm's order, expanded from ``SLURM_STEP_NODELIST``.
        tasks_per_node: how many tasks each of these nodes runs, ``SLURM_STEP_TASKS_PER_NODE``.
        ranks_here: the ranks on this node, ``SLURM_GTIDS``; empty if Slurm does not set it.
        distribution: how Slurm distributes tasks over nodes, ``SLURM_DISTRIBUTION``.
        reserved_ports: the ports in ``SLURM_STEP_RESV_PORTS``.
        heterogeneous: whether the step spans components of a heterogeneous job.
        direct: whether srun itself started this process, so that ``SLURM_TASK_PID`` is its process
            id; False if a program in between, such as mpirun's daemon, started it.
        typed: whether the user typed the command into the shell of ``srun --pty``.
    """

    job: str
    step: str
    restarts: str
    rank: int
    world_size: int
    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    ranks_here: tuple[int, ...]
    distribution: str
    reserved_ports: tuple[int, ...]
    heterogeneous: bool
    direct: bool
    typed: bool

    @property
    def id(self) -> str:
        """Job id, step id and restart count; no other step has the same three."""
        return f"{self.job}.{self.step}.{self.restarts}"

    @property
    def why_rank0_unknown(self) -> str:
        """Why rank 0 may be on another node than the first of :attr:`nodes`; empty if rank 0 is
        certainly on that first node.
        """
        if self.heterogeneous:
            return "a heterogeneous step"
        # A host file may begin with any node of the step.
        if self.distribution.startswith("arbitrary"):
            return "-m arbitrary"
        if self.nodes:
            return ""
        return "SLURM_STEP_NODELIST is empty"

    def layout(self) -> dict[int, str]:
        """Return the node of each rank, by rank; empty if the variables do not determine it."""
        # In these steps the components, the host file or the size of a plane decide where a rank
        # runs, and Slurm's variables do not give them.
        if self.heterogeneous or self.distribution.startswith(("arbitrary", "plane")):
            return {}
        # If the variables contradict each other, no layout is better than a wrong one: messages
        # would name the wrong node.
        if len(self.tasks_per_node) != len(self.nodes):
            return {}
        if sum(self.tasks_per_node) != self.world_size:
            return {}
        slots = [
            [node] * count for node, count in zip(self.nodes, self.tasks_per_node, strict=True)
        ]
        # In each turn, every node that still has a free task gets one rank.
        if self.distribution.startswith("cyclic"):
            return dict(
                enumerate(node for turn in itertools.zip_longest(*slots) for node in turn if node)
            )
        return dict(enumerate(itertools.chain.from_iterable(slots)))


# A dataclass generates __eq__ and __repr__ anew at every start, which takes time: leave them out
# here, because the subclass Environment has its own.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Identity:
    """Who this process is, and which launcher said so.

    Attributes:
        launcher: the launcher's name: Slurm, Open MPI, Hydra, …, ``explicit variables``, or
            ``none``.
        rank: this process's number among all ranks, from 0.
        local_rank: its number among the ranks of this node, from 0.
        world_size: the number of ranks.
        local_world_size: the number of ranks on this node; None if the launcher does not give it,
            so that it is known only after the rendezvous.
        node: this node's name, ``SLURMD_NODENAME`` or the hostname.
        sources: what decided ``launcher``, ``rank``, ``local_rank``, ``world_size``, ``node`` and,
            if known, ``local_world_size``: the variable with its value, or a sentence if no
            variable did.
        step: the task as Slurm describes it; None if the launcher is not Slurm.
        master: host and port in ``MASTER_ADDR`` and ``MASTER_PORT`` if explicit variables decide;
            else None.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    node: str
    sources: Mapping[str, str]
    step: SlurmStep | None = None
    master: tuple[str, int] | None = None

    @property
    def rank_variable(self) -> str:
        """The name of the variable that gave the rank; a sentence if no variable did."""
        # A source reads `SLURM_PROCID=3`.
        return self.sources["rank"].partition("=")[0]

    @property
    def is_single(self) -> bool:
        """Whether no launcher says that this process is a rank."""
        return self.launcher == NO_LAUNCHER


@dataclass(frozen=True, kw_only=True)
class Environment(Identity):
    """Who this process is, how it finds rank 0, and what to tell the user about both.

    Attributes:
        discoveries: the usable ways to learn where rank 0 is, the preferred one first; empty for a
            single process.
        not_chosen: for each key of :attr:`sources`, and for ``master``, what else gave a value, and
            the reason why it does not count unless that is obvious.
        notes: lines for the user, such as what was ignored and why.
        node_sizes: the number of ranks on each node, in the order of the nodes, if the ranks' nodes
            may change during the run; else empty.
        spares: how many task numbers, from ``world_size`` on, have no rank: the numbers of spare
            nodes' tasks, and after a node was lost also numbers that no task has any more.
        min_nodes: the fewest nodes with which the run goes on when no spare node is left; 0 if it
            needs all nodes.
        first_world_size: the number of ranks in the first start, if the ranks' nodes may change;
            else 0.
        layout: how often the ranks have been renumbered in this run.
        task: the launcher's number for this process if the ranks' nodes may change; else 0. The
            process keeps this number when its rank changes.
    """

    discoveries: tuple[Discovery, ...] = ()
    not_chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    node_sizes: tuple[int, ...] = ()
    spares: int = 0
    min_nodes: int = 0
    first_world_size: int = 0
    layout: int = 0
    task: int = 0

    @property
    def nodes_may_change(self) -> bool:
        """Whether a restart may move ranks to other nodes, or go on with fewer nodes."""
        return bool(self.node_sizes)

    @property
    def may_shrink(self) -> bool:
        """Whether a restart may go on with fewer nodes."""
        return 0 < self.min_nodes < len(self.node_sizes)

    @property
    def is_spare(self) -> bool:
        """Whether this process has no rank: it waits on a spare node, or :attr:`is_returning`."""
        return self.rank >= self.world_size

    @property
    def is_returning(self) -> bool:
        """Whether this process's node was given up, so that the run goes on without the process. It
        waits for a next start, to be a spare node's task then.
        """
        return self.nodes_may_change and self.rank >= self.world_size + self.spares

    @property
    def returning_number(self) -> int:
        """The number that this process gets if its node is given up, to wait until the run takes it
        back. It is higher than the numbers of all ranks and spare nodes' tasks, and no other
        process gets the same one.
        """
        return self.world_size + self.spares + self.task

    @property
    def leads_node(self) -> bool:
        """Whether this is the first rank of its node, not counting rank 0.

        On rank 0's node only rank 1 can be it: where rank 1 is on another node, this is false for
        all ranks of rank 0's node.
        """
        return self.rank == 1 or (self.rank > 0 and self.local_rank == 0)

    @property
    def likely_node_index(self) -> int:
        """The number of this node among all, from 0. Without Slurm's list it is estimated from the
        number of ranks on this node.
        """
        if self.step and self.node in self.step.nodes:
            return self.step.nodes.index(self.node)
        return self.rank // (self.local_world_size or 1)

    @property
    def one_node(self) -> bool:
        """Whether all ranks are known to share this node."""
        # A restart may move ranks to another node, and they must reach rank 0 from there.
        if self.nodes_may_change:
            return False
        # Through a loopback address, rank 0 can be reached only from its own node.
        if self.master and self.master[0].startswith(("127.", "localhost", "::1")):
            return True
        return self.world_size in (1, self.local_world_size)

    @property
    def discovery(self) -> Discovery:
        """The way to rank 0 that is tried first; ``NO_DISCOVERY`` for a single process."""
        if self.discoveries:
            return self.discoveries[0]
        return NO_DISCOVERY

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of :attr:`discoveries`, as ``--channel`` takes them."""
        return tuple(each.name for each in self.discoveries)


@dataclass(frozen=True)
class RankZero:
    """The host of rank 0, as each rank derives it from its own variables.

    Attributes:
        name: the name of rank 0's node, or the host in ``MASTER_ADDR``.
        is_node: whether ``name`` is a node's name, for which ifaces.conf may give another address.
        here: whether rank 0 is on this rank's node.
    """

    name: str
    is_node: bool
    here: bool


class Discovery(ABC):
    """One way in which the ranks learn where rank 0 listens.

    Attributes:
        name: as ``--channel`` takes it.
        hint: how the user has to start the ranks to make this way available.
        variable: the environment variable that makes this way available; empty if the variable that
            gives the rank does.
        publishes: whether rank 0 sends its address and a secret to the others by :meth:`exchange`.
            If not, each rank works the address out by :meth:`rank_zero` and :meth:`ports`.
        waits_in: what messages call the place where :meth:`exchange` waits for all ranks, such as
            ``MPI_Init``; empty if rank 0 does not publish.
        starts_mpi: whether :meth:`exchange` starts MPI. If it does, only the worker may call it,
            and it does not return before all ranks have called it.
        rules_out_mpi: whether the ranks cannot start MPI after :meth:`exchange`.
        overrides_launcher: whether ``--channel`` with this name makes explicit variables decide,
            whatever a launcher says.
        ports_rule: how messages describe the choice of rank 0's port.
    """

    name: ClassVar[str]
    hint: ClassVar[str] = ""
    variable: ClassVar[str] = ""
    publishes: ClassVar[bool] = False
    waits_in: ClassVar[str] = ""
    starts_mpi: ClassVar[bool] = False
    rules_out_mpi: ClassVar[bool] = False
    overrides_launcher: ClassVar[bool] = False
    ports_rule: ClassVar[str] = "the kernel's choice, published"

    @abstractmethod
    def why_unavailable(self, identity: Identity, variables: Mapping[str, str]) -> str:
        """Return why this rank cannot use this way; empty if it can.

        Args:
            identity: who the rank is.
            variables: its environment variables.
        """

    def source(self, identity: Identity, variables: Mapping[str, str]) -> str:
        """Return the variable that makes this way available, with its value, for messages.

        Args:
            identity: who the rank is.
            variables: its environment variables.
        """
        if self.variable:
            return f"{self.variable}={variables.get(self.variable, '')}"
        return identity.sources["rank"]

    def is_last_resort(self, identity: Identity) -> bool:
        """Tell whether this rank should try this way only after all others."""
        return False

    def exchange(
        self, message: str | None, environment: Environment, timeout: float, interface: str = ""
    ) -> str:
        """Publish a message on rank 0, and wait for it on the other ranks.

        Args:
            message: on rank 0, a text without spaces that says where rank 0 listens or that it has
                failed (see ``rendezvous/protocol.py``); None on the other ranks.
            environment: this rank's environment.
            timeout: seconds to wait for the slowest rank.
            interface: the network interface to use; empty if the library may choose it.

        Returns:
            Rank 0's message, on all ranks.

        Raises:
            MpiNotLaunchedError: this way does not work here, so the next one should be tried.
            RendezvousError: a rank did not come, or the launcher does not answer.
        """
        raise NotImplementedError

    def rank_zero(self, environment: Environment) -> RankZero:
        """Work out which host rank 0 is on.

        Args:
            environment: this rank's environment.

        Raises:
            ConfigError: the launcher's variables do not determine it.
        """
        raise NotImplementedError

    def ports(self, environment: Environment, allowed: range | None) -> list[int]:
        """Return the ports that rank 0 tries, in this order; empty if rank 0 publishes its port.

        Args:
            environment: this rank's environment.
            allowed: the ports that a firewall leaves open; None for any.
        """
        return []


class NoDiscovery(Discovery):
    """The stand-in for a way to rank 0 in a single process, which has no other rank to find."""

    name = "none"

    def why_unavailable(self, identity: Identity, variables: Mapping[str, str]) -> str:
        return "a single process needs none"


NO_DISCOVERY = NoDiscovery()
