"""torchvision beside a torch that it was not built for."""

from __future__ import annotations

from tests.train.conftest import HERE, run_python

IMPORT = "operator torchvision::nms does not exist"


def test_after_a_failed_import_torchvision_works_or_raises() -> None:
    *failures, first, second = run_python(HERE / "torchvision_after_a_failure.py").splitlines()
    if not failures:  # a build that fits
        assert [first, second] == ["kept [1]"] * 2
        return
    assert failures == [IMPORT] * 2
    assert first == "error Couldn't load custom C++ ops"
    assert second.startswith("error Could not run 'torchvision::nms'")
