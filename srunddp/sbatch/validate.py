"""Finds mistakes in a job before its script is written, and notes on what the user may not intend.

Mistakes that only Slurm can see, such as exceeded limits or malformed times and sizes, are left to
``sbatch --test-only``.
"""

import ast
import contextlib
import dataclasses
import functools
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from srunddp.bootstrap.network.ifaces_entry import OURS, port_range
from srunddp.check.nccl_names import misspelt
from srunddp.errors import ConfigError, UsageError, did_you_mean
from srunddp.sbatch.run_options import OPTIONS as RUN_OPTIONS
from srunddp.sbatch.slurm_options import OPTIONS, UNUSABLE, split
from srunddp.sbatch.spec import SlurmJob
from srunddp.supervisor.output.redirect import shown_ranks
from srunddp.util import slurm_command

_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# Variables that srunddp sets for each rank, and --env must not set. _INTERFACES are not among them:
# a user may set these for all nodes, and `notes` says that they then win over ifaces.conf.
_RANK_VARIABLES = {*OURS} - {*_INTERFACES}
# Variables that the job script itself uses, and those that bash does not let a script change.
_SCRIPT_VARIABLES = {
    "code",
    "ended",
    "srunddp",
    "BASHOPTS",
    "BASH_VERSINFO",
    "EUID",
    "PPID",
    "SHELLOPTS",
    "UID",
}
_POSITIVE = ("nodes", "ntasks_per_node", "cpus_per_task")
_PATHS = (
    "script",
    "srunddp",
    "venv",
    "conda",
    "ifaces",
    "log_dir",
    "monitor_dir",
    "result",
    "container",
    "container_image",
    "data",
)
_MANY = 10**9  # the number of ranks that is assumed if Slurm decides how many there are
_SINFO_WITHIN = 2.0  # seconds; a note that needs sinfo is not worth a longer wait

# Fields of SlurmJob that have the name and the meaning of an option of sbatch.
_SAME = ("job_name", "nodes", "ntasks_per_node", "cpus_per_task", "signal")

# Whether there is a problem (anything that is true or false); what was found; what was expected;
# and a hint.
_Problem = tuple[object, str, str, str]


def check(job: SlurmJob, environ: Mapping[str, str], *, interactive: bool = False) -> None:
    """Refuse a job if no script can do what it asks for.

    Args:
        job: The job, from options, files and defaults.
        environ: The environment variables of this command, which the job gets, too.
        interactive: Whether the script is for salloc, which lacks some options of sbatch.

    Raises:
        ConfigError: The first problem that is found.
    """
    of_values = _of_texts(job), _of_variables(job), _of_numbers(job)
    problems = chain(*of_values, _of_options(job, interactive), _of_arguments(job), _of_stage(job))
    for is_there, found, expected, hint in problems:
        if is_there:
            raise ConfigError(found, expected=expected, hint=hint)
    # Check the options for the ranks last, because a wrong number of nodes or spare nodes makes a
    # wrong number of ranks.
    check_run_options(job, environ, ranks=job.world_size)


def check_run_options(
    job: SlurmJob, environ: Mapping[str, str], *, ranks: int = 0, script: str = ""
) -> None:
    """Refuse options that ``srunddp run`` would refuse in the job. The types of their values have
    been checked before, by :mod:`srunddp.sbatch.run_options`.

    Args:
        job: The job, of which only the options of ``srunddp run`` and ``env`` are used.
        environ: The environment variables of this command, which the job gets, too.
        ranks: How many ranks there are; 0 if that is not known.
        script: The job script, if it is converted from another one; its lines may give options,
            too. Empty for a job script that is still to be made from ``job``.

    Raises:
        ConfigError: A value is refused, or an option needs another option.
    """
    if "port" in job.run:
        port_range(str(job.run["port"]), where="--port")
    if "show-ranks" in job.run:
        if not _is_given("log_dir", job, environ, script):
            raise UsageError(
                "--show-ranks without --log-dir", expected="both", hint="add --log-dir=logs"
            )
        shown_ranks(str(job.run["show-ranks"]), ranks or _MANY)
    if job.monitor_dir and not _is_given("monitor", job, environ, script):
        raise UsageError("--monitor-dir without --monitor", expected="both", hint="add --monitor")


def _is_given(key: str, job: SlurmJob, environ: Mapping[str, str], script: str) -> bool:
    """Tell whether ``srunddp run`` gets an option: from the job, by the option's environment
    variable, or by a line of the script.
    """
    variable = str(RUN_OPTIONS[key].envvar)
    name = re.compile(rf"{option(key)}(?![\w-])|\b{variable}\b")
    if getattr(job, key) or name.search("\n".join([*job.setup, script])):
        return True
    variables = dict(each.split("=", 1) for each in job.env)
    if _exports(job, variable):
        variables = {**environ, **variables}
    return bool(variables.get(variable))  # for click, an empty variable is not set


def _exports(job: SlurmJob, variable: str) -> bool:
    """Tell whether sbatch passes an environment variable on to the job."""
    words = str(job.slurm.get("export", "ALL")).split(",")
    return any(word.upper() == "ALL" or word.partition("=")[0] == variable for word in words)


def check_texts(job: SlurmJob) -> None:
    """Refuse texts and variables that no job script can have, made or converted.

    Args:
        job: The job, of which only some keys are used.

    Raises:
        ConfigError: The first problem that is found.
    """
    for is_there, found, expected, hint in chain(_of_texts(job), _of_variables(job)):
        if is_there:
            raise ConfigError(found, expected=expected, hint=hint)


def check_printable(name: str, text: str) -> None:
    """Refuse a text that could end a line of the script, or control a terminal that shows it.

    Args:
        name: The name of the option or the value, for the message.
        text: The text to check.

    Raises:
        ConfigError: A character is not printable.
    """
    if not text.isprintable():
        raise ConfigError(
            f"{name} {text!r}",
            expected="printable characters",
            hint="remove line ends, tabs and control characters",
        )


def option(key: str) -> str:
    """Return the name that a key has on the command line: an option, except for the script and its
    arguments.
    """
    if key in ("script", "arguments"):
        return key
    return "--" + key.replace("_", "-")


def _of_texts(job: SlurmJob) -> Iterator[_Problem]:
    for field in dataclasses.fields(job):
        value = getattr(job, field.name)
        key = field.name
        name = option(field.name)
        texts: Sequence[str] = ()
        if isinstance(value, str):
            texts = (value,)
        elif isinstance(value, tuple):
            texts = value
        for text in texts:
            check_printable(name, text)
            # An empty --mpi means the site's default, and an empty argument may be meant for the
            # script.
            empty = not text and key not in ("mpi", "arguments")
            yield empty, f"{name} is empty", "a value", "remove it, or give it a value"
            found = f"{name} {text!r}"
            is_path = key in _PATHS
            # A command in the script would read a path with a dash in front as an option.
            yield (
                is_path and text.startswith("-"),
                found,
                "no dash in front",
                f"write ./{text} if it is a file",
            )
            yield (
                is_path and text.startswith("~"),
                found,
                "a path without ~, which stays as it is",
                "write $HOME",
            )


def _of_variables(job: SlurmJob) -> Iterator[_Problem]:
    for each in job.env:
        name, equals, _ = each.partition("=")
        wrong = not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        yield wrong, f"--env {each!r}", "NAME=VALUE", "write one variable for each --env"
        yield (
            name in _SCRIPT_VARIABLES,
            f"--env {name}",
            "no variable of bash's or the script's own",
            "rename it",
        )
        rank = name in _RANK_VARIABLES
        slurm = name.startswith("SLURM_")
        setter = "Slurm" if slurm else "srunddp, for each rank"
        yield rank or slurm, f"--env {name}", f"no variable that is set by {setter}", "remove it"


def _of_numbers(job: SlurmJob) -> Iterator[_Problem]:
    for name in _POSITIVE:
        number = getattr(job, name)
        wrong = number is not None and not 1 <= number <= 10**6
        yield (
            wrong,
            f"{option(name)} {number}",
            "1 or more",
            f"write {option(name)}=1, or remove it",
        )
    if job.backend == "nccl":
        yield (
            not job.has_gpus,
            "--backend nccl without GPUs",
            "a GPU for each rank",
            "add --gpus-per-node=N",
        )
        found = f"{job.tasks} ranks on each node with backend nccl, and GPUs: {job.gpus}"
        yield (
            0 < job.gpus < job.tasks,
            found,
            "at most one rank for each GPU",
            "remove --ntasks-per-node",
        )


def _of_options(job: SlurmJob, interactive: bool) -> Iterator[_Problem]:
    """Find options that are missing or exclude each other, and mistakes that sbatch cannot see."""
    yield not job.script, "no script", "a training script", "name it after the options"
    yield (
        "\\" in job.log_folder,
        f"--log-dir {job.log_dir!r}",
        "no backslash, which Slurm drops",
        "choose another",
    )
    yield (
        "/" in job.name,
        f"--job-name {job.name!r}",
        "no slash: it is in the output's name",
        "choose another",
    )
    kinds = [
        option(kind)
        for kind in ("venv", "conda", "container", "container_image")
        if getattr(job, kind)
    ]
    yield len(kinds) > 1, " and ".join(kinds), "one environment", "remove all but one"
    yield (
        {"gres", "gpus-per-node"} <= {*job.slurm},
        "--gres and --gpus-per-node",
        "one of them",
        "remove --gres",
    )
    for each in job.modules:
        wrong = not re.fullmatch(r"[\w.+@/][\w.+@/:=~-]*", each)
        yield (
            wrong,
            f"--modules {each!r}",
            "one module, such as CUDA/12.4",
            "repeat --modules for each",
        )
    others = (job.node_count or 0) - (job.spare_nodes or 0)
    found = f"--spare-nodes {job.spare_nodes}"
    yield (
        job.spare_nodes and not job.restarts,
        f"{found} without --restarts",
        "both",
        "add --restarts=3",
    )
    yield (
        job.min_nodes and not job.restarts,
        f"--min-nodes {job.min_nodes} without --restarts",
        "both",
        "add --restarts=3",
    )
    yield (
        job.min_nodes and job.node_count and job.min_nodes > others,
        f"--min-nodes {job.min_nodes} of {others} nodes with ranks",
        f"{others} at most",
        "give more with --nodes, in which the spare ones count",
    )
    # If Slurm decides how many tasks a node has, assume two. Then one node is enough for the two
    # ranks that --spare-nodes needs, and the job is not refused.
    few = job.spare_nodes and others * (job.tasks or 2) < 2
    found = f"{found} with --nodes {job.node_count or 'unset'}"
    yield (
        few,
        found,
        "2 ranks or more on the others",
        "raise --nodes, which includes the spare nodes",
    )
    # In --signal=[{R|B}:]NAME[@SECONDS], B makes Slurm signal the batch shell and no step.
    receiver, _, rest = job.warning.rpartition(":")
    yield (
        "B" in receiver,
        f"--signal {job.signal!r}",
        "a signal for the ranks, not the batch shell",
        f"write {rest}",
    )
    batch_only = [name for name in job.slurm if name in OPTIONS and OPTIONS[name].batch_only]
    for name in [*batch_only, *(["requeue"] if job.requeue else [])]:
        found = f"--salloc with --{name}"
        hint = "remove it, or submit the job with sbatch"
        yield interactive, found, "an option that salloc knows", hint
    for each in job.container_mounts:
        yield (
            not job.container_image,
            "--container-mounts without --container-image",
            "both",
            "name the image",
        )
        found = f"--container-mounts {each!r}"
        hint = "repeat --container-mounts for each"
        yield "," in each, found, "one SOURCE:TARGET, without a comma", hint


def _of_arguments(job: SlurmJob) -> Iterator[_Problem]:
    """Find mistakes in the options for srunddp run, srun and sbatch that are passed on."""
    for each in job.srun_arg:
        yield (
            not each.startswith("-"),
            f"--srun-arg {each!r}",
            "an option of srun",
            f"write --srun-arg=--{each}",
        )
        yield (
            each.startswith(("--spare-nodes", "--min-nodes")),
            f"--srun-arg {each!r}",
            f"{each.partition('=')[0]}, which srunddp sbatch has as well",
            f"write {each}",
        )
    for each in job.sbatch_arg:
        name, _ = split(each)
        found = f"--sbatch-arg {each!r}"
        wrong = not re.fullmatch(r"--[a-zA-Z][\w-]*(=.*)?", each)
        yield (
            wrong,
            found,
            "--NAME=VALUE, or --NAME",
            "write the long name of the option, with its dashes",
        )
        yield name in UNUSABLE, f"--{name}", "an option of a job script", f"remove --{name}"
        yield (
            name.replace("-", "_") in _SAME,
            found,
            f"--{name}, which srunddp has as well",
            f"write {each}",
        )


def _of_stage(job: SlurmJob) -> Iterator[_Problem]:
    found = "--stage without a virtual environment"
    expected = "an environment to copy"
    yield job.stage and not job.venv, found, expected, "add --venv=ENV"
    for name in ("data", "stage_exclude"):
        yield (
            getattr(job, name) and not job.stage,
            f"{option(name)} without --stage",
            "both",
            "add --stage",
        )
    # A relative path is in the folder in which the job starts, and with --stage the nodes have only
    # copies of that. A folder with an absolute path may be one that all nodes see.
    shared = "a folder that all nodes see"
    yield (
        job.stage and job.log_dir and not os.path.isabs(job.log_dir),
        f"--log-dir {job.log_dir} with --stage",
        shared,
        "write the whole path of one; or remove it, and add --prefix: node and rank before each"
        " line of the job's log",
    )
    yield (
        job.stage and job.monitor and not os.path.isabs(job.monitor_folder),
        "--monitor with --stage",
        shared,
        "add --monitor-dir=DIR with the whole path of one",
    )


def script_problem(job: SlurmJob) -> tuple[str, str] | None:
    """Return why SCRIPT is not a Python script that this node sees, and a hint.

    Returns:
        None if SCRIPT is such a script, or if it is a module or a folder, which are not examined.
    """
    path = os.path.join(job.folder, job.script or "")
    if job.module or os.path.isdir(path):
        return None
    try:
        text = Path(path).read_bytes()
        if re.match(rb"#!(?!.*python)", text):
            hint = f"if it starts torchrun or accelerate: srunddp sbatch --from {job.script}"
            return f"{job.script} is a shell script", hint
        if not text.startswith(b"PK"):  # PK: a ZIP archive, which Python can run
            # Ignore the compiler's warnings, such as about an invalid escape, because they would
            # not name the file.
            with warnings.catch_warnings(action="ignore"):
                ast.parse(text)
    except OSError as error:
        # If SCRIPT is a launcher, as in `srunddp sbatch torchrun train.py`, the hint is to remove
        # the launcher.
        own = re.fullmatch(
            r"python[\d.]*|torchrun|accelerate|deepspeed|srun|mpirun|mpiexec", job.script or ""
        )
        if own:
            hint = f"remove {job.script}: the script starts srun and srunddp"
        else:
            hint = "correct the path, or add --force"
        return f"{job.script} is not seen here: {os.strerror(error.errno or 0)}", hint
    except (SyntaxError, ValueError) as error:
        where = f"{job.script}:{getattr(error, 'lineno', None) or 1}"
        return f"{where}: {getattr(error, 'msg', error)}", "correct the script"
    return None


def notes(job: SlurmJob, environ: Mapping[str, str], *, interactive: bool = False) -> Iterator[str]:
    """Yield notes on values that the user may not intend, or on files that this node does not see
    although other nodes may. :func:`script_problem` checks SCRIPT itself.

    Args:
        job: A job that :func:`check` has accepted.
        environ: The environment variables for sbatch or salloc.
        interactive: Whether the script is for salloc.
    """
    files = [job.ifaces, job.venv and f"{job.venv}/bin/python"]
    missing = (
        path for path in files if path and not os.path.exists(os.path.join(job.folder, path))
    )
    yield from (f"{path} is not seen here" for path in missing)
    yield from _unknown_options(job)
    for name, _, value in (each.partition("=") for each in job.env):
        if name in _INTERFACES:
            yield f"--env {name}={value} is for every node, and wins over ifaces.conf"
        elif meant := misspelt(name):
            yield f"--env {name} is not a variable that NCCL documents; did you mean {meant}?"
    if (
        "gpus" in job.slurm
        and job.nodes
        and str(job.slurm["gpus"]).isdecimal()
        and int(job.slurm["gpus"]) % job.nodes
    ):
        yield (
            f"--gpus={job.slurm['gpus']} on {job.nodes} nodes: {job.tasks} ranks are started on"
            " each"
        )
    if 0 < job.gpus < job.tasks:
        yield (
            f"more ranks than GPUs on each node, {job.tasks} and {job.gpus}: several ranks"
            " share one"
        )
    elif 0 < job.tasks < job.gpus:
        yield f"fewer ranks than GPUs on each node, {job.tasks} and {job.gpus}: each rank takes one"
    if job.restarts_ranks and job.slurm.get("oom-kill-step") in (True, "1"):
        yield (
            "--oom-kill-step with --restarts: when memory runs out Slurm ends srunddp as well, and"
            " no restart follows"
        )
    yield from _of_requeue(job)
    yield from _few_cpus(job)
    yield from _missing_gpus(job)
    yield from _too_long(job, environ, interactive)
    for name in sorted(environ):
        if name.startswith("SBATCH_") and environ[name] and not interactive:
            yield (
                f"{name}={environ[name]} is exported, which wins over the script's own line at"
                " sbatch"
            )


def _of_requeue(job: SlurmJob) -> Iterator[str]:
    if job.requeue and not any("resume" in each for each in job.arguments):
        yield (
            "--requeue without an argument such as --resume=auto: a script that does not resume"
            " starts over"
        )
    # SCRIPT may be a module's name, or a script that this node does not see. Then it is not read.
    with contextlib.suppress(OSError):
        text = Path(job.folder, job.script or "").read_bytes()
        # A script that catches the signal uses Python's signal module or one of these libraries.
        if job.warning and not re.search(rb"srunddp|signal|SIGUSR|lightning|submitit", text):
            yield (
                f"{job.script}: no sign that it catches the signal of {job.warning}, which"
                " otherwise ends it"
            )


def _unknown_options(job: SlurmJob) -> Iterator[str]:
    keys = [
        *OPTIONS,
        *(field.name for field in dataclasses.fields(job)),
        *RUN_OPTIONS,
        "submit",
        "salloc",
        "write",
    ]
    names = [option(key) for key in keys]
    for name in (each for each in job.slurm if each not in OPTIONS and f"--{each}" not in names):
        meant = did_you_mean(f"--{name}", names, 0.7)
        yield (
            f"--{name} is unknown to srunddp, and passed to sbatch as it is{meant and '; '}{meant}"
        )


def _few_cpus(job: SlurmJob) -> Iterator[str]:
    given = {"cpus-per-gpu", "exclusive", "mincpus"} & job.slurm.keys()
    if job.has_gpus and not (job.cpus_per_task or given):
        yield (
            "no --cpus-per-task: the site's default, often one CPU for a rank and its loader"
            " workers"
        )


def _counting(
    job: SlurmJob, environ: Mapping[str, str], interactive: bool, name: str, variable: str = ""
) -> str:
    """Return the value that an option has for sbatch or salloc, from the job or from the option's
    environment variable; empty if neither gives a value.

    For sbatch, the variable wins over the script's own line. For salloc, the word of the command
    line wins over the variable.

    Args:
        job: The job.
        environ: The environment variables for sbatch or salloc.
        interactive: Whether the script is for salloc.
        name: The name of the option, without dashes.
        variable: The name of the option's variable without SBATCH_ or SALLOC_ in front; empty if it
            is the option's name in capital letters.
    """
    variable = variable or name.upper()
    given = str(job.slurm.get(name, ""))
    if interactive:
        return given or environ.get(f"SALLOC_{variable}", "")
    return environ.get(f"SBATCH_{variable}", "") or given


def _too_long(job: SlurmJob, environ: Mapping[str, str], interactive: bool) -> Iterator[str]:
    """Yield a note if no chosen partition allows the job's time limit, because Slurm may accept
    such a job, but never start it. There is no note if the limits are unknown.
    """
    # With --time-min Slurm shortens the time limit to what the partition allows.
    if {"cluster", "time-min"} & job.slurm.keys():
        return
    count = functools.partial(_counting, job, environ, interactive)
    if count("clusters") or count("reservation"):
        return
    wanted = count("time", "TIMELIMIT")
    asked = slurm_command.asked_seconds(wanted)
    if asked is None:
        return
    rows = slurm_command.output("sinfo", "-h", "-o", "%P %l", timeout=_SINFO_WITHIN).splitlines()
    limits = dict(row.split(None, 1) for row in rows if len(row.split()) == 2)
    wished = count("partition").split(",")
    chosen = {
        name.rstrip("*"): limit
        for name, limit in limits.items()
        if name.rstrip("*") in wished or (wished == [""] and name.endswith("*"))
    }
    # A limit that is no number of seconds is "infinite".
    seconds = [slurm_command.seconds(limit) or math.inf for limit in chosen.values()]
    if seconds and asked > max(seconds):
        longest = " and ".join(f"{limit} in partition {name}" for name, limit in chosen.items())
        yield f"a time limit of {wanted} is more than {longest}: the job may wait forever"


def _missing_gpus(job: SlurmJob) -> Iterator[str]:
    """Yield a note if Slurm knows no GPU. Without ``GresTypes``, Slurm accepts options that ask for
    GPUs all the same.
    """
    if not job.has_gpus or {"clusters", "cluster"} & job.slurm.keys():
        return
    # sinfo prints a word for each kind of node, "(null)" for nodes without generic resources.
    devices = slurm_command.output("sinfo", "-h", "-o", "%G", timeout=_SINFO_WITHIN).split()
    if devices and not any(re.search(r"(^|,)gpu(:|,|$)", each) for each in devices):
        if job.tasks == 1:
            ranks = "1 rank is"
        elif job.tasks:
            ranks = f"{job.tasks} ranks are"
        else:
            ranks = "the ranks are"
        yield (
            f"this asks for GPUs, but no node has one by sinfo -o %G: {ranks} started on each node"
            " all the same"
        )
