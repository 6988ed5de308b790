"""Many ranks import torch from a slow shared file system

The environment with torch lies on a read-only file system, by FUSE. Each node of the test cluster
has a view of its own. Each operation there takes 0.5 ms or 2 ms more than on the disk below. The
kernel keeps names and attributes for 30 s, as it does for folders of NFS, and it keeps what was
read. For each run the view is mounted anew, so that its caches are empty. Python itself and its
standard library are on the nodes' disks.

`wall` is the time from srun's start until the last rank has imported torch. `operations` are those
that the file system served, of all kinds. *staged* is `srunddp run --staged` in the copies that
`srunddp stage push --all-nodes` has made on each node before. *in place*, *torchrun* and *plain
srun* have no copies: srunddp, torchrun and `srun python` are in the shared environment, too.

The case of the staging is its cost, once for a job: the environment is packed on one node, through
the view with 0.5 ms, sent to six nodes, and unpacked there. Divided by the time that *staged* saves
in one start, it is the number of starts after which it pays.

`system calls` are those of one `import torch`, counted by strace, that name the shared environment
or a file in it. A call within memory that was mapped from a file there is none.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.benchmark import FAILED, Case, Limit, Sample
from tests.benchmarks.runner import INTEROP
from tests.cluster.cluster import Cluster, Settings
from tests.cluster.nodes import NODES
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import PYTHON, data_network

PACKAGES = (
    *(
        "torch",
        "filelock",
        "typing_extensions",
        "sympy",
        "mpmath",
        "networkx",
        "jinja2",
        "MarkupSafe",
        "fsspec",
    ),
    *("setuptools", "numpy", "click", "PyYAML", "psutil", "nvidia-ml-py", "tqdm"),
)
IMPORT = ("-c", "import torch")
SCRIPT = """import json, os, time
import torch
os.write(1, (json.dumps({"at": time.monotonic(), "torch": torch.__file__}) + "\\n").encode())
"""
# As uv writes it into an environment that can be moved.
STARTER = """#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/'python' "$0" "$@"
' '''
from srunddp.cli import main
main()
"""
OPERATIONS = "operations (1000 per rank)"
CALLS = "system calls (1000)"
WAYS = ("staged", "in place", "torchrun", "plain srun")
LIMITS = (
    Limit("wall", "in place", 0.50),
    Limit("wall", "torchrun", 0.30),
    Limit("wall", "plain srun", 0.50),
)
SHORT = 0.0005
LONG = 0.002
# Nodes, ranks of each, delay, repeats.
SIZES = ((2, 1, SHORT, 2), (2, 1, LONG, 1), (6, 2, SHORT, 1))


@dataclass
class Site:
    """The cluster, a job on all its nodes, and the environment: as it is on the disk, and where it
    is mounted.
    """

    cluster: Cluster
    disk: Path
    env: Path
    script: Path
    job: dict[str, str] = field(default_factory=dict)
    program: str = ""
    copy: str = ""

    @contextmanager
    def mounted(self, nodes: int, delay: float) -> Iterator[Callable[[], int]]:
        """Each node's own view of the environment; what is yielded unmounts, and returns the
        operations served.
        """
        words = [
            str(INTEROP / "bin" / "python"),
            str(PROGRAMS / "delayed_folder.py"),
            str(self.disk),
            str(self.env),
        ]
        servers = [self.cluster.popen(*words, str(delay), on=node.name) for node in NODES[:nodes]]

        def unmount() -> int:
            for node in NODES[:nodes]:
                self.cluster.on(node.name, "umount", "--lazy", str(self.env), check=False)
            outputs = [server.communicate(timeout=60) for server in servers]
            return sum(sum(json.loads(output).values()) for output, _ in outputs)

        try:
            for node in NODES[:nodes]:
                wait = f'until grep -q " {self.env} " /proc/mounts; do sleep 0.05; done'
                self.cluster.on(node.name, "timeout", "20", "sh", "-c", wait)
            yield unmount
        finally:
            if any(server.poll() is None for server in servers):
                unmount()

    def calls(self, folder: str, _: int) -> Sample:
        """System calls on the environment, by a process of the one in this folder."""
        words = (PYTHON, "-m", "tests.benchmarks.storm", str(self.disk), folder)
        return {CALLS: int(self.cluster.on(NODES[0].name, *words).stdout) / 1000}

    def push(self, env: Path) -> Sample:
        """Stage an environment on all nodes of the job, by a command on the first one."""
        began = time.monotonic()
        words = (f"{env}/bin/srunddp", "stage", "push", f"--env={env}", "--all-nodes")
        done = self.cluster.run(*words, on=NODES[0].name, env=self.job, timeout=400)
        seconds = time.monotonic() - began
        found = re.search(
            r"packed in ([\d.]+) s, sent in ([\d.]+) s, unpacked in ([\d.]+) s", done.stderr
        )
        copy = re.search(r" staged -> (\S+)", done.stderr)
        assert found, done.stderr
        assert copy, done.stderr
        self.program = done.stdout.strip()
        self.copy = copy[1]
        return {
            "wall": seconds,
            **dict(zip(("pack", "send", "unpack"), map(float, found.groups()), strict=True)),
        }


@dataclass
class Start:
    """The script on so many nodes, with so many ranks on each, and the best times of what was
    measured.
    """

    site: Site
    nodes: int
    each: int
    delay: float
    best: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {self.each} {'rank' if self.each == 1 else 'ranks'} each"

    def measure(self, way: str, repeat: int) -> Sample:
        each = 1 if way == "torchrun" else self.each
        ranks = self.nodes * self.each
        layout = [
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={each}",
            f"--nodelist=node[01-0{self.nodes}]",
        ]
        variables = {
            "SRUNDDP_IFACES": str(self.site.cluster.shared / "ifaces.conf"),
            "OMP_NUM_THREADS": "1",
        }
        with self.site.mounted(self.nodes, self.delay) as unmount:
            began = time.monotonic()
            words = ["srun", "--chdir=/", *layout, *self._command(way, repeat)]
            done = self.site.cluster.run(
                *words, env=self.site.job | variables, timeout=200, check=False
            )
            served = unmount()
        reports = [
            json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"at"')
        ]
        if len(reports) < ranks:
            print(done.stdout[-500:], done.stderr[-3000:])
            return {"wall": FAILED, OPERATIONS: FAILED}
        assert all(
            report["torch"].startswith(f"{self.site.env}/") == (way != "staged")
            for report in reports
        ), reports
        wall = max(report["at"] for report in reports) - began
        self.best[way] = min(wall, self.best.get(way, wall))
        return {"wall": wall, OPERATIONS: served / ranks / 1000}

    def _command(self, way: str, repeat: int) -> list[str]:
        python = f"{self.site.env}/bin/python"
        port = str(29500 + repeat)
        agent = [f"--nnodes={self.nodes}", f"--nproc-per-node={self.each}", "--rdzv-backend=c10d"]
        agent += [f"--rdzv-endpoint={NODES[0].name}:{port}", f"--rdzv-id={port}"]
        commands = {
            "staged": [self.site.program, "run", "--staged", "--quiet"],
            "in place": [f"{self.site.env}/bin/srunddp", "--quiet"],
            "torchrun": [python, "-m", "torch.distributed.run", *agent],
            "plain srun": [python],
        }
        return [*commands[way], str(self.site.script)]

    def saved(self, _: int) -> Sample:
        """What a copy on each node saves in one start."""
        for way in {"staged", "in place"} - {*self.best}:
            self.measure(way, 0)
        return {"wall": self.best["in place"] - self.best["staged"]}


def make_environment(env: Path, left_out: str = "..") -> None:
    """torch, srunddp and what both need, as `srunddp stage build` would make it: of links to this
    environment's files.

    Args:
        left_out: what is in a folder of this name is not in it.
    """
    packages = env / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    env.mkdir()
    copy = os.link if env.stat().st_dev == ROOT.stat().st_dev else shutil.copy2
    for file in (file for name in PACKAGES for file in importlib.metadata.files(name) or ()):
        if not {"..", left_out} & {*file.parts}:
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            copy(file.locate(), packages / file)
    shutil.copytree(
        ROOT / "srunddp", packages / "srunddp", ignore=shutil.ignore_patterns("__pycache__")
    )
    compileall.compile_dir(str(packages / "srunddp"), quiet=1)
    (env / "bin").mkdir()
    (env / "bin" / "python").symlink_to(Path(PYTHON).resolve())
    (env / "bin" / "srunddp").write_text(STARTER)
    (env / "bin" / "srunddp").chmod(0o755)
    shutil.copy2(ROOT / ".venv" / "pyvenv.cfg", env)


@contextmanager
def site() -> Iterator[Site]:
    with Cluster(Settings(open_management=True)) as cluster:
        data_network(cluster)
        here = Site(
            cluster,
            cluster.folder / "disk",
            cluster.shared / "env",
            cluster.shared / "import_torch.py",
        )
        here.env.mkdir()
        here.script.write_text(SCRIPT)
        yield here


def cases(quick: bool) -> Iterator[Case]:
    with site() as here:
        make_environment(here.disk, *(["include"] if quick else []))
        allocate(here, 2 if quick else 6)
        if quick:
            here.push(here.disk)
        else:
            with here.mounted(6, SHORT):
                pushed = here.push(here.env)
        starts = [Start(here, *size[:3]) for size in SIZES[: 1 if quick else None]]
        for start, (*_, repeats) in zip(starts, SIZES, strict=False):
            ways = {way: partial(start.measure, way) for way in WAYS[: 2 if quick else None]}
            yield Case(
                f"{start}, {1000 * start.delay:g} ms",
                ways,
                1 if quick else repeats,
                LIMITS if start.each == 1 else (),
            )
        if not quick:
            saved = {f"what it saves in a start of {start}": start.saved for start in starts[::2]}
            yield Case(
                "the staging on 6 nodes, 0.5 ms", {"stage push": lambda _: pushed, **saved}, 1
            )
            folders = {"staged": here.copy, "in place": str(here.disk)}
            counts = {way: partial(here.calls, folder) for way, folder in folders.items()}
            yield Case("import torch in one process", counts, 1)


def allocate(here: Site, nodes: int) -> None:
    said = here.cluster.run(
        "salloc", "--no-shell", f"--nodes={nodes}", "--ntasks-per-node=2"
    ).stderr
    found = re.search(r"Granted job allocation (\d+)", said)
    assert found, said
    here.job = {"SLURM_JOB_ID": found[1], "SLURM_JOB_NUM_NODES": str(nodes)}


def calls_below(folder: str, command: Sequence[str]) -> int:
    """Run a command to its end, and count its calls on what is below a folder, and on the folder
    itself.

    Args:
        folder: absolute, as the command would write it; links to it are not followed.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    named = re.compile(re.escape(os.path.normpath(folder)) + r"(?=[/\">])")
    variables = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with TemporaryDirectory() as traces:
        # A file for each thread, so that no line is split; descriptors with their paths; nothing of
        # what is read.
        options = (
            "-ff",
            "-y",
            "-s",
            "0",
            "-e",
            "trace=%file,%desc",
            "-e",
            "signal=none",
            "-o",
            f"{traces}/of",
        )
        subprocess.run(["strace", *options, *command], env=variables, cwd="/", check=True)
        lines = (
            line
            for file in Path(traces).iterdir()
            for line in file.read_text(errors="replace").splitlines()
        )
        return sum(bool(named.search(line)) for line in lines)


def main(env: str, *folders: str) -> None:
    """Print how often each environment's import of torch calls the kernel on what is below the
    first one.
    """
    for folder in folders:
        # What has yet to be compiled is now.
        subprocess.run([f"{folder}/bin/python", *IMPORT], check=True)
    print(*(calls_below(env, [f"{folder}/bin/python", *IMPORT]) for folder in folders))


if __name__ == "__main__":
    main(*sys.argv[1:])
