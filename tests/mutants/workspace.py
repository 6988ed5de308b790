"""A copy of the tree that mutants may change, in which tests run apart from everything else of the
machine.

A mutant of what ends processes may end the wrong ones. So its tests see no processes but their own,
in a process namespace of theirs, and all that they leave ends with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.mutants.areas import TestSet
from tests.mutants.mutations import Mutation

_CANARY = "0+changed.in.the.copy"
# It ends with this process, and all in the namespace with it.
_ISOLATED = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_USER_NAMESPACE = ("--user", "--map-current-user")  # for who is not root
# The shell is process 1, and takes the orphans. What takes all memory is to be killed first. What
# nohup, or a shell for what it starts in the background, lets this process ignore, is for the tests
# as on a terminal.
_FIRST_PROCESS = (
    "env",
    "--default-signal",
    "bash",
    "-c",
    'echo 1000 >/proc/self/oom_score_adj; "$@"; exit $?',
    "bash",
)
_NOTHING_CHOSEN = 5  # pytest's exit code where it has chosen no test


class WorkspaceError(Exception):
    """The copy does not do what it is for."""


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended.

    Attributes:
        code: pytest's exit code; None where it had to be ended.
        failed: the ids of the tests that failed, or of the files that could not be imported.
        seconds: that it took.
        output: the end of what it printed.
    """

    code: int | None
    failed: tuple[str, ...]
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        """Whether all tests have passed, or there are none."""
        return self.code in (0, _NOTHING_CHOSEN)

    @property
    def timed_out(self) -> bool:
        """Whether it had to be ended."""
        return self.code is None


@dataclass
class Workspace:
    """The copy, with an environment whose Python imports srunddp from there.

    Attributes:
        folder: of the copy and of what belongs to it.
    """

    folder: Path

    @property
    def tree(self) -> Path:
        """The copy's root."""
        return self.folder / "tree"

    @property
    def python(self) -> Path:
        """The copy's interpreter."""
        return self.tree / ".venv" / "bin" / "python"

    def prepare(self) -> None:
        """Copy the tree as it is, uncommitted changes included.

        Raises:
            WorkspaceError: a process imports srunddp from elsewhere.
        """
        shutil.rmtree(self.tree, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():  # and has not been deleted
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name, follow_symlinks=False)
        self._make_environment()
        self._check_imports()

    def _make_environment(self) -> None:
        """Make a Python that imports srunddp from the copy, and all else from where this one
        does.
        """
        environment = self.tree / ".venv"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True
        )
        # As lines of a .pth file: such files of these folders, which may name the developer's tree,
        # are not read.
        packages = [
            path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")
        ]
        (own,) = environment.glob("lib/python*/site-packages")
        (own / "mutants.pth").write_text("\n".join([str(self.tree), *packages, ""]))

    def _check_imports(self) -> None:
        """Change the version in the copy, and see that each kind of process of the tests has that
        one.
        """
        module = self.tree / "srunddp" / "_version.py"
        original = module.read_text()
        module.write_text(f'__version__ = "{_CANARY}"\n')
        commands = (
            ["-c", "import srunddp; print(srunddp.__version__)"],
            ["-m", "srunddp", "--version"],
            [str(self.tree / "bin" / "srunddp"), "--version"],
        )
        bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        try:
            for command in commands:
                printed = self._run_isolated([str(self.python), *command], Path("/"), bare, 120.0)
                if printed.code != 0 or _CANARY not in printed.output:
                    found = (
                        f"python {' '.join(command)} does not run the code of {self.tree}:"
                        f" {printed.output}"
                    )
                    raise WorkspaceError(found)
        finally:
            module.write_text(original)
            _forget_compiled(module)

    @contextmanager
    def changed(self, mutation: Mutation) -> Iterator[None]:
        """Within this the copy has the mutation."""
        module = self.tree / mutation.file
        original = module.read_bytes()
        try:
            module.write_bytes(mutation.apply(original))
            _forget_compiled(module)
            yield
        finally:
            module.write_bytes(original)
            _forget_compiled(module)

    def run(self, tests: TestSet, limit: float, left_out: Sequence[str] = ()) -> Outcome:
        """Run these tests up to the first failure, for ``limit`` seconds at most; ``left_out`` are
        ids of tests.
        """
        return self._pytest([*tests.arguments, *(f"--deselect={each}" for each in left_out)], limit)

    def run_again(self, test: str, limit: float) -> Outcome:
        """Run one test by its id."""
        return self._pytest([test], limit)

    def _pytest(self, arguments: Sequence[str], limit: float) -> Outcome:
        cache = self.folder / "pytest"
        shutil.rmtree(cache, ignore_errors=True)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        words = ["-m", "pytest", "-x", "-q", "-o", f"cache_dir={cache}", *arguments]
        found = self._run_isolated(
            [str(self.python), *words], self.tree, variables | {"OMP_NUM_THREADS": "1"}, limit
        )
        failures = cache / "v" / "cache" / "lastfailed"
        if failures.is_file():
            failed = tuple(json.loads(failures.read_text()))
        else:
            failed = ()
        return Outcome(found.code, failed, found.seconds, found.output)

    def _run_isolated(
        self, command: Sequence[str], folder: Path, variables: dict[str, str], limit: float
    ) -> Outcome:
        if os.geteuid() == 0:
            user: tuple[str, ...] = ()
        else:
            user = _USER_NAMESPACE
        words = [*_ISOLATED, *user, *_FIRST_PROCESS, *command]
        printed = self.folder / "output.txt"
        began = time.monotonic()
        code: int | None = None
        with printed.open("wb") as output:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A signal to the tests' process group is not for this process.
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()
        return Outcome(
            code, (), time.monotonic() - began, printed.read_text(errors="replace")[-2000:]
        )


def _forget_compiled(module: Path) -> None:
    """Delete the module's compiled files: of a change within a second that keeps the size Python
    sees nothing.
    """
    for compiled in (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc"):
        compiled.unlink()
