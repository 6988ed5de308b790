"""The times of a supervisor: for how long it waits, and how often it looks. All are in seconds.

They are handed to whatever waits, so that one instance says all that a run goes by. What a user may
choose has an option instead, whose default is here.
"""

from dataclasses import dataclass

STALL_TIMEOUT = 300.0
"""The default of ``--stall-timeout``: without a step of any rank for so long the run ends."""

LOST_AFTER = 60.0
"""The default of ``--lost-after``: without an answer of a node for so long it is lost."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The times that no option changes; the defaults are those of every run."""

    # The clock.

    late: float = 1.0
    """By how much longer than asked for a wait counts. A busy machine wakes a process late by less;
    what is longer is a suspension, and nobody's fault.
    """

    longest_wait: float = 30.0
    """The longest wait of a supervisor with nothing to do."""

    # The worker.

    stopped_for: float = 10.0
    """For how long a worker may be stopped, as by SIGSTOP. A debugger or ``kill -STOP`` by mistake
    may be quickly undone, and the other ranks hold their GPUs meanwhile.
    """

    stopped_looks: float = 1.0
    """How often a supervisor looks at a stopped worker. Where both are stopped, no more than one
    such wait counts, and :attr:`late`.
    """

    kill_after: float = 1.0
    """From SIGTERM to SIGKILL for a worker that ends for another's failure, and has nothing to
    save.
    """

    gives_up_after: float = 10.0
    """From SIGKILL until a worker is given up: it may have a GPU's memory to give back, and a
    process in a kernel call that does not return cannot be killed.
    """

    all_gone_within: float = 10.0
    """The same for the processes that a worker leaves, all of them together."""

    ends_within: float = 60.0
    """For how long a process may stay when its script is over, before it is named; then it has its
    ``--grace``.
    """

    signal_may_follow: float = 0.1
    """Between a worker's end by a signal and the same signal here: a launcher sends it to one after
    the other.
    """

    forwards_every: float = 1.0
    """How often a worker gets the same signal from its supervisor, where that cannot tell whether
    the launcher's has reached the worker: one that comes twice at once would be handled twice.
    """

    stacks_within: float = 1.0
    """In which a worker writes its stacks: faulthandler needs neither the GIL nor a file system."""

    stacks_look: float = 0.02
    """How often a supervisor looks whether there are more of them."""

    # The end of a run.

    rendezvous_ends_within: float = 7.0
    """From a failure during the rendezvous until this rank leaves: before that it tells the others,
    for which it may have to connect to rank 0.
    """

    killed_within: float = 12.0
    """From the end of the worker until its supervisor leaves without a word of rank 0, besides
    ``--grace``: longer than :attr:`gives_up_after`, within which all other workers have ended.
    """

    last_word: float = 1.2
    """For how long rank 0 leaves its connections open once all has been said. One message that was
    lost on the way can be sent again: TCP's first repetition comes within a second.
    """

    looks_whether_sent: float = 0.1
    """How often a rank whose worker has ended looks whether its last word is on its way."""

    output_within: float = 0.5
    """In which the terminal takes the rest of a rank's output; a reader that has stopped keeps
    nobody.
    """

    files_written_within: float = 2.0
    """In which the files about a failure are written, all of them together; a file system that does
    not answer keeps nobody.
    """

    deputy_files_written_within: float = 0.5
    """In which a deputy learns whether another has written ``failure.json``, and has thus spoken
    for rank 0. It is silent meanwhile, and where the file system is slow it is better that two
    speak than none.
    """

    deputy_stays: float = 0.5
    """For how long a deputy that has spoken for rank 0 can still be reached. The others notice the
    end of rank 0 at moments of their own, and a deputy that has left counts as one that cannot
    speak: the next one would say the same again.
    """

    # Which failure is the cause.

    secondary_waits: float = 0.7
    """For how long rank 0 waits for the cause of a failure that another has likely caused. Its
    message may be on the way, or the other supervisor busy; all ranks wait for the decision.
    """

    signalled_waits: float = 300.0
    """The same where ranks end by the launcher's signal, or have agreed to stop: who handles that
    may be saving a checkpoint. It begins again with each rank that ends so. The launcher's own
    limit, as Slurm's KillWait, most often ends this sooner.
    """

    signal_counts_for: float = 120.0
    """After the launcher's signal what fails fails for that. So long after it there is a reason of
    its own.
    """

    progress_after: float = 60.0
    """Where nothing counts steps: a start that took as long has made some, and another start is
    worth it.
    """

    # Who is there.

    pings_every: float = 5.0
    """Between two pings of a connection; fewer where ``--lost-after`` or ``--stall-timeout`` is
    short, see :attr:`srunddp.supervisor.failure_monitor.RankContext.ping_every`.
    """

    starved_for: float = 30.0
    """Beyond ``--lost-after``: without a ping, though the kernel answers, a supervisor is stopped
    or starved. A node that is short of memory or of processors may keep it from running for many
    seconds.
    """

    slurm_is_asked_after: float = 10.0
    """Without a sign of a node, after two pings, Slurm is asked whether it is down."""

    sinfo_within: float = 10.0
    """In which ``sinfo`` answers; slurmctld may be busy, and nobody waits."""

    stalled_answer_within: float = 3.0
    """In which all ranks answer with their stacks: :attr:`stacks_within`, and the way there and
    back.
    """

    deputy_answers_within: float = 1.0
    """In which a deputy's kernel accepts a connection: with one repetition on a network that
    works.
    """

    lease_ends_within: float = 3.0
    """With spare nodes: in which a worker has ended once its lease is over, before others go on
    without it. It is killed without being asked, see :attr:`late` and :attr:`all_gone_within`.
    """

    single_looks: float = 3600.0
    """How often the failure monitor of a single process has something to do, which is never."""

    # The thread that passes output on.

    relay_rests: float = 0.002
    """Between two reads, where a script prints line by line: else each line would wake the
    thread.
    """

    relay_looks: float = 0.05
    """How often it looks at the clock once the worker has ended."""

    relay_quiet: float = 0.2
    """Without output for so long after the worker's end, a process that was left behind is taken to
    be silent.
    """

    relay_holds: float = 0.5
    """For how long the worker waits for a terminal that takes nothing, where a file has all: a
    reader that is merely slower than a burst of output catches up.
    """


DEFAULT_LIMITS = Limits()
