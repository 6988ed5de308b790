"""A verdict on logs, ours or anybody's: what failed first, why, and who never spoke.

Data flows one way: ``reading`` finds the files and their lines, ``who`` and ``crowd`` tell whose a line is, ``events``
picks what speaks of an end (with ``signatures``, ``tracebacks``, ``reports``, ``level`` and ``ours``), ``standing``
leaves out what the run survived, ``verdict`` judges, ``text`` says it.
"""
