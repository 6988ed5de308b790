"""Runs in which something fails on purpose, with the verdict and the time until nothing of the run
is left.

* :mod:`plan` says what is to fail; :mod:`run` starts it, and measures; :mod:`verdict` reads what
  srunddp said.
* :mod:`trials` draws plans at random and repeats any of them by its seed::

      python -m tests.chaos.trials --seed 17
      python -m tests.chaos.trials --count 200

* :mod:`network` breaks the test cluster's network, and :mod:`relay` delays its packets.
"""
