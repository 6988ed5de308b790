"""The times of a supervisor, in seconds: how long it waits, and how often it looks.

One :class:`Limits` is handed to every part that waits, so a test can change all times in one place.
A time that a user may choose is an option instead, and only its default is here.
"""

from srunddp.util.quick_dataclass import dataclass

STALL_TIMEOUT = 300.0
"""The default of ``--stall-timeout``: the run ends after this time without a step of any rank."""

GRACE = 30.0
"""The default of ``--grace``: how long a script may take to end if it has failed or stopped, or if
it handles SIGTERM and is ended because of another rank. torchrun waits for the same time.
"""

RESTART_GRACE = 2.0
"""The default of ``--restart-grace``: how long any script may take to end before a restart."""

SIGNAL_GRACE = 300.0
"""The default of ``--signal-grace``: how long the other ranks may save after one has ended by the
launcher's signal. It is long because the launcher's own limit, such as Slurm's KillWait, should
decide. It is finite because no launcher ends processes to which it has only sent a single signal,
as by ``scancel --signal=TERM``.
"""

LOST_AFTER = 60.0
"""The default of ``--lost-after``: a node is lost if it has not answered for this time."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The times that no option changes. Every run has the defaults; only tests have others."""

    # The clock.

    late: float = 1.0
    """How much time beyond the requested end of a wait still counts, at most. A busy machine wakes
    a process late by less than this. If a wait takes longer, this process was suspended, and the
    rest of the time does not count against any rank.
    """

    longest_wait: float = 30.0
    """The longest time for which a supervisor with nothing to do waits before it looks again."""

    # The worker.

    stopped_for: float = 10.0
    """How long a worker may be stopped, as by SIGSTOP, before that counts as a failure. A debugger
    or a mistaken ``kill -STOP`` may soon let the worker go on. The time is short because the other
    ranks hold their GPUs meanwhile.
    """

    stopped_looks: float = 1.0
    """How often a supervisor looks at a stopped worker. If the supervisor is stopped as well, only
    one such wait and :attr:`late` count towards :attr:`stopped_for`.
    """

    kill_after: float = 1.0
    """The time from SIGTERM to SIGKILL for a worker that is ended because of another rank's failure
    and does not handle SIGTERM.
    """

    saving_looks: float = 1.0
    """How often a supervisor looks at a worker that handles SIGTERM and is being ended. If it has
    neither run Python nor written a file from one look to the next, it is killed: most likely its
    main thread waits for another rank, which is ending too.
    """

    gives_up_after: float = 10.0
    """The time from SIGKILL until the supervisor gives the worker up. A killed worker may take some
    seconds to give back a GPU's memory, and a process whose kernel call does not return cannot be
    killed at all.
    """

    all_gone_within: float = 10.0
    """How long the processes that a worker leaves behind may take to die, all of them together."""

    launchers_end_within: float = 4.0
    """How long the launchers that a script has started, such as ``srun``, may take to end after
    SIGTERM before they get SIGKILL, all of them together. They end their processes on other nodes
    in this time, which is part of :attr:`all_gone_within`.
    """

    left_behind_looks: float = 0.05
    """How often a supervisor that waits for other ranks looks whether all that its worker has left
    behind is gone.
    """

    ends_within: float = 60.0
    """How long a worker may stay when its script is over before the user is told; after that it has
    ``--grace`` until it counts as failed.
    """

    signal_may_follow: float = 0.1
    """How long after a worker's end by a signal the supervisor may still get the same signal. A
    launcher sends it to one process after the other.
    """

    signal_settles: float = 0.05
    """How long after it got a signal the supervisor asks the sentinel whether the signal has
    reached the worker too. A launcher sends a signal to one process after the other.
    """

    sentinel_answers_within: float = 5.0
    """How long the sentinel may take to answer; only a stopped or killed one takes that long."""

    marks_count_for: float = 1.0
    """How much earlier than the supervisor the sentinel may have noticed a signal. A supervisor
    that gets no CPU time notices a signal late.
    """

    held_signal_looks: float = 0.1
    """When a supervisor looks for the first time whether the script can take a signal that came
    before the script could set a handler. Each further wait is twice as long.
    """

    held_signal_looks_at_least: float = 2.0
    """The longest of the waits that begin with :attr:`held_signal_looks`."""

    stacks_within: float = 1.0
    """How long a worker may take to write its stacks. It is short because faulthandler needs
    neither the GIL nor a file system.
    """

    stacks_look: float = 0.02
    """How often a supervisor looks whether the worker has written more of its stacks."""

    # The end of a run.

    rendezvous_ends_within: float = 7.0
    """How long after a failure during the rendezvous a rank that has failed may stay. In this time
    it tells the other ranks of its failure, for which it may first have to connect to rank 0.
    """

    killed_within: float = 12.0
    """How long after the end of its worker, besides ``--grace``, a supervisor waits for rank 0 to
    close the connections. It is longer than :attr:`gives_up_after`, within which the workers of all
    other ranks end.
    """

    obeyed_within: float = 3.0
    """How long rank 0 waits, before it closes the connections, for ranks that have not yet said
    whether their worker has ended or is saving since the verdict. It is longer than
    :attr:`kill_after`, within which most workers end; a supervisor that needs more time is stopped
    or starved.
    """

    last_word: float = 1.2
    """How long rank 0 keeps its connections open after its last message. A message that was lost on
    the way can be sent again in this time: TCP first repeats it within a second.
    """

    output_within: float = 0.5
    """How long a supervisor waits for the terminal to take the rest of a rank's output. A reader
    that has stopped must not hold up the end of the run.
    """

    files_written_within: float = 2.0
    """How long a supervisor waits until the files about a failure are written, all of them
    together. A file system that does not answer must not hold up the end of the run.
    """

    deputy_files_written_within: float = 0.5
    """How long a deputy waits to learn whether another deputy has written ``failure.json`` and so
    has already reported for rank 0. After that it reports itself: if the file system is slow, two
    reports are better than none.
    """

    deputy_stays: float = 0.5
    """How long a deputy that has reported for rank 0 can still be reached. The other ranks notice
    the end of rank 0 a little earlier or later, and if the first deputy had left by then, the
    second would report the same again.
    """

    # Which failure is the cause.

    secondary_waits: float = 0.7
    """How long rank 0 waits for another failure when a failure arrives that another has likely
    caused. The message about the cause may still be on the way, or the supervisor that has to send
    it may be busy. The time is short because all ranks wait for the decision.
    """

    signal_counts_for: float = 120.0
    """How long after a signal of the launcher this rank's failures count as caused by the signal.
    If ``--signal-grace`` is longer, that counts instead. A later failure has a cause of its own.
    """

    progress_after: float = 60.0
    """How long a start must have taken to count as progress, and so be worth a restart, in a run
    whose script reports no steps.
    """

    first_step_stall_timeouts: float = 10.0
    """The multiple of ``--stall-timeout`` that a start may take until its first step. The time of
    :attr:`first_step_times` is added. There is such a limit only if an earlier start has made
    steps. The limit is long because before the first step data may be staged, caches filled and a
    model compiled, and because the file system may be slower than in the earlier start.
    """

    first_step_times: float = 3.0
    """The multiple of the time to the first step in an earlier start. It is added to the time of
    :attr:`first_step_stall_timeouts`.
    """

    # Which ranks are there.

    pings_every: float = 5.0
    """The time between two pings on a connection. It is shorter if ``--lost-after`` or
    ``--stall-timeout`` is short, see
    :attr:`srunddp.supervisor.failure_monitor.RankContext.ping_every`.
    """

    starved_for: float = 30.0
    """How long beyond ``--lost-after`` a supervisor may send no ping, while its node's kernel
    answers, before it counts as stopped or starved. A node that is short of memory or CPUs may keep
    a process from running for many seconds.
    """

    unheard_pings: float = 1.5
    """For how many intervals between pings nothing must have come from rank 0 so that a rank cannot
    tell how rank 0 has ended, if the connection is then reset: the message that the run is over may
    not have arrived.
    """

    slurm_is_asked_after: float = 10.0
    """How long a node must be silent before rank 0 asks Slurm whether it is down. By default two
    pings are missing then.
    """

    sinfo_within: float = 10.0
    """How long ``sinfo`` may take. The time can be long, because slurmctld may be busy and only a
    separate thread waits for the answer.
    """

    stalled_answer_within: float = 3.0
    """How long all ranks may take to answer with their stacks: :attr:`stacks_within`, and the time
    of the messages.
    """

    probe_within: float = 5.0
    """How long a node may take to answer another node's attempts to connect, after a failure or a
    stall whose cause is not known. The attempts are repeated in this time, as
    :attr:`probe_attempts` says and by TCP itself. So a link that is slow, or that loses one packet
    in five, does not count as cut.
    """

    probe_attempts: tuple[float, ...] = (0.0, 1.0, 2.5)
    """The times, in seconds after the beginning, at which a node tries to connect to each node that
    has not answered.
    """

    probe_look: float = 0.05
    """How often a supervisor looks whether nodes have answered its attempts to connect."""

    probe_answers_within: float = 6.5
    """How long all nodes may take to say which others they reach: :attr:`probe_within`, and the
    time of the messages.
    """

    gpus_answer_within: float = 2.5
    """How long NVML may take to say what is wrong with this node's GPUs, after a failure. A driver
    that has lost a GPU may not answer at all.
    """

    gpus_told_within: float = 3.0
    """How long rank 0 waits, before it ends the run, for other nodes to report the faults of their
    GPUs: :attr:`gpus_answer_within`, and the time of the messages.
    """

    gpus_killed_within: float = 0.2
    """How long a process that asks NVML may take to end after SIGKILL. A process whose kernel call
    does not return is left behind.
    """

    gpus_look: float = 0.02
    """How often a supervisor looks whether NVML has answered."""

    deputy_answers_within: float = 1.0
    """How long a deputy's kernel may take to accept a connection. On a network that works, TCP can
    repeat a lost packet once in this time.
    """

    returns_within: float = 60.0
    """How long a task whose node was given up tries to find the other tasks, once it can reach
    srun. Before it can, the node may be cut off.
    """

    lease_ends_within: float = 3.0
    """How long a worker may still run after the end of its lease, with spare nodes; after that,
    others go on with its rank. The worker is killed without SIGTERM, but its supervisor may notice
    the end of the lease late (:attr:`late`).
    """

    single_looks: float = 3600.0
    """How often the failure monitor of a single process is asked to act while nothing is due."""

    metrics_every: float = 10.0
    """How often the metrics of a run are written, if the site has asked for them. Prometheus reads
    them every 15 s to a minute.
    """

    # The thread that passes output on.

    relay_rests: float = 0.002
    """The pause between two reads when a script prints line by line. Without it each line would
    wake the thread.
    """

    relay_looks: float = 0.05
    """How often the thread checks whether its time is over, once the worker has ended."""

    relay_quiet: float = 0.2
    """How long no output may come, after the worker's end, before the thread stops reading. A
    process that the worker has left behind may hold the pipe open for longer.
    """

    relay_holds: float = 0.5
    """How long the thread does not read from the worker, so that the worker waits, if the terminal
    takes nothing and a file gets all the output. A reader that is only slower than a burst of
    output catches up in this time.
    """


DEFAULT_LIMITS = Limits()
