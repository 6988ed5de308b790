"""Check that each rank has a GPU of its own, with free memory, near its CPUs and within reach of
the other GPUs of the node.
"""

import os
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal

from srunddp.bootstrap.environment.slurm import has_own
from srunddp.bootstrap.process_group.device import device_index, unused_devices
from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Observation, Ranks
from srunddp.errors import ConfigError
from srunddp.supervisor.failure import GpuFault, GpuFaultKind
from srunddp.supervisor.gpu_health import look as look_at_health
from srunddp.util.cuda_visible import NO_GPU
from srunddp.util.hostlist import group_by_key
from srunddp.util.numa_nodes import numa_nodes_of_cpus
from srunddp.util.nvml import Device, View, look

# Shares of a GPU's memory in use before the job: more than _TAKEN means that another program uses
# the GPU, more than _FULL that no rank can start there.
_TAKEN = 0.1
_FULL = 0.95
_WITHIN = 30.0  # seconds: without nvidia-persistenced, the driver may first have to wake many GPUs


@dataclass(frozen=True, kw_only=True)
class GpuFacts(View):
    """The GPUs that one rank sees, and how it may use them.

    Attributes:
        wanted: The value of ``CUDA_VISIBLE_DEVICES``; None if it is not set.
        present: Whether the node has a device file of an NVIDIA GPU.
        own: Whether Slurm shows each rank several GPUs that no other rank sees.
        shared: Whether ``NCCL_MULTI_RANK_GPU_ENABLE=1`` lets several ranks use one GPU.
        numa: The NUMA nodes of this rank's CPUs.
        faults: The present faults of the GPUs that the rank sees, each as a dict of the fields of
            :class:`GpuFault`; empty if there are none.
    """

    wanted: str | None = None
    present: bool = False
    own: bool = False
    shared: bool = False
    numa: list[int] | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)

    @property
    def gpu_faults(self) -> tuple[GpuFault, ...]:
        """The faults as :class:`GpuFault`, made from the dicts in :attr:`faults`."""
        return tuple(GpuFault(**each) for each in self.faults)


def collect(context: CheckContext) -> GpuFacts:
    """Collect which GPUs this rank sees, by NVML and without torch or CUDA."""
    variables = context.variables
    wanted = variables.get("CUDA_VISIBLE_DEVICES")
    view = look(wanted)
    return GpuFacts(
        **asdict(view),
        wanted=wanted,
        present=os.path.exists("/dev/nvidia0"),
        own=has_own(variables, context.environment.local_world_size or 1, len(view.devices)),
        shared=variables.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
        numa=numa_nodes_of_cpus(os.sched_getaffinity(0)),
        faults=[asdict(fault) for fault in look_at_health(wanted, with_old=True)],
    )


Used = list[tuple[Observation[GpuFacts], Device]]


def evaluate(seen: Ranks[GpuFacts]) -> Iterator[Finding]:
    """Judge the GPUs: one that is missing, broken, full or used twice is a failure. A problem that
    only makes a job slow is a warning.
    """
    for one in seen:
        yield from _driver(one)
    yield from _faults(seen)
    # Compare only nodes on which NVML works, because nothing is known about the GPUs of the other
    # nodes.
    whole = [
        ranks for ranks in seen.grouped().values() if not any(one.facts.error for one in ranks)
    ]
    nodes = [ranks for ranks in whole if any(one.facts.devices for one in ranks)]
    bare = Ranks(one for ranks in whole if ranks not in nodes for one in ranks)
    if nodes and bare:
        found = "no GPU is visible, but other nodes have GPUs"
        hint = "ask for GPUs on each node (--gpus-per-node)"
        yield bare.finding(FAIL, found, "GPUs on all nodes or on none", hint, ranks=False)
    used: Used = []
    for ranks in nodes:
        here = yield from _chosen(ranks)
        yield from _shared_gpus(here)
        yield from _without_p2p(here)
        used += here
    for one, device in used:
        yield from _memory(one, device)
        yield from _numa(one, device)
    yield from _unlike(used)


def _driver(one: Observation[GpuFacts]) -> Iterator[Finding]:
    facts = one.facts
    named = f"CUDA_VISIBLE_DEVICES={one.facts.wanted}"
    if facts.error:
        hint = "see nvidia-smi on the node, and have it repaired or leave it out"
        yield one.finding(FAIL, f"NVML: {facts.error}", "an answer", hint)
    elif facts.missing and facts.present:
        hint = (
            "install nvidia-ml-py and the driver's libnvidia-ml.so.1; start a container with --nv"
        )
        found = f"/dev/nvidia0 is there, and NVML is not: {facts.missing}"
        yield one.finding(FAIL, found, "NVML, which NCCL needs too", hint)
    elif facts.missing and facts.wanted not in (None, *NO_GPU):
        yield one.finding(
            WARN, f"{named}, and there is no GPU", "a GPU", "unset it, or ask for GPUs"
        )
    elif facts.unknown:
        found = f"{facts.unknown} in {named}: CUDA ignores it and all after it"
        hint = "leave CUDA_VISIBLE_DEVICES to Slurm, or correct it"
        yield one.finding(WARN, found, f"each of the {facts.count} GPUs, once", hint)


def _faults(seen: Ranks[GpuFacts]) -> Iterator[Finding]:
    """Name each fault of a GPU once, even if several ranks see the GPU."""
    who = group_by_key(
        ((one.node, fault.index, fault.uuid, fault.what, fault.kind), one)
        for one in seen
        for fault in one.facts.gpu_faults
    )
    for (_, index, uuid, what, kind), ranks in who.items():
        is_broken = kind == GpuFaultKind.HARDWARE.value
        found = f"GPU {index} ({uuid or 'UUID unknown'}): {what}"
        if is_broken:
            hint = "leave the node out (--exclude), and have the GPU reset or repaired"
        else:
            hint = "tell the site: nvidia-smi -q shows its memory errors, retired rows and clocks"
        severity = FAIL if is_broken else WARN
        yield Ranks(ranks).finding(severity, found, "a healthy GPU", hint, ranks=False)


def _chosen(ranks: Ranks[GpuFacts]) -> Generator[Finding, None, Used]:
    """Choose the device of each rank of a node, as a run does.

    Yields:
        A finding for each rank that gets no device, and for GPUs that stay idle.

    Returns:
        The ranks that get a device, each with this device.
    """
    used = []
    for one in ranks:
        devices = one.facts.devices
        # A run uses the same functions, so the check cannot choose another device than the run.
        idle, _, hint = unused_devices(len(ranks), len(devices), own=one.facts.own).partition("; ")
        if idle:
            yield one.finding(WARN, idle, "a rank for each GPU", hint, rank=True)
        try:
            used.append(
                (
                    one,
                    devices[
                        device_index(one.local_rank, len(ranks), len(devices), own=one.facts.own)
                    ],
                )
            )
        except ConfigError as error:
            yield one.finding(FAIL, error.found, error.expected, error.hint, rank=True)
    return used


def _shared_gpus(used: Used) -> Iterator[Finding]:
    """Name ranks of a node that share a GPU, or that use MIG instances of one GPU."""
    hint = f"start with --gpus-per-node={len(used)} --gpu-bind=none, or with fewer tasks"
    for uuid, who in _users(used, "uuid").items():
        if len(who) > 1:
            found = f"{'two' if len(who) == 2 else len(who)} ranks with one GPU, {uuid}"
            yield who.finding(FAIL, found, "a GPU for each rank", hint)
    # NCCL compares hosts and PCI bus ids ("Duplicate GPU detected"), and all MIG instances of a GPU
    # have its bus id.
    for parent, who in _users(used, "parent").items():
        if parent and not all(one.facts.shared for one in who) and len(who) > 1:
            found = (
                f"ranks with MIG instances of one GPU, {parent}, which NCCL takes for one GPU used"
                " twice"
            )
            hint = "use whole GPUs, or with NCCL 2.31 or newer export NCCL_MULTI_RANK_GPU_ENABLE=1"
            yield who.finding(FAIL, found, "a GPU for each rank", hint)


def _users(used: Used, key: Literal["uuid", "parent"]) -> dict[str, Ranks[GpuFacts]]:
    users = group_by_key((device[key], one) for one, device in used)
    return {known: Ranks(who) for known, who in users.items()}


def _without_p2p(used: Used) -> Iterator[Finding]:
    """Warn of ranks whose GPUs on one node cannot read each other's memory, so NCCL copies through
    the host's memory.
    """
    alone = Ranks(one for one, device in used if one.facts.count == 1 and not device["parent"])
    users = _users(used, "uuid")
    if len(alone) > 1 and len(users) == len(used):
        found = "each rank sees its own GPU alone: no P2P and no NVLink among those of the node"
        hint = (
            f"start with --gpus-per-node={len(used)} --gpu-bind=none rather than with"
            " --gpus-per-task"
        )
        yield alone.finding(WARN, found, "all of the node's GPUs visible to each rank", hint)
    pairs = {
        (a, b): why for one, _ in used for a, b, why in one.facts.separate if {a, b} <= users.keys()
    }
    hint = (
        "see nvidia-smi topo -p2p r; if the GPUs support P2P, have IOMMU and PCIe's ACS switched"
        " off"
    )
    for why, theirs in group_by_key((why, pair) for pair, why in pairs.items()).items():
        who = Ranks(one for uuid in dict.fromkeys(chain(*theirs)) for one in users[uuid])
        yield who.finding(
            WARN, f"no P2P among GPUs of a node: {why}", "P2P by NVLink or PCIe", hint
        )


def _memory(one: Observation[GpuFacts], device: Device) -> Iterator[Finding]:
    total = device["total"]
    taken = device["total"] - device["free"]
    if total and taken > _TAKEN * total:
        found = f"{taken / 2**30:.1f} of {total / 2**30:.1f} GiB of the GPU's memory are taken"
        hint = f"end what uses {device['uuid']} (nvidia-smi), or take another GPU"
        yield one.finding(
            FAIL if taken > _FULL * total else WARN,
            found,
            "a GPU for this job alone",
            hint,
            rank=True,
        )


def _numa(one: Observation[GpuFacts], device: Device) -> Iterator[Finding]:
    cpus = one.facts.numa or []
    # The NUMA node is -1 if the kernel does not know it, as in many virtual machines.
    if device["numa"] >= 0 and cpus and device["numa"] not in cpus:
        found = f"CPUs on NUMA node {','.join(map(str, cpus))}, and the GPU on {device['numa']}"
        hint = (
            "bind tasks next to their GPUs (--cpu-bind=map_ldom), or do not bind them"
            " (--cpu-bind=none) and run with --bind=auto"
        )
        yield one.finding(WARN, found, "CPUs next to the GPU", hint, rank=True)


def _unlike(used: Used) -> Iterator[Finding]:
    seen = Ranks(one for one, _ in used)
    models = {one.rank: device["name"] for one, device in used}
    name = "NVIDIA driver"
    hint = "have the nodes brought to one version"
    yield from seen.differing(
        lambda one: f"{one.facts.driver} (CUDA {one.facts.cuda})", WARN, name, hint, ranks=False
    )
    hint = "ask for one model (--constraint, --gres=gpu:TYPE:N)"
    yield from seen.differing(lambda one: models[one.rank], WARN, "GPU", hint)


def summary(seen: Ranks[GpuFacts]) -> str:
    """Return one line: how many GPUs of each model there are, and their drivers' versions."""
    gpus = {
        (one.node, device["uuid"]): device["name"] for one in seen for device in one.facts.devices
    }
    if not gpus:
        return "no GPU"
    drivers = sorted({one.facts.driver for one in seen if one.facts.driver})
    named = ", ".join(f"{count} {name}" for name, count in sorted(Counter(gpus.values()).items()))
    return f"{named}, driver {', '.join(drivers)}"


CHECK = Check("gpus", GpuFacts, collect, evaluate, summary, within=_WITHIN)
