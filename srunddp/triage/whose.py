"""Finds the rank and the node of the first failure."""

from collections.abc import Sequence

from srunddp.triage.collect import Evidence
from srunddp.triage.diagnosis import Diagnosis
from srunddp.triage.event import Event, is_same
from srunddp.triage.first_failure import OF_PEERS
from srunddp.triage.rank_labels import the_only_other
from srunddp.triage.signatures import Kind, says


def tell_whose(
    found: Diagnosis, first: Event, remaining: Sequence[Event], evidence: Evidence
) -> None:
    """Add rank and node of the first failure to the diagnosis.

    Rank and node come from the failure's line, from a launcher's report, or from the peers that
    noticed the end of the rank. They stay None if none of these shows them.

    Args:
        found: The diagnosis; it is changed.
        first: The event that shows the failure.
        remaining: The events that no rule sets aside.
        evidence: Everything else in the logs.
    """
    observed = evidence.observed
    if first.cause == "collective-timeout":
        # All ranks wait for the collective, except the one that did not join it.
        waited = {each.rank for each in remaining if each.cause == first.cause}
        found.rank = the_only_other(waited, observed)
        found.victim = found.rank is not None and found.rank != first.rank
    own = found.own
    if own and not found.victim and _is_whose(own, first):
        found.rank = own.rank
        found.node = own.node
        return
    node = None if found.victim else first.node or _lost_node(first, remaining)
    if _is_of_the_job(first):
        found.node = node
        return
    if found.rank is None and not found.victim:
        report = _only_report(remaining)
        candidates = (
            first.rank,
            _missed_by_all(remaining, evidence),
            report.rank if report else None,
            _only_one_left(first, remaining, evidence),
        )
        found.rank = next((rank for rank in candidates if rank is not None), None)
        if report and report.rank == found.rank:
            node = node or report.node
    if found.rank is not None:
        node = node or observed.nodes.get(found.rank)
    found.node = node


def _is_whose(own: Event, first: Event) -> bool:
    """Tell whether the rank and node that srunddp has named are also those of the first failure.

    The answer is True if srunddp and the first failure's line report the same failure, or if the
    first failure is the cause of that rank's end. It is False if the first failure is Slurm's line
    about the whole job or a node: then srunddp names the rank that the end of the job reached
    first.
    """
    if own.rank is None and not own.node:
        return False
    if first is own or is_same(own, first):
        return True
    if _is_of_the_job(first):
        return False
    return first.rank in (None, own.rank)


def _is_of_the_job(first: Event) -> bool:
    """Tell whether a failure is of the whole job or of a node, and of no rank. Then neither a label
    nor the lines of other ranks show whose failure it is.
    """
    return first.kind is Kind.ENDING or first.cause == "node-failure"


def _lost_node(first: Event, remaining: Sequence[Event]) -> str | None:
    """Return the node that Slurm names as lost; None if it names none, or several."""
    if first.cause != "node-failure":
        return None
    matches = (says("lost-node", each.text) for each in remaining if each.cause == first.cause)
    nodes = {match[1] for match in matches if match}
    return nodes.pop() if len(nodes) == 1 else None


def _missed_by_all(remaining: Sequence[Event], evidence: Evidence) -> int | None:
    """Find the rank whose end all others report; None if there is no such rank."""
    peers = {each.rank for each in remaining if each.kind is Kind.SECONDARY and each.raised}
    return the_only_other(peers, evidence.observed)


def _only_one_left(first: Event, remaining: Sequence[Event], evidence: Evidence) -> int | None:
    """Return the only rank with output, or, if peers miss a rank, the only rank without output.

    Returns:
        None if there is not exactly one such rank, or if a launcher reported how a rank ended. Also
            None if peers miss no rank and the failure's line is from Slurm or the kernel, which may
            mean any rank.
    """
    if evidence.report:
        return None
    observed = evidence.observed
    is_missed = any(each.kind is Kind.SECONDARY or each.cause in OF_PEERS for each in remaining)
    if is_missed:
        left = set(range(observed.world_size or 0)) - observed.seen
    elif says("authority", first.text):
        left = set()  # a line of Slurm or the kernel may be about any rank
    else:
        left = observed.seen
    return min(left) if len(left) == 1 else None


def _only_report(remaining: Sequence[Event]) -> Event | None:
    """Find the launcher's report of the rank that failed by itself.

    If the launcher reported several ranks, take the first report of a rank that did not notice the
    end of a peer, provided that other ranks did. None if there is no such report.
    """
    reports = [event for event in remaining if event.end and event.rank is not None]
    reported = {rank for event in reports if event.end for rank in event.end.ranks}
    if len(reported) == 1:
        return reports[0]
    peers = {
        each.rank
        for each in remaining
        if each.kind is Kind.SECONDARY or (each.raised and each.cause in OF_PEERS)
    }
    if not peers:
        return None
    for each in reports:
        if each.end and len(each.end.ranks) == 1 and each.rank not in peers:
            return each
    return None
