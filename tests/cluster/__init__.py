"""A real Slurm cluster of six nodes on one machine, built from network namespaces for the test
suite.

What a test can count on:

* Each node has its own network, hostname, ``/tmp`` and ``/dev/shm``; everything else of the file
  system is shared, so files that several nodes must see belong in ``Cluster.shared`` (or anywhere
  outside ``/tmp``).
* ``node01`` resolves to the management network, which carries nothing but Slurm; ``node01-data`` to
  the data network, whose interface has another name on other nodes; ``node01-six`` to an IPv6-only
  network.
* With ``Settings(accounting=True)`` there is a slurmdbd with a MariaDB of its own; ``sacct`` has a
  job's and its steps' rows within seconds of their end, ``sstat`` those of a running step. Nobody
  needs an account.
* There is one cluster per machine. ``Cluster.up()`` first clears away whatever a killed run left
  behind.
"""
