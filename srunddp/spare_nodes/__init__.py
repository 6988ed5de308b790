"""``--spare-nodes``: the last nodes of a step wait, and take the ranks of a node that is lost.

A run with the option has a :class:`srunddp.spare_nodes.spare_nodes.SpareNodes`. A run without it
imports nothing of this package. What the package adds, in the order of a run:

- :mod:`~srunddp.spare_nodes.layout`: which tasks are ranks, and which wait.
- :mod:`~srunddp.spare_nodes.lease`: until when a worker may run without an answer of rank 0.
- :mod:`~srunddp.spare_nodes.rank_zero`: which nodes are left after a failure, and whether this side
  of a network that is split may go on.
- :mod:`~srunddp.spare_nodes.server`: the rendezvous of a restart, in which lost ranks are replaced.
- :mod:`~srunddp.spare_nodes.srun`: whether srun is still there when rank 0's node is gone.

The supervisor calls it only by :mod:`srunddp.supervisor.node_replacement`, and the rendezvous only
by :data:`srunddp.bootstrap.rendezvous.roles.ReplacingServer`. The messages, the states and the
numbers of the tasks that wait stand where those of ranks do.
"""
