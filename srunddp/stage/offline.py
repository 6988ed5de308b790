"""Variables for nodes without internet, with which Hugging Face's libraries ask no server."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Names and values are those of huggingface_hub 0.23 to 2.4, transformers 4.41 to 5.23, datasets
# 2.19 to 5.2, tokenizers and torch.hub.
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_ON = ("1", "ON", "YES", "TRUE")  # in any case


def offline(environ: Mapping[str, str]) -> dict[str, str]:
    """Tell what to export so that no server is asked, and all ranks look in one cache.

    Args:
        environ: what the user exported, which stays.
    """
    # Threads of the tokenizers library do not survive the fork of loader workers. It switches them
    # off by itself then, and warns in each worker.
    wanted = {**dict.fromkeys(SWITCHES, "1"), **caches(environ), "TOKENIZERS_PARALLELISM": "false"}
    return {name: value for name, value in wanted.items() if name not in environ}


def caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the cache folders of Hugging Face's libraries and of torch.hub, where they look unless
    told otherwise.
    """
    folder = environ.get("XDG_CACHE_HOME") or "~/.cache"
    if "HOME" in environ and folder.startswith("~/"):
        folder = environ["HOME"] + folder[1:]
    folder = os.path.abspath(os.path.expanduser(folder))
    return {
        "HF_HOME": os.path.join(folder, "huggingface"),
        "TORCH_HOME": os.path.join(folder, "torch"),
    }


def contradictions(environ: Mapping[str, str]) -> list[str]:
    """Write a line for each switch that the user exported as off."""
    off = [name for name in SWITCHES if name in environ and environ[name].upper() not in _ON]
    return [
        f"{name}={environ[name]} is exported, which wins; expected 1 with --offline -> unset it"
        for name in off
    ]
