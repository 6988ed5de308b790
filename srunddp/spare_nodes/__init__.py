"""``--spare-nodes``: the last nodes of a job step wait, and take over the ranks of lost nodes.

Each task of a run with the option has a :class:`srunddp.spare_nodes.spare_nodes.SpareNodes`. A run
without the option does not import this package. The modules, in the order in which a run needs
them:

- :mod:`~srunddp.spare_nodes.layout`: which tasks are ranks, and which wait.
- :mod:`~srunddp.spare_nodes.lease`: until when a worker may run without an answer from rank 0.
- :mod:`~srunddp.spare_nodes.rank_zero`: which nodes are given up after a failure, and whether this
  side of a split network may go on.
- :mod:`~srunddp.spare_nodes.server`: the rendezvous of a restart, which replaces lost ranks.
- :mod:`~srunddp.spare_nodes.returning`: how the tasks of a node that was given up come back.
- :mod:`~srunddp.spare_nodes.srun`: whether srun still runs when rank 0's node is lost.

The supervisor calls this package only through :mod:`srunddp.supervisor.node_replacement`, and the
rendezvous only through :data:`srunddp.bootstrap.rendezvous.roles.ReplacingServer`. The messages,
states and numbers of the waiting tasks are declared where those of the ranks are declared.
"""
