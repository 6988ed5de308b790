"""Backend, device, threads, copies, and what the ranks have in common: their run's name, proof, and time limits."""

from __future__ import annotations

import datetime
import re

from srunddp.bootstrap.environment.cpus import THREADS
from srunddp.bootstrap.process_group.device import device_index, has_own
from srunddp.bootstrap.rendezvous import discovery
from srunddp.bootstrap.rendezvous.auth import MUNGE_SOCKET
from srunddp.errors import ConfigError
from srunddp.explain.context import UNKNOWN, ExplainContext, Row
from srunddp.stage.enter import VARIABLE
from srunddp.stage.paths import offline

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SLURMS = "Slurm's numbers of the node, which need not be CUDA's"
_NOT_CUDAS = {
    "SLURM_STEP_GPUS": _SLURMS,
    "SLURM_JOB_GPUS": _SLURMS,
    "SLURM_GPUS_ON_NODE": _SLURMS,
    "NVIDIA_VISIBLE_DEVICES": "what a container is given",
}


def rows(case: ExplainContext) -> list[Row]:
    """All of them."""
    common = [_backend(case), _device(case), _token(case), _proof(case), *_limits(case)]
    return [*common, _threads(case), *_offline(case), *_staged(case)]


def _backend(case: ExplainContext) -> Row:
    if case.asked.backend:
        return Row("backend", case.asked.backend, "--backend")
    return Row("backend", "auto", "the default")


def visible_devices(text: str) -> int:
    """How many devices ``CUDA_VISIBLE_DEVICES`` lets through, at most: CUDA stops at the first that is none."""
    count = 0
    for item in text.split(",") if text.strip() else ():
        if not re.fullmatch(r"\s*(\d+|(GPU|MIG)-\S+)\s*", item):
            break
        count += 1
    return count


def _device(case: ExplainContext) -> Row:
    passed_over = tuple(f"{case.shown(name)}: {why}" for name, why in _NOT_CUDAS.items() if name in case.variables)
    environment = case.environment
    if _VISIBLE not in case.variables:
        rule = "no GPU: cpu; one: cuda:0; one for each rank of the node: cuda:LOCAL_RANK"
        return Row("device", UNKNOWN, f"torch counts, as {_VISIBLE} is not set; {rule}", passed_over)
    shown, visible = case.shown(_VISIBLE), visible_devices(case.variables[_VISIBLE])
    if visible == 0:
        return Row("device", "cpu", f"{shown}: no GPU", passed_over)
    local_size = environment.local_world_size if environment else None
    if environment is None or (local_size is None and visible > 1):
        return Row("device", UNKNOWN, f"{shown}: {visible} visible, if they are there", passed_over)
    try:
        own = has_own(case.variables, local_size or 1, visible)
        index = device_index(environment.local_rank, local_size or 1, visible, own=own)
    except ConfigError as error:
        return Row("device", UNKNOWN, f"{shown}, if they are there: {error}", passed_over)
    rule = (
        "the only one"
        if visible == 1
        else f"the first of {visible} of its own"
        if own
        else f"local rank {environment.local_rank} of {visible} visible"
    )
    return Row("device", f"cuda:{index}", f"{rule}, {shown}, if there is such a GPU", passed_over)


def _token(case: ExplainContext) -> Row:
    environment = case.environment
    if environment is None:
        return Row("token", UNKNOWN, "see the error")
    if environment.step:
        return Row("token", discovery.token(environment), "job, step and restart count; TORCHELASTIC_RUN_ID")
    if environment.master:
        return Row("token", discovery.token(environment), "MASTER_ADDR:MASTER_PORT")
    return Row("token", "random", "of this process" if case.alone else "of rank 0, told when the ranks meet")


def _proof(case: ExplainContext) -> Row:
    if case.environment is None or not (case.alone or case.environment.channels):
        return Row("proof", UNKNOWN, "see the error")
    channel = discovery.on_channel(case.environment)
    if case.alone:
        return Row("proof", "none", "a world of one")
    passed_over = tuple(f"{shown}: not needed" for shown in case.there(MUNGE_SOCKET))
    if channel in discovery.TELLING:
        return Row("proof", "secret", f"carried over {channel}", passed_over)
    if case.here is None:
        return Row("proof", UNKNOWN, "munge where it works on that node, else none")
    kind, socket = case.here.proof(), "".join(f", {shown}" for shown in case.there(MUNGE_SOCKET))
    why = "munge works on this node" if kind == "munge" else "munge does not work on this node"
    return Row("proof", kind, f"{why}{socket}", (f"secret: {channel} carries none",))


def _limits(case: ExplainContext) -> list[Row]:
    found = [Row(name, f"{seconds:g} s", why) for name, (seconds, why) in case.asked.limits.items()]
    if end := _time(case.variables.get("SLURM_JOB_END_TIME", "")):
        found.append(Row("job's end", end, case.shown("SLURM_JOB_END_TIME")))
    return found


def _time(text: str) -> str:
    if not re.fullmatch(r"\d{1,11}", text):
        return ""
    return datetime.datetime.fromtimestamp(int(text), datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _threads(case: ExplainContext) -> Row:
    """Of torch in a script without ``Trainer``'s setting."""
    first, *others = [*case.there(*THREADS), ""]
    if first:
        return Row(
            "threads", first.partition("=")[2], first, tuple(f"{one}: torch reads both" for one in others if one)
        )
    if case.asked.offline:
        return Row("threads", UNKNOWN, "--offline: this rank's CPUs by the ranks that share them, known when they meet")
    rule = "torch's choice, with Trainer at most this rank's CPUs; its share of them where ranks share the node"
    return Row("threads", UNKNOWN, rule)


def _offline(case: ExplainContext) -> list[Row]:
    if not case.asked.offline:
        return []
    exported = offline(case.variables)
    return [
        Row(name, exported[name], "--offline") if name in exported else Row(name, case.variables[name], "exported")
        for name in offline({})
    ]


def _staged(case: ExplainContext) -> list[Row]:
    if case.asked.staged is None:
        return []
    why = {True: "seen here", False: "a copy, as this node does not see it"}
    return [Row("staged", case.asked.staged.folder, case.shown(VARIABLE))] + [
        Row(f"staged {place.role}", place.here, f"{place.path}: {why[place.here == place.path]}")
        for place in case.asked.staged.places
    ]
