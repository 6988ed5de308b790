"""The sections that every job script has, each a list of lines, and texts as the shell, sbatch and Slurm read them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from shlex import quote as word

from srunddp.sbatch.spec import LaunchSpec


@dataclass(frozen=True)
class Provenance:
    """How a script came to be.

    Attributes:
        command: the words that wrote it.
        found_venv: no environment was named, so the script uses the one that was active then.
    """

    command: tuple[str, ...]
    found_venv: bool = False


_NO_VENV = "unset VIRTUAL_ENV  # that of the shell which submitted this"


def joined(sections: Sequence[Sequence[str]]) -> str:
    """The script, with an empty line between its sections."""
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def modules(start: LaunchSpec) -> list[str]:
    """Loaded by a shell function of the site's."""
    if not start.modules and not start.module_purge:
        return []
    load = ["module load " + " ".join(map(word, start.modules))] if start.modules else []
    # Lmod and Environment Modules read variables that need not be set.
    return [
        "# Modules read variables that are not set.",
        "set +u",
        *(["module purge"] if start.module_purge else []),
        *load,
        "set -u",
    ]


def environment(start: LaunchSpec, written: Provenance) -> list[str]:
    """The activation of a virtual or a conda environment."""
    if start.conda:
        return [
            "# conda's functions read variables that are not set.",
            "set +u",
            'eval "$("${CONDA_EXE:-conda}" shell.bash hook)"',
            f"conda activate {word(start.conda)}",
            "set -u",
            _NO_VENV,
        ]
    if not start.venv:
        return [_NO_VENV] if start.contained else []
    origin = " No environment was named: it was active in the shell that wrote this." if written.found_venv else ""
    folder = word(start.venv) if os.path.isabs(start.venv) else f'"$PWD"/{word(start.venv)}'
    return [
        f"# What its bin/activate does.{origin}",
        f"export VIRTUAL_ENV={folder}",
        'export PATH="$VIRTUAL_ENV/bin:$PATH"',
        "unset PYTHONHOME",
    ]


def exports(start: LaunchSpec) -> list[str]:
    """The user's variables."""
    pairs = (each.partition("=") for each in start.env)
    return [f"export {name}={word(value)}" for name, _, value in pairs]


def run(start: LaunchSpec, command: str, monitoring: Sequence[str] = (), *, staged: bool = False) -> list[str]:
    """``srunddp run`` in its lines: the options, and the script with its arguments."""
    options = [
        *(["--staged"] if staged else []),
        *(["--offline"] if start.offline else []),
        *([f"--backend={start.backend}"] if start.backend else []),
        *([f"--ifaces={start.ifaces}"] if start.ifaces else []),
        *([f"--log-dir={start.log_dir}"] if start.rank_logs else []),
        *monitoring,
        *start.run_options,
    ]
    if not options:
        return [f"{command} run {words_of_script(start)}"]
    return [" ".join([command, "run", *map(word, options)]), words_of_script(start)]


def check(start: LaunchSpec, command: str, *, staged: bool = False) -> list[str]:
    """``srunddp check`` in its lines."""
    options = [
        *(["--staged"] if staged else []),
        *([f"--backend={start.backend}"] if start.backend else []),
        *([f"--ifaces={start.ifaces}"] if start.ifaces else []),
        f"--output-dir={start.log_dir}",
    ]
    return [" ".join([command, "check", *map(word, options), word(as_path(start.script or ""))])]


def words_of_script(start: LaunchSpec) -> str:
    """The script and its arguments."""
    return " ".join(map(word, (as_path(start.script or ""), *start.arguments)))


def as_path(name: str) -> str:
    """A file's name that no command takes for an option."""
    return f"./{name}" if name.startswith("-") else name


def directive(option: str, value: object = None) -> str:
    """A line that sbatch reads: its parser knows quotes, ``#``, and a backslash before any letter."""
    if value is None:
        return f"#SBATCH --{option}"
    text = str(value)
    if not re.fullmatch(r"[\w%+,./:=@*\[\]-]*", text, re.ASCII):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{option}={text}"


def pattern(path: str) -> str:
    """A path without a backslash, for options in which Slurm replaces ``%j`` and the like."""
    return path.replace("%", "%%")


def continued(lines: Iterable[str]) -> list[str]:
    """One command on several lines."""
    first, *more = lines
    parts = [first, *(f"  {line}" for line in more)]
    return [*(f"{part} \\" for part in parts[:-1]), parts[-1]]
