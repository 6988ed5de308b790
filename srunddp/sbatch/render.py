"""Writes the text of a job script, either for sbatch, or for bash. A script for bash starts itself
again under salloc.
"""

import glob
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from shlex import quote as word

from srunddp.sbatch.slurm_options import split
from srunddp.sbatch.spec import SlurmJob

_SLEEP = 600  # seconds; longer than Slurm takes to end a job
_REQUEUES_WHAT_ENDS = "24.05"  # the first Slurm that requeues a preempted job which ends by itself
_REPORT = 120  # seconds at most, because all nodes wait for the report
_WHY = {
    "ntasks-per-node": (
        "One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink."
    ),
    "no-kill": "Without this, Slurm ends or requeues the whole job when one of its nodes is lost.",
    "signal": (
        "The ranks get this signal some seconds before the time limit, and write a checkpoint."
    ),
}
_CPUS = [
    "# Only srun of Slurm 22.05 and 23.02 needs this, to take over the option of the job.",
    'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
]
_OOM = [
    (
        "# Since Slurm 24.11 a site may end the whole step, srunddp too, when a rank runs out of"
        " memory."
    ),
    "export SLURM_OOM_KILL_STEP=0",
]
_OWN_CODE = [
    (
        "# srun ends with a code of its own if a process was killed for memory or a node was lost,"
        " even if a restart went well."
    ),
    '[ ! -s "$result" ] || code=$(sed "s/[^0-9]*\\([0-9]*\\).*/\\1/" "$result")',
]
_NO_VENV = "unset VIRTUAL_ENV  # that of the shell that submitted this job"


def render(job: SlurmJob, command: Sequence[str], *, interactive: bool = False) -> str:
    """Return the text of the job script, with an empty line between its sections.

    Args:
        job: A job that ``validate.check`` has accepted.
        command: The words of the command line, which the script's head quotes.
        interactive: Whether the script is for salloc instead of sbatch.
    """
    # The order matters. The environment is activated after the modules are loaded, so that it comes
    # first in PATH. The lines of --setup may use the modules, the environment and the variables of
    # --env. Each later section may use all sections before it.
    sections = [
        _head(job, command, interactive),
        [] if interactive else directives(job),
        ["set -euo pipefail"],
        _allocation(job) if interactive else [],
        _modules(job),
        _environment(job),
        [
            f"export {name}={word(value)}"
            for name, _, value in (each.partition("=") for each in job.env)
        ],
        _CPUS if job.cpus_per_task else [],
        _OOM if job.restarts_ranks and "oom-kill-step" not in job.slurm else [],
        _lenient(job.setup),
        [f"mkdir -p -- {word(job.log_folder)}"] if interactive and job.preflight else [],
        _traps(job),
        _stage(job),
        _preflight(job),
        *_training(job),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _head(job: SlurmJob, command: Sequence[str], interactive: bool) -> list[str]:
    folders = shlex.join(os.path.join(job.folder, each) for each in job.log_folders)
    if folders:
        make = f"mkdir -p -- {folders} && "
    else:
        make = ""
    start = "bash THIS_FILE" if interactive else f"{make}sbatch THIS_FILE"
    return [
        "#!/bin/bash",
        f"# {job.script}{_size(job)}; written by",
        f"#     {shlex.join(command)}",
        "# To be started in the folder that its paths are relative to:",
        f"#     {start}",
    ]


def _size(job: SlurmJob) -> str:
    if not (job.node_count and job.tasks):
        return ""
    ranks = f"{job.tasks} {'rank' if job.tasks == 1 else 'ranks'}"
    nodes = job.node_count - (job.spare_nodes or 0)
    if job.spare_nodes:
        spare = f", spare nodes: {job.spare_nodes}"
    else:
        spare = ""
    return (f" on 1 node, {ranks}" if nodes == 1 else f" on {nodes} nodes, {ranks} on each") + spare


def directives(job: SlurmJob) -> list[str]:
    """Return the ``#SBATCH`` lines, with a comment before each line that needs an explanation."""
    lines: list[str] = []
    for name, value in _requested(job):
        if name in _WHY and (job.has_gpus or name != "ntasks-per-node"):
            lines.append(f"# {_WHY[name]}")
        lines.append(directive(name, value))
    if "output" not in job.slurm:
        lines += [
            "# Slurm does not make this folder; if it is missing the job ends at once, without a"
            " message."
        ]
        lines.append(directive("output", _output(job)))
    if job.requeue:
        lines += ["# Slurm may start the job again, under its number.", directive("requeue", True)]
    elif job.requeue is False:
        lines.append(directive("no-requeue", True))
    if "open-mode" not in job.slurm:
        lines += [
            "# Each start appends to the log of the one before.",
            directive("open-mode", "append"),
        ]
    return lines


def _output(job: SlurmJob) -> str:
    """Return the value of ``--output``. Slurm later replaces ``%j`` and the like in it."""
    if "output" in job.slurm:
        return str(job.slurm["output"])
    folder = job.log_folder.replace("%", "%%")
    if "array" in job.slurm:
        return f"{folder}/%x-%A_%a.out"
    return f"{folder}/%x-%j.out"


def log_of(job: SlurmJob, number: str) -> tuple[str, bool]:
    """Return the path of a submitted job's log.

    Args:
        job: The job.
        number: The job's number.

    Returns:
        The path, and whether it is complete. It is not if it has a part that Slurm replaces only
            later, such as ``%a``, the index in an array. Such a part stays as it is.
    """
    known = {"%%": "%", "%A": number, "%x": job.name}
    if "array" not in job.slurm:
        known["%j"] = number
    output = _output(job)
    path = re.sub("%.", lambda found: known.get(found[0], found[0]), output)
    is_whole = {*re.findall("%.", output)} <= known.keys()
    return os.path.join(job.folder, path), is_whole


def directive(option: str, value: object) -> str:
    """Return an ``#SBATCH`` line. Values that are not plain words are quoted, because sbatch's
    parser treats quotes, ``#`` and backslashes specially.

    Args:
        option: The name of the option, without dashes.
        value: A text or a number; True for an option without a value.
    """
    if value is True:
        return f"#SBATCH --{option}"
    text = str(value)
    if not re.fullmatch(r"[\w%+,./:=@*\[\]-]*", text, re.ASCII):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{option}={text}"


def salloc_options(job: SlurmJob) -> list[str]:
    """Return the options of the job that salloc has too, as words of a command line."""
    return _words(_requested(job))


def step_options(job: SlurmJob) -> list[str]:
    """Return the options of srun that come from the site or the user, as words of bash."""
    return [word(each) for each in (*_words([("mpi", job.mpi)]), *job.srun_arg)]


def run_options(job: SlurmJob) -> list[str]:
    """Return the options of ``srunddp run`` as words of bash, for a job script that is converted
    and not made by :func:`render`.
    """
    own = _run_options(job, result=job.result, monitor_dir=job.monitor_dir)
    return [word(each) for each in own]


def _requested(job: SlurmJob) -> list[tuple[str, str | int | bool]]:
    """Return the options for sbatch or salloc that have a value: those made from the fields of the
    job, and the words of ``sbatch_arg``.

    Returns:
        The names, without dashes, and the values; True for an option without a value.
    """
    requested = [
        ("job-name", job.name),
        ("nodes", job.node_count),
        ("ntasks-per-node", job.tasks),
        ("cpus-per-task", job.cpus_per_task),
        ("signal", job.warning),
        ("no-kill", job.outlives_nodes and "no-kill" not in job.slurm),
        *map(split, job.sbatch_arg),
    ]
    return [(name, value) for name, value in requested if value]


def _words(options: Iterable[tuple[str, object]]) -> list[str]:
    """Return options as words of a command line. True stands for an option without a value. An
    option whose value is None, False, 0 or empty is left out.
    """
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options if value
    ]


def _allocation(job: SlurmJob) -> list[str]:
    return [
        "# Outside a job: once more, under salloc.",
        'if [ -z "${SLURM_JOB_ID:-}" ]; then',
        # The script starts itself again, which it cannot if bash reads it from standard input.
        '  [ -f "$0" ] || { echo "this script has to be a file: bash FILE" >&2; exit 78; }',
        *_indented(_continued(["exec salloc", *map(word, salloc_options(job)), 'bash "$0"'])),
        "fi",
    ]


def _modules(job: SlurmJob) -> list[str]:
    """Return the lines that load the modules, with the shell function ``module`` of Lmod or
    Environment Modules; none if there are no modules.
    """
    if job.module_purge:
        purge = ["module purge"]
    else:
        purge = []
    return _lenient(
        [*purge, *(["module load " + " ".join(map(word, job.modules))] if job.modules else [])]
    )


def _lenient(lines: Sequence[str]) -> list[str]:
    """Return lines that may read unset variables, between ``set +u`` and ``set -u``; none if there
    are no such lines.
    """
    if lines:
        return ["# What follows may read variables that are not set.", "set +u", *lines, "set -u"]
    return []


def _environment(job: SlurmJob) -> list[str]:
    """Return the lines that activate the job's conda or virtual environment.

    For a job in a container that has no environment of these, return a line that makes sure that no
    virtual environment counts as active.
    """
    if job.conda:
        # In a batch script, `conda activate` works only after conda's hook has defined the shell
        # function conda.
        activation = [
            'eval "$("${CONDA_EXE:-conda}" shell.bash hook)"',
            f"conda activate {word(job.conda)}",
        ]
        return [*_lenient(activation), _NO_VENV]
    if not job.venv:
        if job.in_container:
            return [_NO_VENV]
        return []
    if os.path.isabs(job.venv):
        folder = word(job.venv)
    else:
        folder = f'"$PWD"/{word(job.venv)}'
    return [
        "# What its bin/activate does.",
        f"export VIRTUAL_ENV={folder}",
        'export PATH="$VIRTUAL_ENV/bin:$PATH"',
        "unset PYTHONHOME",
    ]


def _traps(job: SlurmJob) -> list[str]:
    """Return the lines that catch Slurm's SIGTERM, if commands follow the training. With
    ``--stage``, these lines also make the script remove the copies however it ends.
    """
    if not (job.stage or job.monitor or job.requeue):
        return []
    clean_up = [
        "clean_up() {",
        # The lines of _await_end() may call clean_up before the script's end. Remove the trap, so
        # that clean_up does not run again at the end.
        "  trap - EXIT",
        # At the job's end no job step can start any more, and the node agents of srunddp stage push
        # remove the copies themselves.
        f'  [ -n "$ended" ] || {word(job.command)} stage clean || true',
        "}",
        "trap clean_up EXIT",
    ]
    return [
        (
            "# Slurm's SIGTERM comes to this shell, too: it waits for the ranks, which may be"
            " writing a checkpoint."
        ),
        "ended=",
        # bash runs a trap only after the command in the foreground has ended, so this trap does not
        # cut short the wait for srun.
        "trap ended=yes TERM",
        *(clean_up if job.stage else []),
    ]


def _stage(job: SlurmJob) -> list[str]:
    """Return the lines that copy folders to nodes that do not see them, by ``srunddp stage push``;
    none without ``--stage``.
    """
    if not job.stage:
        return []
    logs = os.path.normpath(job.log_folder)
    without = [*([] if logs.startswith("/") else [f"/{glob.escape(logs)}"]), *job.stage_exclude]
    options = [
        *(f"--data {word(each)}" for each in job.data),
        *(f"--exclude {word(each)}" for each in without),
    ]
    return [
        (
            "# To nodes that do not see them; prints the srunddp that every node has. That enters"
            " this folder or its copy,"
        ),
        "# since not all nodes could start here: so --chdir=/ below.",
        " ".join(
            [
                f'srunddp=$({word(job.command)} stage push --env "$VIRTUAL_ENV" --project "$PWD"',
                *options,
            ]
        )
        + ")",
    ]


def _preflight(job: SlurmJob) -> list[str]:
    if not job.preflight:
        return []
    if job.module:
        script = []
    else:
        script = [job.script or ""]
    words = shlex.join([*_common_options(job), f"--output-dir={job.log_folder}", *script])
    why = (
        "# If a node, a network or the environment fails the check, the job ends here with exit"
        " code 69."
    )
    return [why, *_continued([*_srun(job), f"{_command(job)} check {words}"])]


def _training(job: SlurmJob) -> list[list[str]]:
    """Return the lines of the job step that trains, and of what follows it, as sections."""
    why = ["# The first rank that fails ends the others."]
    if job.spare_nodes:
        why = [
            "# srunddp itself ends and restarts ranks, those of a lost node on a spare one: srun"
            " must end none."
        ]
    elif job.min_nodes:
        why = ["# srunddp itself ends and restarts ranks, without a lost node: srun must end none."]
    step = [*_srun(job, training=True), *_run(job)]
    if not (job.requeue or job.monitor or job.restarts_ranks):
        return [[*why, *_continued(step)]]
    # Without `|| code=$?`, `set -e` would end the script if the step fails, and the lines after the
    # step would not run.
    step[-1] += " || code=$?"
    return [
        [*_result(job), *why, "code=0", *_continued(step)],
        [
            *(_OWN_CODE if job.restarts_ranks else []),
            *_await_end(job),
            *_report(job),
            'exit "$code"',
        ],
    ]


def _result(job: SlurmJob) -> list[str]:
    if not job.restarts_ranks:
        return []
    if job.result:
        path = _absolute(job.result)
    else:
        path = f'{_absolute(job.log_folder)}/"$SLURM_JOB_ID".result.json'
    # Remove the result file of an earlier start: a requeued job keeps its number, so its file has
    # the same name.
    return [f"result={path}", 'rm -f -- "$result"']


def _absolute(path: str) -> str:
    if os.path.isabs(path):
        return word(path)
    return f'"$PWD"/{word(path)}'


def _srun(job: SlurmJob, *, training: bool = False) -> list[str]:
    """Return the lines with srun, its options and the container, up to the command of each task.

    Args:
        job: The job.
        training: Whether the ranks are started for the training, and not for ``srunddp check``.
            srun ends the check as soon as one task has failed: otherwise it would wait for a task
            that hangs until the job's time limit.
    """
    if training and job.outlives_nodes:
        # srun would end the other tasks when a node is lost, when a task fails, and WaitTime
        # (slurm.conf) after the first task has ended. Each option here prevents one of the three.
        ending = "--no-kill --kill-on-bad-exit=0 --wait=0"
    else:
        ending = "--kill-on-bad-exit=1"
    # With --stage, not every node has the working directory, so the tasks start in /. Then srunddp
    # enters the working directory or its copy, because of --staged.
    options = [
        ("chdir", job.stage and "/"),
        ("gpu-bind", job.has_gpus and "none"),
        ("mpi", job.mpi),
    ]
    return [
        # Give --export=ALL, so that the ranks get the script's variables even if the site's default
        # is to pass none.
        shlex.join(["srun", "--export=ALL", *ending.split(), *_words(options), *job.srun_arg]),
        *_container(job),
    ]


def _container(job: SlurmJob) -> list[str]:
    if job.container:
        if job.has_gpus:
            gpus = "--nv "
        else:
            gpus = ""
        return [f'apptainer exec {gpus}--bind "$PWD" --pwd "$PWD" {word(job.container)}']
    if job.container_image:
        mounts = "".join(f",{word(each)}" for each in job.container_mounts)
        image = f"--container-image={word(job.container_image)}"
        # Name the variables of --env, because otherwise the image's own values would win.
        names = ",".join(each.partition("=")[0] for each in job.env)
        if names:
            exported = f" --container-env={names}"
        else:
            exported = ""
        return [
            image,
            f'--container-mounts="$PWD:$PWD"{mounts} --container-workdir="$PWD"{exported}',
        ]
    return []


def _run(job: SlurmJob) -> list[str]:
    """Return the lines of ``srunddp run``: its options, then the script with its arguments."""
    options = _run_options(
        job,
        result=None if job.restarts_ranks else job.result,
        monitor_dir=job.monitor_folder if job.monitor else job.monitor_dir,
    )
    if job.restarts_ranks:
        result = '--result="$result" '
    else:
        result = ""
    script = shlex.join((*(("-m",) if job.module else ()), job.script or "", *job.arguments))
    if not options:
        return [f"{_command(job)} run {script}"]
    return [f"{_command(job)} run {result}{shlex.join(options)}", script]


def _run_options(job: SlurmJob, *, result: str | None, monitor_dir: str | None) -> list[str]:
    """Return the options of ``srunddp run`` that the job has, as words of a command line.

    Args:
        job: The job.
        result: The value of ``--result``; None to leave the option out.
        monitor_dir: The value of ``--monitor-dir``; None to leave the option out.
    """
    own = [
        ("offline", job.offline),
        ("restarts", job.restarts),
        ("spare-nodes", job.spare_nodes),
        ("min-nodes", job.min_nodes),
        ("result", result),
        ("log-dir", job.log_dir),
        ("monitor", job.monitor),
        ("monitor-dir", monitor_dir),
    ]
    return [*_common_options(job), *_words(own), *job.run_options]


def _common_options(job: SlurmJob) -> list[str]:
    """Return the options that both ``srunddp run`` and ``srunddp check`` get, as words of a command
    line.
    """
    return _words([("staged", job.stage), ("backend", job.backend), ("ifaces", job.ifaces)])


def _command(job: SlurmJob) -> str:
    return '"$srunddp"' if job.stage else word(job.command)


def _await_end(job: SlurmJob) -> list[str]:
    """Return the lines that wait for Slurm to end a preempted job, if Slurm is older than 24.05;
    none without ``--requeue``.

    Older versions requeue a preempted job only if Slurm ends it, so the job must not end by itself.
    Later versions also requeue a job that ends by itself, so waiting is not needed there. It would
    even do harm: they remember that the job was preempted until it ends by itself. If Slurm ends
    the job, the next start is therefore requeued, too, when it ends, although it may be complete.
    """
    if not job.requeue:
        return []
    return [
        (
            "# 143: there is a checkpoint, and Slurm is about to end the job. Slurm before"
            f" {_REQUEUES_WHAT_ENDS} takes a preempted job"
        ),
        (
            "# that ends by itself for done. Later versions requeue it; if it waits, they may"
            " requeue it twice."
        ),
        "slurm=$(srun --version || true)",
        # Use a variable for the version, because ShellCheck takes `<` between two texts with dots
        # for a mistake.
        f"requeues={_REQUEUES_WHAT_ENDS}",
        'if [ "$code" = 143 ] && [ -z "$ended" ] && [[ ${slurm##* } < $requeues ]]; then',
        *(["  clean_up"] if job.stage else []),
        f"  sleep {_SLEEP} || true",
        "fi",
    ]


def _report(job: SlurmJob) -> list[str]:
    if not job.monitor:
        return []
    # With a container, the report needs a job step: only the image has srunddp, and pyxis starts a
    # container only in a step.
    one_task = "srun --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1"
    if job.in_container:
        step = [one_task, *_container(job)]
    else:
        step = []
    folder = word(job.monitor_folder)
    # A preempted job (exit code 143) writes no report: it may take longer than the time that Slurm
    # leaves the job, see _await_end().
    not_preempted = ' && [ "$code" != 143 ]' if job.requeue else ""
    first, *rest = [
        *step,
        f'{word(job.command)} report "$SLURM_JOB_ID" --monitor-dir={folder} || true',
    ]
    return [
        "# If Slurm ends the job there is no time for a report: the same command writes it later.",
        f'if [ -z "$ended" ]{not_preempted}; then',
        # Without --foreground, timeout and the report would be in a process group of their own,
        # where a signal to the script's process group would not reach them.
        *_indented(_continued([f"timeout --foreground {_REPORT} {first}", *rest])),
        "fi",
    ]


def _continued(lines: Iterable[str]) -> list[str]:
    """Return the parts of one command as lines, of which all but the last end with a backslash."""
    return " \\\n  ".join(lines).split("\n")


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
