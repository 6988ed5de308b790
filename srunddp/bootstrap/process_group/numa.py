"""Chooses a rank's CPUs for ``--bind=auto``: cores of the NUMA node that its GPU is on."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from srunddp.bootstrap.environment.cpus import asked
from srunddp.bootstrap.environment.slurm import has_own
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.process_group.device import device_index
from srunddp.errors import ConfigError
from srunddp.util.cgroup import cpu_quota, cpuset
from srunddp.util.hostlist import group_by_key, numbers_of, ranges
from srunddp.util.kernel_file import text_of
from srunddp.util.numa_nodes import SYSFS
from srunddp.util.nvml import Device, look


@dataclass(frozen=True)
class Binding:
    """The CPUs to which a rank is bound, or the reason why it is not bound.

    Attributes:
        why: what decided the CPUs, or why the rank is not bound.
        cpus: the CPUs; empty if the rank's affinity mask stays as it is.
        not_chosen: the other CPUs that the rank was allowed to use, and why they were not chosen.
    """

    why: str
    cpus: frozenset[int] = frozenset()
    not_chosen: tuple[str, ...] = ()

    @property
    def value(self) -> str:
        """The CPUs as text, such as ``CPUs 0-7,64-71``; ``unchanged`` if there are none."""
        return f"CPUs {ranges(self.cpus)}" if self.cpus else "unchanged"


def bind_near_gpu(environment: Environment, variables: Mapping[str, str]) -> Binding:
    """Bind this process, and all that it starts from now on, to the CPUs that :func:`plan` chooses.

    Args:
        environment: the rank's environment.
        variables: the rank's environment variables, which say which GPUs it sees.

    Returns:
        The binding; if the kernel refuses it, a binding without CPUs that says so.
    """
    binding = plan(environment, variables, os.sched_getaffinity(0), SYSFS)
    try:
        # The kernel changes the mask of this thread only. Threads and processes that this thread
        # starts afterwards inherit it.
        os.sched_setaffinity(0, binding.cpus or os.sched_getaffinity(0))
    except OSError as error:
        return Binding(f"the kernel refuses {binding.value}: {error.strerror}")
    return binding


def plan(
    environment: Environment, variables: Mapping[str, str], mask: set[int], sysfs: Path = SYSFS
) -> Binding:
    """Choose the CPUs of a rank from its affinity mask, without binding anything.

    The result has no CPUs if the rank is to stay unbound: something else already limits its CPUs,
    its GPU or the GPU's NUMA node is not known, or fewer CPUs are near than were asked for.

    Args:
        environment: the rank's environment.
        variables: the rank's environment variables, which say which GPUs it sees.
        mask: the CPUs of the rank's affinity mask.
        sysfs: the folder where the kernel's sysfs is mounted.
    """
    whole = cpuset(root=sysfs / "fs/cgroup") or numbers_of(
        text_of(sysfs / "devices/system/cpu/online")
    )
    if mask < whole:
        return Binding(f"bound before srunddp: CPUs {ranges(mask)} of {ranges(whole)}")
    quota = cpu_quota(root=sysfs / "fs/cgroup") or len(mask)
    if quota < len(mask):
        return Binding(
            f"the control group's quota of {quota:g} CPUs is for all ranks together, wherever"
            " they run"
        )
    try:
        gpu = _own_gpu(environment, variables, sysfs)
    except ConfigError as error:
        return Binding(error.found)
    beside = text_of(sysfs / "bus/pci/devices" / gpu.device["address"] / "local_cpulist")
    near = mask & numbers_of(beside)
    numa_node = gpu.device["numa"]
    # The kernel shows -1 if the firmware does not name the device's NUMA node, as often on machines
    # that have only one NUMA node.
    if numa_node < 0 or not near:
        return Binding(f"{gpu}: its NUMA node is unknown, or has none of this rank's CPUs")
    share = _share(near, gpu.peers, environment.local_rank, sysfs)
    if len(share.cpus) < asked(variables):
        return Binding(
            f"{gpu}: {asked(variables)} CPUs per task were asked for, and {len(share.cpus)} are"
            " next to the GPU"
        )
    rest = {
        "on other NUMA nodes": mask - near,
        "for other ranks with GPUs there": near - share.cpus,
    }
    return Binding(
        f"{gpu} is on NUMA node {numa_node}, {share.how}",
        share.cpus,
        tuple(f"CPUs {ranges(cpus)}: {why}" for why, cpus in rest.items() if cpus),
    )


@dataclass(frozen=True)
class _OwnGpu:
    """The GPU that a rank will use.

    Attributes:
        index: the GPU's number among those that the rank sees.
        device: what NVML and sysfs say about the GPU.
        peers: the local ranks whose GPUs are on the same NUMA node, this rank included; empty if
            this rank cannot know them, because the ranks do not see each other's GPUs.
    """

    index: int
    device: Device
    peers: tuple[int, ...]

    def __str__(self) -> str:
        return f"cuda:{self.index} at {self.device['address']}"


def _own_gpu(environment: Environment, variables: Mapping[str, str], sysfs: Path) -> _OwnGpu:
    """Find the GPU that the script in this rank will choose.

    Raises:
        ConfigError: no GPU is visible, fewer GPUs are visible than ranks share the node, or it is
            not known yet which GPU the rank will use.
    """
    view = look(variables.get("CUDA_VISIBLE_DEVICES"), sysfs)
    visible = view.devices
    if not visible:
        raise ConfigError(
            f"no GPU is visible: {view.error or view.missing or 'see CUDA_VISIBLE_DEVICES'}"
        )
    ranks_here = environment.local_world_size or 0
    if len(visible) > 1:
        unknown = f"which of {len(visible)} GPUs this rank will use is not known"
        if len(view.models) > 1 and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            raise ConfigError(f"{unknown}: CUDA numbers different models by speed")
        if environment.local_rank >= ranks_here:
            raise ConfigError(f"{unknown}: how many ranks share them is not known yet")
    own = has_own(variables, ranks_here, len(visible))
    index = device_index(environment.local_rank, ranks_here, len(visible), own=own)
    device = visible[index]
    peers: tuple[int, ...] = ()
    if ranks_here <= len(visible) and not own:  # each local rank uses the GPU of its number
        peers = tuple(rank for rank in range(ranks_here) if visible[rank]["numa"] == device["numa"])
    return _OwnGpu(index, device, peers)


@dataclass(frozen=True)
class _Share:
    """The CPUs of one rank among those next to its GPU, and a text that says how they were
    chosen.
    """

    cpus: frozenset[int]
    how: str


def _share(near: set[int], peers: Sequence[int], local_rank: int, sysfs: Path) -> _Share:
    """Divide the cores next to a GPU among the ranks whose GPUs are on the same NUMA node, and
    return this rank's share. A core's hardware threads all go to one rank. If there are fewer cores
    than such ranks, or the ranks are not known, every rank gets all these cores.

    Args:
        near: the CPUs next to the GPU.
        peers: the local ranks whose GPUs are on the same NUMA node.
        local_rank: this rank's local rank.
        sysfs: the folder where the kernel's sysfs is mounted.
    """
    topology = sysfs / "devices/system/cpu"
    siblings = (
        # Both hardware threads of a core have the same list, such as `3,67`.
        (text_of(topology / f"cpu{cpu}/topology/thread_siblings_list") or cpu, cpu)
        for cpu in sorted(near)
    )
    cores = list(group_by_key(siblings).values())
    count = len(peers)
    if local_rank not in peers or len(cores) < count:
        return _Share(frozenset(near), f"all {len(cores)} cores, which other ranks may use too")
    place = peers.index(local_rank)
    # The ranks' parts have no gap and no overlap, and their sizes differ by one core at most.
    own = cores[len(cores) * place // count : len(cores) * (place + 1) // count]
    return _Share(
        frozenset(chain(*own)),
        f"{len(own)} of {len(cores)} cores, as {count} of the node's ranks have GPUs there",
    )
