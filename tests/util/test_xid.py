"""The one list of Xids, by which a run, a check and triage go."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from srunddp.supervisor.failure import GpuFault, GpuFaultKind
from srunddp.supervisor.gpu_health import Gpu, GpuState, faults_of
from srunddp.triage.collect import collect
from srunddp.triage.diagnose import diagnose
from srunddp.triage.logs import find
from srunddp.triage.signatures import table
from srunddp.util.xid import XIDS, XidKind, pattern, xid
from tests.support.starting import write

# What NVIDIA's device plugin for Kubernetes skips as errors of applications.
SKIPPED = [13, 31, 43, 45, 68, 109]
PROGRAM = [13, 31, 43, 68]


def test_the_programs_own() -> None:
    assert [each for each in XIDS if xid(each).kind is XidKind.PROGRAM] == PROGRAM
    assert str(xid(79)) == "Xid 79, fallen off the bus"
    assert xid(79).kind is XidKind.HARDWARE


def test_none_that_nvidia_skips_counts_against_a_node() -> None:
    kinds = {number: xid(number).kind for number in SKIPPED}
    # Nor do these two speak for it: 45 follows whatever has ended the program.
    neither = dict.fromkeys([45, 109], XidKind.OTHER)
    assert kinds == dict.fromkeys(PROGRAM, XidKind.PROGRAM) | neither


def test_a_number_that_is_not_in_the_list_blames_nobody() -> None:
    assert xid(999).kind is XidKind.OTHER
    assert str(xid(999)) == "Xid 999"


def test_a_pattern_matches_the_numbers_of_its_kinds_alone() -> None:
    numbers = re.compile(rf"{pattern([XidKind.PROGRAM])}\b")
    assert [each for each in range(200) if numbers.match(str(each))] == PROGRAM


@pytest.mark.parametrize(
    ("number", "cause", "kind"),
    [
        *((number, "gpu-lost", "symptom") for number in PROGRAM),
        (79, "gpu-lost", "primary"),
        (48, "gpu-lost", "primary"),
        # Whose fault these are is not known.
        *((number, "gpu-lost", "symptom") for number in (45, 69, 94, 109, 999)),
        (74, "nccl-internal", "primary"),
        (149, "nccl-internal", "primary"),
    ],
)
@pytest.mark.parametrize(
    "line", ["NVRM: Xid (PCI:0000:81:00): {}, pid=42", "srunddp: GPU 3 (GPU-1a2b) of n7: Xid {}, x"]
)
def test_triage_goes_by_the_list(number: int, cause: str, kind: str, line: str) -> None:
    sign = table().read(line.format(number))
    assert sign
    assert (sign.id, sign.kind) == (cause, kind)


@pytest.mark.parametrize(
    "now",
    [
        GpuState(is_gone=True),
        GpuState(needs_reset=True),
        GpuState(has_remap_failed=True),
        GpuState(errors=1),
        GpuState(errors=2),
    ],
)
def test_triage_knows_the_lines_on_failed_hardware(now: GpuState) -> None:
    gpu = Gpu(3, object(), "GPU-1a2b", {}, frozenset())
    [fault] = faults_of(gpu, now, GpuState(errors=0))
    assert fault.kind == GpuFaultKind.HARDWARE.value
    sign = table().read(f"srunddp: {replace(fault, node='n7')}")
    assert sign
    assert (sign.id, sign.kind) == ("gpu-lost", "primary")


def test_triage_blames_no_gpu_that_is_hot() -> None:
    fault = GpuFault(3, "GPU-1a2b", "slowed by heat now", GpuFaultKind.OTHER.value, node="n7")
    assert table().read(f"srunddp: {fault}") is None


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("Xid 79, fallen off the bus", "gpu-lost"),
        ("it does not answer any more", "gpu-lost"),
        ("2 uncorrected memory errors (ECC) since the start of the run", "gpu-lost"),
        ("Xid 31, access to memory that is not mapped", "device-assert"),
        ("slowed by heat now", "device-assert"),
    ],
)
def test_the_hardware_explains_the_failure_that_srunddp_has_named(
    fault: str, cause: str, tmp_path: Path
) -> None:
    """The program's own fault does not, and the failure stays that of its rank."""
    error = "RuntimeError: CUDA error: unspecified launch failure"
    log = write(
        tmp_path / "job.out",
        f"step 1\nsrunddp: rank 1 on node02 failed: {error} (exit code 1)\n"
        f"Traceback (most recent call last):\n{error}\n"
        f"srunddp: GPU 3 (GPU-1a2b) of node02: {fault}\nsrunddp: ended with it: rank 0 on node01\n",
    )
    found = diagnose(collect(find([str(log)])))
    assert (found.cause, found.rank, found.node) == (cause, 1, "node02")
