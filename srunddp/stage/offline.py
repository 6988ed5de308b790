"""Chooses environment variables that keep Hugging Face's libraries from contacting servers, for
nodes without internet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# The names and values of variables in this module fit huggingface_hub 0.23 to 2.4, transformers
# 4.41 to 5.23, datasets 2.19 to 5.2, tokenizers and torch.hub.
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_ON = ("1", "ON", "YES", "TRUE")  # compared in upper case


def offline(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to export so that libraries ask no server and all ranks use the same
    cache.

    Args:
        environ: The variables that the user exported. None of these is in the result.
    """
    # Threads of the tokenizers library do not survive the fork of loader workers. Without
    # TOKENIZERS_PARALLELISM, the library itself would stop using threads, but print a warning in
    # each worker.
    wanted = {**dict.fromkeys(SWITCHES, "1"), **caches(environ), "TOKENIZERS_PARALLELISM": "false"}
    return {name: value for name, value in wanted.items() if name not in environ}


def caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the default cache folders of Hugging Face's libraries and of torch.hub, by the name of
    the variable that would replace each.
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
    """Return a line for the user for each of :data:`SWITCHES` that is exported with a value that
    does not turn it on.
    """
    off = [name for name in SWITCHES if name in environ and environ[name].upper() not in _ON]
    return [
        f"{name}={environ[name]} is exported, which wins; expected 1 with --offline -> unset it"
        for name in off
    ]
