"""A diagnosis of logs, srunddp's or anybody's: what failed first, why, and which ranks have no
line.

Data flows one way: ``logs`` finds the files and their lines, ``rank_labels`` tells whose a line is,
``collect`` picks what speaks of an end as events (with ``signatures``, ``tracebacks`` and
``reports``), ``rules`` set aside what is no failure by itself, ``diagnose`` finds the first
failure, ``render`` prints it.
"""
