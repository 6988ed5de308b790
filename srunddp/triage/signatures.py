"""Reads signatures.yaml, the table of signs by which the cause of a line is recognised."""

import functools
import re
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

from srunddp.util.xid import XidKind, pattern

# The text before a fault of a GPU in srunddp's own lines.
_FAULT = r"GPU \d+ \([^)]*\) of \S+: "
# The text before the number of an Xid, in the kernel's log and in srunddp's own lines.
_XID = rf"(?:Xid \(PCI:[^)]*\): |{_FAULT}Xid )"


class Kind(StrEnum):
    """The part that a line plays in the end of a run. signatures.yaml explains all values except
    WORD and REPORT.

    WORD and REPORT come from no sign: WORD is a line about a failure that no sign matches, REPORT
    is a launcher's line on how a rank ended.
    """

    PRIMARY = "primary"
    SYMPTOM = "symptom"
    ENDING = "ending"
    HINT = "hint"
    SECONDARY = "secondary"
    NOISE = "noise"
    WORD = "word"
    REPORT = "report"


# The kinds that signatures.yaml uses. If several signs match one line, the sign whose kind comes
# first in this order counts.
KINDS = (Kind.PRIMARY, Kind.SYMPTOM, Kind.ENDING, Kind.HINT, Kind.SECONDARY, Kind.NOISE)


@dataclass(frozen=True)
class Signature:
    """One sign of a cause; signatures.yaml explains the attributes."""

    id: str
    match: re.Pattern[str]
    unless: re.Pattern[str]
    kind: Kind
    sure: bool
    sample: str

    def fits(self, text: str) -> bool:
        """Tell whether the sign matches a line: ``match`` is found in it, and ``unless`` is not."""
        return bool(self.match.search(text)) and not self.unless.search(text)


@dataclass(frozen=True)
class Cause:
    """What the user is told about a cause.

    Attributes:
        cause: The explanation.
        hint: What to do about it.
        behind: Matches the text of later failures that this cause explains; None if it explains
            only failures of unknown cause.
    """

    cause: str
    hint: str
    behind: re.Pattern[str] | None = None


@dataclass(frozen=True)
class SignatureTable:
    """The content of signatures.yaml.

    Attributes:
        words: Texts in lower case; a line that contains none of them shows no sign.
        patterns: The patterns for lines that are no signs, by the name that :func:`says` takes.
        signs: The signs of all causes, in the order of the file.
        causes: The causes by their ids.
    """

    words: tuple[str, ...]
    patterns: dict[str, list[re.Pattern[str]]]
    signs: tuple[Signature, ...]
    causes: dict[str, Cause]

    def read(self, text: str) -> Signature | None:
        """Find the sign that a line shows; None if it shows none.

        If several signs match, the one with the lowest :func:`weight` counts; of equal ones, the
        first in the table.
        """
        lower = text.lower()
        # Look for the words first: most lines contain none, which saves matching some 200 regular
        # expressions.
        if not any(map(lower.__contains__, self.words)):
            return None
        fitting = [sign for sign in self.signs if sign.fits(text)]
        return min(fitting, key=weight, default=None)


def weight(sign: Signature) -> int:
    """Return a number by which signs that match the same line are compared: the sign with the
    lowest number counts.
    """
    # Noise comes first: a line known to be harmless is harmless, whatever else matches. The sign
    # "script-error" comes last, because the type of an exception alone says least about the cause.
    if sign.kind is Kind.NOISE:
        return -1
    if sign.id == "script-error":
        return len(KINDS)
    return KINDS.index(sign.kind)


def says(name: str, text: str) -> re.Match[str] | None:
    """Search a line for the patterns that have one name in the second document of signatures.yaml.

    Returns:
        The match of the first pattern that is found; None if there is none.
    """
    return next(filter(None, (pattern.search(text) for pattern in table().patterns[name])), None)


@functools.cache
def table() -> SignatureTable:
    """Read signatures.yaml, which comes with srunddp; later calls return the same table."""
    import yaml

    text = resources.files(__package__).joinpath("signatures.yaml").read_text(encoding="utf-8")
    # Use libyaml's parser if PyYAML was built with it: it is several times faster.
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


@functools.cache
def _placeholders() -> dict[str, str]:
    """Return the placeholders in signatures.yaml with the patterns that replace them. The numbers
    of Xids come from util/xid.py.
    """
    return {
        "{XID}": _XID,
        "{FAULT}": _FAULT,
        "{HARDWARE}": pattern([XidKind.HARDWARE]),
        "{LINK}": pattern([XidKind.LINK]),
    }


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
    for name, meaning in _placeholders().items():
        match = match.replace(name, meaning)
    return Signature(cause, re.compile(match), re.compile(unless), Kind(kind), sure, sample)
