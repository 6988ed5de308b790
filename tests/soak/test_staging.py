"""Archives nobody thought of, by the ten thousands: nothing outside is ever touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.stage.conftest import scene_in
from tests.support.archives import Member, good, written
from tests.support.hostile_archives import archives_of, flipped, inside_alone

pytestmark = pytest.mark.soak


def test_no_names_and_links_lead_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene, taken = scene_in(tmp_path), [0, 0]

    @settings(max_examples=20_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(members=archives_of())
    def one(members: list[Member]) -> None:
        taken[inside_alone(scene, members)] += 1

    one()
    with capsys.disabled():
        print(f"\narchives of made-up names: {taken[0]} refused, {taken[1]} unpacked, 0 files outside")
    assert min(taken) > 1000


def test_every_flipped_bit_of_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = scene_in(tmp_path)
    data = written(scene.own / "a.tar", good()).read_bytes()
    refused = flipped(scene, data, range(8 * len(data)))
    with capsys.disabled():
        print(f"\narchives with a flipped bit and a right hash: {refused} of {8 * len(data)} refused, 0 files outside")
    assert refused > 4 * len(data)
