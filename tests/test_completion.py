"""Real shells complete command lines of srunddp at a terminal, and neither the script nor torch is
looked at for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, tool
from tests.support.starting import srunddp, until, write

LIMIT = 60.0  # a key takes less than a second
SHELLS = {
    "bash": ("--noprofile", "--rcfile", "completion", "-i"),
    "zsh": ("-d", "-i"),
    "fish": ("--interactive",),
}
FILES = {
    "bash": {"completion": "{script}"},
    "zsh": {
        ".zshrc": "autoload -U compinit; compinit -D; . ./completion",
        "completion": "{script}",
    },
    "fish": {".config/fish/completions/srunddp.fish": "{script}"},
}
# What a shell asks goes to srunddp; what is typed is written down.
PROGRAM = f"""\
#!/bin/sh
[ -z "$_SRUNDDP_COMPLETE" ] || exec {sys.executable} {ROOT}/bin/srunddp "$@"
echo "$*" >>"$HOME/typed"
"""
MARK = "open('ran', 'w')\n"
SITE = {
    "bin/srunddp": PROGRAM,
    "bin/sinfo": (
        '#!/bin/sh\n[ "$*" = "-h -o %R" ] && printf "%s\\n" debug gpu-large gpu-small debug\n'
    ),
    "train.py": MARK,
    "path/torch.py": MARK,
    "traces/1.csv": "",
    "logs/1.log": "",
}


class Terminal:
    """A shell at a pseudo-terminal, in a home of its own."""

    def __init__(self, shell: str, home: Path) -> None:
        self.master, slave = os.openpty()
        os.set_blocking(self.master, False)
        termios.tcsetwinsize(slave, (50, 150))
        self.typed = home / "typed"
        self.shown = ""
        self.home = home
        environment = {
            "HOME": str(home),
            "PATH": f"{home}/bin:/usr/bin:/bin",
            "TERM": "xterm",
            "LANG": "C.UTF-8",
        }
        self.process = subprocess.Popen(
            ["setsid", "--ctty", shell, *SHELLS[shell]],
            cwd=home,
            env=environment | {"PYTHONPATH": str(home / "path"), "ZDOTDIR": str(home)},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)

    def read(self) -> str:
        """All that was shown since the last line was entered, without the terminal's own
        sequences.
        """
        with contextlib.suppress(BlockingIOError):
            self.shown += os.read(self.master, 1 << 16).decode(errors="replace")
        return re.sub(r"\x1b(\[[0-9;?>=]*[A-Za-z]|\][^\x07]*\x07|[()].|.)|\r", "", self.shown)

    def enter(self, keys: str, *names: str) -> str:
        """Type keys, wait until the shell lists these names, and type Enter; the arguments that the
        command got.
        """
        before = len(self.typed.read_text())
        self.shown = ""
        os.write(self.master, keys.encode())
        until(
            lambda: all(name in self.read().replace(keys.strip(), "") for name in names),
            LIMIT,
            self.read,
        )
        os.write(self.master, b"\r")
        until(lambda: self.read() and len(self.typed.read_text()) > before, LIMIT, self.read)
        return self.typed.read_text()[before:].strip()


@pytest.fixture(scope="module", params=SHELLS)
def terminal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Terminal]:
    home = tmp_path_factory.mktemp(request.param)
    script = srunddp("completion", request.param, folder=home)
    assert (script.returncode, script.stderr) == (0, "")
    for name, text in (SITE | FILES[request.param] | {"typed": ""}).items():
        write(home / name, text.replace("{script}", script.stdout)).chmod(0o755)
    started = Terminal(tool(request.param).rpartition("/")[2], home)
    yield started
    started.process.kill()
    started.process.wait()
    os.close(started.master)
    assert not (home / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "arguments"),
    [
        ("che", "check"),
        ("help stag", "help stage"),
        ("ifaces sc", "ifaces scan"),
        ("ifaces sh", "ifaces show"),
        ("tra", "tra"),  # train.py, traces
        ("trai", "train.py"),
        ("--monitor trai", "--monitor train.py"),
        ("--backend=gl", "--backend=gloo"),
        ("--monitor-", "--monitor-dir"),
        ("-m --log-dir=lo", "-m --log-dir=logs"),
        ("--timeout=90 train.py --data=trac", "--timeout=90 train.py --data=traces"),
        ("train.py --backend gl", "train.py --backend gl"),
        ("train.py --moni", "train.py --moni"),
        ("sbatch --time=4:00:00 --part", "sbatch --time=4:00:00 --partition"),
        ("sbatch --spread-j", "sbatch --spread-job"),
        ("sbatch --hold -p deb", "sbatch --hold -p debug"),
        ("sbatch --partition=gpu-l", "sbatch --partition=gpu-large"),
    ],
)
def test_a_word_is_completed(terminal: Terminal, keys: str, arguments: str) -> None:
    assert terminal.enter(f"srunddp {keys}\t").rstrip("/") == arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ("tr", ["train.py", "traces/", "triage"]),
        ("--sta", ["--staged", "--stall-timeout"]),
        ("sbatch --partition=", ["debug", "gpu-large", "gpu-small"]),
    ],
)
def test_what_is_possible_is_listed(terminal: Terminal, keys: str, names: list[str]) -> None:
    terminal.enter(f"srunddp {keys}\t" + "\t" * ("bash" in terminal.home.name), *names)


@pytest.mark.parametrize(
    "line", ["sbatch --partition", "chekc", "--monitor 5", "sbatch --no-such=1", "--backend=x"]
)
def test_a_shell_is_told_of_no_error(tmp_path: Path, line: str) -> None:
    """Neither where there is no sinfo."""
    write(tmp_path / "bin" / "sinfo", "#!/bin/sh\necho no >&2; exit 1\n").chmod(0o755)
    words = "\n".join(["srunddp", *line.split(), ""])
    variables = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count("\n")),
        "_SRUNDDP_COMPLETE": "bash_complete",
    }
    done = srunddp(folder=tmp_path, PATH=f"{tmp_path}/bin", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() in ("", "file,")
