"""``--spare-nodes``: the last nodes of a step wait, and take the ranks of a node that is lost.

:class:`srunddp.spare_nodes.spare_nodes.SpareNodes` is what a run with the option has, and one
without it has not; nothing else of this package is imported then. What it adds, in the order of a
run:

- :mod:`~srunddp.spare_nodes.layout`: which tasks are ranks, and which wait.
- :mod:`~srunddp.spare_nodes.lease`: until when a worker may run without an answer of rank 0.
- :mod:`~srunddp.spare_nodes.rank_zero`: which nodes are left after a failure, and whether this side
  of a network that is split may go on.
- :mod:`~srunddp.spare_nodes.server`: the rendezvous of a restart, in which lost ranks are replaced.

The supervisor knows of all this by :mod:`srunddp.supervisor.node_replacement` alone, and the
rendezvous by :class:`srunddp.bootstrap.rendezvous.rank_setup.SpareNodeTerms`.
"""
