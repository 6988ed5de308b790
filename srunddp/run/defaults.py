"""The defaults of options that ``srunddp run`` alone has; of others they stand beside their use."""

from srunddp.supervisor.limits import LOST_AFTER

GRACE = 30.0
"""Of ``--grace``, in seconds."""

RESTART_GRACE = 2.0
"""Of ``--restart-grace``, in seconds."""

_LOST_AFTER_WITH_SPARES = 15.0  # where another node takes over, a loss costs little more than that

LOST_AFTER_HELP = f"[default: {LOST_AFTER:.0f}s; with --spare-nodes {_LOST_AFTER_WITH_SPARES:.0f}s]"


def default_lost_after(spare_nodes: int) -> float:
    """The default of ``--lost-after``, in seconds, which depends on ``--spare-nodes``."""
    if spare_nodes:
        return _LOST_AFTER_WITH_SPARES
    return LOST_AFTER
