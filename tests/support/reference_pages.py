"""Writes the pages of docs/reference that are made from the code: ``python -m
tests.support.reference_pages``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import cleandoc
from typing import Any

from srunddp.config.schema import text_of
from srunddp.train.config import Config
from tests.conftest import ROOT

PAGES = ROOT / "docs" / "reference"
SETTINGS = """\
# Settings

These are the fields of `srunddp.Config`, for `srunddp.Trainer`. Give each as `--key=value`, or in \
a YAML file that
`--config=FILE.yaml` names. The `--help` of a script that calls `srunddp.read_config()` prints \
them. `null` is None in
Python. [Old names](../troubleshooting.md#old-names-of-settings) are an error that names the new \
one.
[Files](files.md#files-in-output_dir) lists what is in `output_dir`.

```yaml
epochs: 20
output_dir: runs/first
checkpoint:
  every_minutes: 10 # in addition to the one after each epoch
```
"""
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def settings_page() -> str:
    """Return the page of all settings, made from the fields and docstrings of ``Config`` and of the
    dataclasses in it.
    """
    return "\n".join([SETTINGS, *_section(Config(), "")])


def _section(config: Any, prefix: str) -> Iterator[str]:
    """Yield the table of the keys of a dataclass, and then the tables of the dataclasses in it,
    each with a heading.
    """
    summary, _, attributes = cleandoc(config.__doc__).partition("\n\nAttributes:\n")
    meanings = dict(_ATTRIBUTE.findall(attributes))
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    groups = {name: value for name, value in values.items() if is_dataclass(value)}
    if prefix:
        yield f"## {prefix.rstrip('.')}\n\n{_markdown(summary)}\n"
    yield "| key | default | meaning |\n|---|---|---|"
    for name in [each for each in values if each not in groups]:
        yield (
            f"| `{prefix}{name}` | `{text_of(values[name])}` |"
            f" {_markdown(meanings[name]).removesuffix('.')} |"
        )
    yield ""
    for name, group in groups.items():
        yield from _section(group, f"{prefix}{name}.")


def _markdown(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    (PAGES / "settings.md").write_text(settings_page())
