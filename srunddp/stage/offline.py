"""Chooses variables for nodes without internet, which keep Hugging Face's libraries from contacting
servers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Names and values fit huggingface_hub 0.23 to 2.4, transformers 4.41 to 5.23, datasets 2.19 to 5.2,
# tokenizers and torch.hub.
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_ON = ("1", "ON", "YES", "TRUE")  # compared in upper case


def offline(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to export so that libraries ask no server and all ranks use the same
    cache.

    Args:
        environ: the variables that the user exported; they are left as they are.
    """
    # Threads of the tokenizers library do not survive the fork of loader workers. The library would
    # switch them off by itself, but with a warning in each worker.
    wanted = {**dict.fromkeys(SWITCHES, "1"), **caches(environ), "TOKENIZERS_PARALLELISM": "false"}
    return {name: value for name, value in wanted.items() if name not in environ}


def caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the default cache folders of Hugging Face's libraries and of torch.hub, each by the
    name of the variable that can set it.
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
    """Return a line for each offline switch that the user exported with a value that is not on."""
    off = [name for name in SWITCHES if name in environ and environ[name].upper() not in _ON]
    return [
        f"{name}={environ[name]} is exported, which wins; expected 1 with --offline -> unset it"
        for name in off
    ]
