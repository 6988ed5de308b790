"""Slurm's trackable resources (TRES), as in ``--tres-per-task`` and ``SLURM_TRES_PER_TASK``."""

import re


def tres_count(text: str, resource: str) -> int:
    """Sum the counts of a resource, over all its types, in a list of TRES.

    The notation depends on the version of Slurm: 23.02 writes ``gres:gpu:2``, later versions write
    ``gres/gpu=2`` and ``gres/gpu:a100=2``. The option also takes ``gres/gpu:a100:2``.

    Args:
        text: The list, such as ``cpu=4,gres/gpu:a100=2``.
        resource: ``cpu`` or ``gres/gpu``.

    Returns:
        The sum; a resource without a number counts as one. 0 if the list does not name it.
    """
    name = re.escape(resource).replace("/", "[/:]")
    entry = re.compile(rf"{name}(?::[^:=]*)??(?:[:=](?P<count>[0-9]{{1,6}}))?", re.IGNORECASE)
    found = (entry.fullmatch(part.strip()) for part in text.split(","))
    return sum(int(each["count"] or 1) for each in found if each)
