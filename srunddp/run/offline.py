"""Variables for nodes without internet: ask no server, look in one cache, and take no more threads than CPUs.

Names and values are those of huggingface_hub 0.23 to 2.4, transformers 4.41 to 5.23, datasets 2.19 to 5.2, tokenizers
and torch.hub. What the user exported stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from srunddp.bootstrap.cpus import share

SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # torch heeds the first that is set
_ON = ("1", "ON", "YES", "TRUE")  # in any case


def offline(environ: Mapping[str, str], cpus: int, sharers: int) -> dict[str, str]:
    """What is to be exported.

    Args:
        environ: of the rank; what is in it is left out.
        cpus: that the rank may use; sharers: ranks that share them, see :func:`srunddp.bootstrap.cpus.share`.
    """
    wanted = {**dict.fromkeys(SWITCHES, "1"), **caches(environ), "TOKENIZERS_PARALLELISM": "false"}
    if not any(name in environ for name in THREADS):
        wanted["OMP_NUM_THREADS"] = str(share(cpus, sharers, environ))
    return {name: value for name, value in wanted.items() if name not in environ}


def caches(environ: Mapping[str, str]) -> dict[str, str]:
    """The cache folders of Hugging Face's libraries and of torch.hub, where they look unless told otherwise."""
    folder = environ.get("XDG_CACHE_HOME") or "~/.cache"
    if "HOME" in environ and folder.startswith("~/"):
        folder = environ["HOME"] + folder[1:]
    folder = os.path.abspath(os.path.expanduser(folder))
    return {"HF_HOME": os.path.join(folder, "huggingface"), "TORCH_HOME": os.path.join(folder, "torch")}


def contradictions(environ: Mapping[str, str]) -> list[str]:
    """A line for each switch that the user exported as off."""
    off = [name for name in SWITCHES if name in environ and environ[name].upper() not in _ON]
    return [f"{name}={environ[name]} is exported, which wins; expected 1 with --offline -> unset it" for name in off]
