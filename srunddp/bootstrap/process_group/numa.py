"""Which CPUs a rank runs on with ``--bind=auto``: cores of the NUMA node that its GPU is on."""

import os
from collections.abc import Mapping
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
from srunddp.util.nvml import SYSFS, Device, look


@dataclass(frozen=True)
class Binding:
    """The CPUs of one rank.

    Attributes:
        why: what decided them.
        cpus: empty where the rank's affinity mask stays as it is.
        not_chosen: other CPUs that the rank may run on, and why it does not.
    """

    why: str
    cpus: frozenset[int] = frozenset()
    not_chosen: tuple[str, ...] = ()

    @property
    def value(self) -> str:
        """``CPUs 0-7,64-71``, or ``unchanged``."""
        return f"CPUs {ranges(self.cpus)}" if self.cpus else "unchanged"


def bind_near_gpu(environment: Environment, variables: Mapping[str, str]) -> Binding:
    """Give this process, and all that it starts from now on, the CPUs that :func:`plan` chooses."""
    binding = plan(environment, variables, os.sched_getaffinity(0), SYSFS)
    try:
        os.sched_setaffinity(0, binding.cpus or os.sched_getaffinity(0))
    except OSError as error:
        return Binding(f"the kernel refuses {binding.value}: {error.strerror}")
    return binding


def plan(
    environment: Environment, variables: Mapping[str, str], mask: set[int], sysfs: Path = SYSFS
) -> Binding:
    """Choose the CPUs of a rank from its affinity mask; nothing is changed. ``sysfs`` is where that
    is mounted.
    """
    whole = cpuset(root=sysfs / "fs/cgroup") or numbers_of(
        text_of(sysfs / "devices/system/cpu/online")
    )
    if mask < whole:
        return Binding(f"bound before srunddp: CPUs {ranges(mask)} of {ranges(whole)}")
    if (quota := cpu_quota(root=sysfs / "fs/cgroup") or len(mask)) < len(mask):
        return Binding(
            f"the control group's quota of {quota:g} CPUs is for all ranks together, wherever"
            " they run"
        )
    try:
        device, where, peers = _device(environment, variables, sysfs)
    except ConfigError as error:
        return Binding(error.found)
    near = mask & numbers_of(
        text_of(sysfs / "bus/pci/devices" / device["address"] / "local_cpulist")
    )
    if device["numa"] < 0 or not near:
        return Binding(f"{where}: its NUMA node is unknown, or has none of this rank's CPUs")
    cpus, how = _share(near, peers, environment.local_rank, sysfs)
    if len(cpus) < asked(variables):
        return Binding(
            f"{where}: {asked(variables)} CPUs per task were asked for, and {len(cpus)} are next to"
            " the GPU"
        )
    rest = {"on other NUMA nodes": mask - near, "for other ranks with GPUs there": near - cpus}
    not_chosen = tuple(f"CPUs {ranges(those)}: {why}" for why, those in rest.items() if those)
    return Binding(f"{where} is on NUMA node {device['numa']}, {how}", frozenset(cpus), not_chosen)


def _device(
    environment: Environment, variables: Mapping[str, str], sysfs: Path
) -> tuple[Device, str, list[int]]:
    """The rank's GPU, its name, and the local ranks with GPUs of its NUMA node; none where those
    are not visible.
    """
    view = look(variables.get("CUDA_VISIBLE_DEVICES"), sysfs)
    size = environment.local_world_size or 0
    visible = view.devices
    by_speed = len(view.models) > 1 and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if not visible:
        raise ConfigError(
            f"no GPU is visible: {view.error or view.missing or 'see CUDA_VISIBLE_DEVICES'}"
        )
    if len(visible) > 1 and (environment.local_rank >= size or by_speed):
        if by_speed:
            why = "CUDA numbers different models by speed"
        else:
            why = "how many ranks share them is not known yet"
        raise ConfigError(f"which of {len(visible)} GPUs this rank will use is not known: {why}")
    own = has_own(variables, size, len(visible))
    index = device_index(environment.local_rank, size, len(visible), own=own)
    device = visible[index]
    ranks = range(size if size <= len(visible) and not own else 0)
    where = f"cuda:{index} at {device['address']}"
    return device, where, [rank for rank in ranks if visible[rank]["numa"] == device["numa"]]


def _share(near: set[int], peers: list[int], local_rank: int, sysfs: Path) -> tuple[set[int], str]:
    """This rank's cores, each with all its hardware threads, of those that it has in common with
    its peers.
    """
    topology = sysfs / "devices/system/cpu"
    siblings = (
        (text_of(topology / f"cpu{cpu}/topology/thread_siblings_list") or cpu, cpu)
        for cpu in sorted(near)
    )
    cores = list(group_by_key(siblings).values())
    count = len(peers)
    if local_rank not in peers or len(cores) < count:
        return near, f"all {len(cores)} cores, which other ranks may use too"
    place = peers.index(local_rank)
    own = cores[len(cores) * place // count : len(cores) * (place + 1) // count]
    return set(
        chain(*own)
    ), f"{len(own)} of {len(cores)} cores, as {count} of the node's ranks have GPUs there"
