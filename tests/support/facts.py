"""Checks the names and numbers in a message without its wording."""

from __future__ import annotations

import re


def tells(text: str, *facts: object) -> bool:
    """Return whether one line of the text contains all facts in this order, each as complete
    words.
    """
    return re.search(".*?".join(map(_as_whole_words, facts)), text) is not None


def _as_whole_words(fact: object) -> str:
    text = str(fact)
    before = r"(?<!\w)" if text[0].isalnum() else ""
    after = r"(?!\w)" if text[-1].isalnum() else ""
    return before + re.escape(text) + after
