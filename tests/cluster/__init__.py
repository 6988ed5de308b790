"""A real Slurm cluster of six nodes on one machine, built from network namespaces for the test
suite.

What a test can count on:

* Each node has its own network, hostname, ``/tmp`` and ``/dev/shm``. The rest of the file system is
  shared, so files that several nodes must see belong in ``Cluster.shared`` (or anywhere outside
  ``/tmp``).
* ``node01`` resolves to an address in the management network, which carries nothing but Slurm;
  ``node01-data`` to one in the data network, whose interface has different names on different
  nodes; ``node01-six`` to one in an IPv6-only network.
* With ``Settings(accounting=True)`` the cluster has a slurmdbd and a MariaDB. ``sacct`` shows a job
  and its steps within seconds of their end, and ``sstat`` shows running steps. Nobody needs an
  account.
* A process has one cluster, by the number of its environment variable ``SRUNDDP_TEST_CLUSTER``.
  ``Cluster.up()`` first removes whatever a killed run has left of the cluster with this number.
"""
