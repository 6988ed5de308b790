"""The mutants that were looked at and found to be equivalent: no test can tell them from the code.

They are in equivalent.yaml, by file, function and the text of the lines, as line numbers move.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.mutants.mutations import Place

FILE = Path(__file__).with_name("equivalent.yaml")


def read_equivalents(file: Path = FILE) -> dict[Place, str]:
    """The reason for each."""
    found: dict[Place, str] = {}
    for entry in yaml.safe_load(file.read_text()) or []:
        place = Place(entry["file"], entry["function"], entry["before"], entry["after"])
        if not entry["reason"]:
            raise ValueError(f"{file}: no reason for {place}")
        found[place] = entry["reason"]
    return found


def to_yaml(place: Place) -> str:
    """An entry to copy into the file, for somebody to add the reason."""
    entry = {
        "file": place.file,
        "function": place.function,
        "before": place.before,
        "after": place.after,
    }
    return yaml.safe_dump([entry | {"reason": ""}], sort_keys=False, width=1000)
