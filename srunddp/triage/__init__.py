"""Diagnoses a job from the logs of srunddp or any other launcher: what failed first, why, and which
ranks have no output.

Data flows one way. ``logs`` finds the files and reads their lines. ``rank_labels`` tells which rank
a line belongs to. ``collect`` turns lines about a failure, or about the end of a rank or of the
run, into events, with the help of ``signatures``, ``tracebacks`` and ``reports``. ``own_files``
reads the files that srunddp itself has written: what they say is certain. ``stalls`` reads the
stacks that ranks print on SIGURG. ``rules`` sets aside the events that are no failure by
themselves. ``diagnose`` finds the first failure, ``certainty`` decides whether it is certain, and
``render`` writes the result.
"""
