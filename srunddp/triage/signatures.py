"""The table of signs by which a line tells a cause; see signatures.yaml."""

import functools
import re
from dataclasses import dataclass
from importlib import resources

KINDS = ("primary", "symptom", "ending", "hint", "secondary", "noise")


@dataclass(frozen=True)
class Signature:
    """One sign of a cause; the attributes are those of the table."""

    id: str
    match: re.Pattern[str]
    unless: re.Pattern[str]
    kind: str
    sure: bool
    sample: str

    def fits(self, text: str) -> bool:
        """Whether the line says so."""
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
        """The sign that a line shows, the weightiest of several, of these the first."""
        lower = text.lower()
        if any(map(lower.__contains__, self.words)):
            fitting = [sign for sign in self.signs if sign.fits(text)]
        else:
            fitting = []
        return min(fitting, key=weight, default=None)


def weight(sign: Signature) -> int:
    # A line that is known to be harmless is so, whatever else it looks like; an exception's bare
    # type tells least.
    if sign.kind == "noise":
        return -1
    if sign.id == "script-error":
        return len(KINDS)
    return KINDS.index(sign.kind)


def says(name: str, text: str) -> re.Match[str] | None:
    """The first of the patterns of that name that the line shows."""
    return next(filter(None, (pattern.search(text) for pattern in table().patterns[name])), None)


@functools.cache
def table() -> SignatureTable:
    """The table that comes with srunddp."""
    import yaml

    text = resources.files(__package__).joinpath("signatures.yaml").read_text(encoding="utf-8")
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
    unless: str = "(?!)",
    kind: str = "primary",
    sure: bool | None = None,
) -> Signature:
    is_sure = kind in ("primary", "ending") if sure is None else sure
    return Signature(cause, re.compile(match), re.compile(unless), kind, is_sure, sample)
