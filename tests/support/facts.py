"""What a message tells, in whatever words: the names and numbers in it."""

from __future__ import annotations

import re


def tells(text: str, *facts: object) -> bool:
    """Whether one line of the text has all of these in this order, each as whole words."""
    return re.search(".*?".join(map(_as_whole_words, facts)), text) is not None


def _as_whole_words(fact: object) -> str:
    text = str(fact)
    before = r"(?<!\w)" if text[0].isalnum() else ""
    after = r"(?!\w)" if text[-1].isalnum() else ""
    return before + re.escape(text) + after
