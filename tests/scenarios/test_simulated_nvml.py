"""The simulated NVML of the tests is one that nvidia-ml-py could be."""

from __future__ import annotations

import inspect
import re

import pynvml

from srunddp.monitor.sampler import gpu as gpu_of_sampler
from srunddp.util import nvml
from tests.programs.nvml import pynvml as fake


def test_the_fake_has_the_names_of_the_package() -> None:
    """Functions with parameters, constants with values, errors with codes, structs with fields."""
    structs = {
        "c_nvmlMemory_t": fake.c_nvmlMemory_t(3, 1),
        "nvmlPciInfo_t": fake.nvmlPciInfo_t(""),
        "c_nvmlUtilization_t": fake.c_nvmlUtilization_t(1, 2),
        "c_nvmlFieldValue_t": fake.c_nvmlFieldValue_t(1),
        "c_nvmlGpmSupport_t": fake.c_nvmlGpmSupport_t(True),
        "c_nvmlGpmMetricsGet_t": fake.c_nvmlGpmMetricsGet_t(),
    }
    names = [name for name in vars(fake) if name.lower().startswith(("nvml", "c_nvml"))]
    assert len(names) > 30
    for name in names:
        ours = getattr(fake, name)
        theirs = getattr(pynvml, name)
        if name in structs:
            assert vars(structs[name]).keys() <= {field for field, _ in theirs._fields_}
        elif inspect.isclass(ours):
            assert issubclass(ours, fake.NVMLError)
            assert issubclass(theirs, pynvml.NVMLError)
            assert name == "NVMLError" or (str(theirs()), theirs().value) == (ours.text, ours.value)
        elif inspect.isfunction(ours):
            assert inspect.signature(ours) == inspect.signature(theirs)
        else:
            assert ours == theirs


def test_nothing_is_asked_of_nvml_that_the_package_lacks() -> None:
    source = inspect.getsource(nvml) + inspect.getsource(gpu_of_sampler)
    asked = set(re.findall(r"\b(?:pynvml|_?nvml)\.((?:c_)?nvml\w+|NVML\w+)", source))
    asked.discard("NVML_P2P_CAPS_INDEX_READ")  # in a comment
    assert len(asked) > 40
    assert [name for name in asked if not (hasattr(pynvml, name) and hasattr(fake, name))] == []
