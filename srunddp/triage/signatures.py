"""The table of signs by which a line tells a cause; see signatures.yaml."""

import functools
import re
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources


class Kind(StrEnum):
    """What a line says of an end; the values of all but the last two stand in signatures.yaml.

    WORD and REPORT come from no sign: a line of a failure that no sign knows, and a launcher's line
    on how a rank ended.
    """

    PRIMARY = "primary"
    SYMPTOM = "symptom"
    ENDING = "ending"
    HINT = "hint"
    SECONDARY = "secondary"
    NOISE = "noise"
    WORD = "word"
    REPORT = "report"


# The kinds of the table. Where several signs fit one line, the first of these counts.
KINDS = (Kind.PRIMARY, Kind.SYMPTOM, Kind.ENDING, Kind.HINT, Kind.SECONDARY, Kind.NOISE)


@dataclass(frozen=True)
class Signature:
    """One sign of a cause; the attributes are those of the table."""

    id: str
    match: re.Pattern[str]
    unless: re.Pattern[str]
    kind: Kind
    sure: bool
    sample: str

    def fits(self, text: str) -> bool:
        """Tell whether the line says so."""
        return bool(self.match.search(text)) and not self.unless.search(text)


@dataclass(frozen=True)
class Cause:
    """What an id stands for."""

    cause: str
    hint: str
    behind: re.Pattern[str] | None = None  # later failures, by id, line and code, that it explains


@dataclass(frozen=True)
class SignatureTable:
    """All signs, in the order of the table, what their ids stand for, and the patterns that are no
    signs of a cause.
    """

    words: tuple[str, ...]
    patterns: dict[str, list[re.Pattern[str]]]
    signs: tuple[Signature, ...]
    causes: dict[str, Cause]

    def read(self, text: str) -> Signature | None:
        """Find the sign that a line shows: of several the weightiest, of equals the first."""
        lower = text.lower()
        # Most lines have none of the words. This saves some 200 regular expressions for each.
        if not any(map(lower.__contains__, self.words)):
            return None
        fitting = [sign for sign in self.signs if sign.fits(text)]
        return min(fitting, key=weight, default=None)


def weight(sign: Signature) -> int:
    """Rank a sign among those that fit the same line: the lowest counts."""
    # A line that is known to be harmless is so, whatever else it looks like; an exception's bare
    # type tells least.
    if sign.kind is Kind.NOISE:
        return -1
    if sign.id == "script-error":
        return len(KINDS)
    return KINDS.index(sign.kind)


def says(name: str, text: str) -> re.Match[str] | None:
    """Search a line for the patterns of one name, as in the second document of the table.

    Returns:
        The match of the first pattern that fits, or None.
    """
    return next(filter(None, (pattern.search(text) for pattern in table().patterns[name])), None)


@functools.cache
def table() -> SignatureTable:
    """Read the table that comes with srunddp, once."""
    import yaml

    text = resources.files(__package__).joinpath("signatures.yaml").read_text(encoding="utf-8")
    # libyaml, where PyYAML was built with it, reads the table several times faster.
    words, patterns, entries = yaml.load_all(
        text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    signs = tuple(_sign(entry["id"], **sign) for entry in entries for sign in entry["signs"])
    named = {name: [re.compile(each) for each in several] for name, several in patterns.items()}
    causes = {}
    for entry in entries:
        behind = re.compile(entry["behind"]) if "behind" in entry else None
        causes[entry["id"]] = Cause(entry["cause"], entry["hint"], behind)
    return SignatureTable(tuple(words), named, signs, causes)


def _sign(
    cause: str,
    match: str,
    sample: str,
    unless: str = "(?!)",  # matches nothing
    kind: str = "primary",
    sure: bool | None = None,
) -> Signature:
    if sure is None:
        sure = kind in (Kind.PRIMARY, Kind.ENDING)
    return Signature(cause, re.compile(match), re.compile(unless), Kind(kind), sure, sample)
