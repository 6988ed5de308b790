"""What the launcher says of this process, and a way to rank 0, as data: the modules beside this one
find them out.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

NO_LAUNCHER = "none"
"""The launcher's name where a process stands alone."""


@dataclass(frozen=True)
class LauncherVariables:
    """The names under which one launcher tells its processes who they are."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None = None


@dataclass(frozen=True)
class SlurmStep:
    """One task of a running job step, in Slurm's words.

    Attributes:
        job: ``SLURM_JOB_ID``; step: ``SLURM_STEP_ID``; restarts: ``SLURM_RESTART_COUNT``.
        nodes: the step's nodes in Slurm's order, expanded from ``SLURM_STEP_NODELIST``.
        tasks_per_node: how many tasks each of them runs, ``SLURM_STEP_TASKS_PER_NODE``.
        ranks_here: the ranks on this node, ``SLURM_GTIDS``; empty where Slurm does not say.
        distribution: ``SLURM_DISTRIBUTION``; reserved_ports: ``SLURM_STEP_RESV_PORTS``, expanded.
        heterogeneous: whether the step spans components of a heterogeneous job.
        direct: ``SLURM_TASK_PID`` is this very process: srun started it, not something in between.
        typed: somebody typed the command into the shell of ``srun --pty``.
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
        """Job, step and restart count, which no other step has."""
        return f"{self.job}.{self.step}.{self.restarts}"

    @property
    def why_rank0_unknown(self) -> str:
        """Why rank 0 need not be on the first node of the list; empty where it is."""
        if self.heterogeneous:
            return "a heterogeneous step"
        # A host file may begin with any node of the step.
        if self.distribution.startswith("arbitrary"):
            return "-m arbitrary"
        if self.nodes:
            return ""
        return "SLURM_STEP_NODELIST is empty"

    def layout(self) -> dict[int, str]:
        """Tell which node each rank runs on, as far as the distribution tells; empty where it does
        not.
        """
        # Who is where then depends on the components, on the host file, or on the size of a plane.
        if self.heterogeneous or self.distribution.startswith(("arbitrary", "plane")):
            return {}
        # The variables contradict each other, and a layout that is wrong is worse than none:
        # messages would name the wrong node.
        if len(self.tasks_per_node) != len(self.nodes):
            return {}
        if sum(self.tasks_per_node) != self.world_size:
            return {}
        slots = [
            [node] * count for node, count in zip(self.nodes, self.tasks_per_node, strict=True)
        ]
        # In each turn every node gets a rank, until its tasks are used up: a node with fewer drops
        # out.
        if self.distribution.startswith("cyclic"):
            return dict(
                enumerate(node for turn in itertools.zip_longest(*slots) for node in turn if node)
            )
        return dict(enumerate(itertools.chain.from_iterable(slots)))


# Every start pays for what a dataclass generates, and Environment has both for itself.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Identity:
    """Who this process is, and which launcher said so.

    Attributes:
        launcher: its name: Slurm, Open MPI, Hydra, …, ``explicit variables``, or ``none``.
        rank: torch's term, as the next two are.
        local_rank: among the ranks of this node.
        world_size: how many ranks there are.
        local_world_size: ranks on this node; None before the rendezvous, where nothing tells.
        node: this node's name, ``SLURMD_NODENAME`` or the hostname.
        sources: for ``launcher``, ``rank``, ``local_rank``, ``world_size``, ``node`` and, where it
            is known, ``local_world_size``: the variable that decided it, with its value, or a
            sentence where none did.
        step: Slurm's view, where a step of Slurm is the launcher.
        master: ``MASTER_ADDR`` and ``MASTER_PORT`` where explicit variables rule.
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
        """The variable that tells the rank; a sentence where none does."""
        # A source reads `SLURM_PROCID=3`.
        return self.sources["rank"].partition("=")[0]

    @property
    def is_single(self) -> bool:
        """Whether nothing says that this process is a rank."""
        return self.launcher == NO_LAUNCHER


@dataclass(frozen=True, kw_only=True)
class Environment(Identity):
    """Who this process is, how it finds rank 0, and what there is to say about both.

    Attributes:
        discoveries: the ways to learn where rank 0 is that can be used, the preferred one first;
            empty for a single process.
        not_chosen: for each of :attr:`sources`, and for ``master``, what else named the value, and
            why that does not count where it is not plain.
        notes: lines to be said once, such as what was ignored and why.
        node_sizes: with spare nodes, the ranks of each other node, in their order.
        spares: tasks of the spare nodes, which have the numbers from ``world_size`` on in place of
            a rank.
    """

    discoveries: tuple[Discovery, ...] = ()
    not_chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    node_sizes: tuple[int, ...] = ()
    spares: int = 0

    @property
    def is_spare(self) -> bool:
        """Whether this process waits on a spare node."""
        return self.rank >= self.world_size

    @property
    def one_node(self) -> bool:
        """Whether all ranks are known to share this node."""
        # A restart may move ranks to a spare node, and they must reach rank 0 from there.
        if self.spares:
            return False
        # From any other node such an address does not lead to rank 0.
        if self.master and self.master[0].startswith(("127.", "localhost", "::1")):
            return True
        return self.world_size in (1, self.local_world_size)

    @property
    def discovery(self) -> Discovery:
        """The way that is tried first."""
        if self.discoveries:
            return self.discoveries[0]
        return NO_DISCOVERY

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the ways, as ``--channel`` takes them."""
        return tuple(each.name for each in self.discoveries)


@dataclass(frozen=True)
class RankZero:
    """Where rank 0 is, as far as all ranks can work it out: the name of its node, or the host that
    the user named.

    ``is_node``: for a node ifaces.conf may have another address; ``here``: whether it is this
    rank's.
    """

    name: str
    is_node: bool
    here: bool


class Discovery(ABC):
    """One way in which the ranks learn where rank 0 listens.

    A way that publishes has :meth:`exchange`; one by which the ranks work the address out has
    :meth:`rank_zero` and :meth:`ports`.

    Attributes:
        name: as ``--channel`` takes it; hint: how to start so that it is there.
        variable: for which it is there; empty where that is the one that tells the rank.
        publishes: whether rank 0 tells its address over it, by :meth:`exchange`, and a secret with
            it. Else the ranks work the address out, by :meth:`rank_zero` and :meth:`ports`.
        waits_in: where the ranks wait for each other meanwhile.
        starts_mpi: :meth:`exchange` starts MPI. So it is done by the worker, and returns only when
            all ranks take part.
        rules_out_mpi: MPI cannot be started in the ranks afterwards.
        overrides_launcher: ``--channel`` with its name lets explicit variables rule, whatever the
            launcher.
        ports_rule: how rank 0 comes to its port, for people.
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
        """Tell why this rank cannot use this way; empty where it can.

        Args:
            identity: who the rank is.
            variables: its environment variables.
        """

    def source(self, identity: Identity, variables: Mapping[str, str]) -> str:
        """Return the variable for which this rank can use this way, with its value; for people.

        Args:
            identity: who the rank is.
            variables: its environment variables.
        """
        if self.variable:
            return f"{self.variable}={variables.get(self.variable, '')}"
        return identity.sources["rank"]

    def is_last_resort(self, identity: Identity) -> bool:
        """Tell whether all other ways come first for this rank."""
        return False

    def exchange(
        self, message: str | None, environment: Environment, timeout: float, interface: str = ""
    ) -> str:
        """Publish rank 0's message, and wait for it on the other ranks.

        Args:
            message: rank 0's, without blanks: where it listens, or that it has failed; None on the
                others. Only the former bears the run's name.
            environment: this rank's.
            timeout: seconds to wait for the slowest rank.
            interface: the network interface to use; empty for the way's own choice.

        Returns:
            Rank 0's message, on all ranks.

        Raises:
            MpiNotLaunchedError: it does not work here, and the next way is to be tried.
            RendezvousError: a rank did not come, or the launcher does not answer.
        """
        raise NotImplementedError

    def rank_zero(self, environment: Environment) -> RankZero:
        """Work out where rank 0 is.

        Args:
            environment: this rank's.

        Raises:
            ConfigError: that cannot be known.
        """
        raise NotImplementedError

    def ports(self, environment: Environment, allowed: range | None) -> list[int]:
        """Return the ports on which rank 0 may listen, in the order in which it tries them; none
        where it publishes its own.

        Args:
            environment: this rank's.
            allowed: those that a firewall leaves open; None for any.
        """
        return []


class NoDiscovery(Discovery):
    """The way of a single process, which looks for nobody."""

    name = "none"

    def why_unavailable(self, identity: Identity, variables: Mapping[str, str]) -> str:
        return "a single process needs none"


NO_DISCOVERY = NoDiscovery()
