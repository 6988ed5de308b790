"""Diagnoses a job from the logs of srunddp or any other launcher: what failed first, why, and which
ranks have no output.

Data flows one way. ``logs`` finds the files and reads their lines. ``rank_labels`` tells which rank
a line belongs to. ``collect`` turns lines about a failure or an end into events, with the help of
``signatures``, ``tracebacks`` and ``reports``. ``own_files`` reads the files that srunddp itself
has written, which are certain, and ``stalls`` the stacks that ranks print when asked. ``rules`` set
aside the events that are no failure by themselves. ``diagnose`` finds the first failure, and
``render`` prints it.
"""
