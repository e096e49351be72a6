"""DD605 for a whole node: it died, or was cut off from the others, while the job ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.nodes import Presence
from ddpdoctor.model.rank_words import name_list, rank_list
from ddpdoctor.model.reaching import Contact
from ddpdoctor.rules.answers import Answer, Problem, judged, unknown

from . import evidence as say
from .nodes import attempts_at, hosts_of_nodes, is_alone, node_words, others_of, ranks_of, reached_words
from .scene import Scene, moment, timeout_ns, was_left_running
from .words import seconds, verb

if TYPE_CHECKING:
    from ddpdoctor.model.nodes import NodeSeen

_UP = frozenset({Contact.CONNECTED, Contact.REFUSED, Contact.RESET, Contact.NO_STORE})
"""Answers that only a running and reachable host can give."""


def judge_lost(scene: Scene) -> Answer:
    """Report the nodes that went silent, if the remaining ranks cannot go on without them."""
    if was_left_running(scene.job, scene.failures) and not _stands(scene):
        return unknown("the ranks that are left have not waited for the hang timeout yet")
    lost = _blamed(scene)
    cut_off = _is_cut_off(scene)
    own = (scene.job.host,) if cut_off and scene.job.host else ()
    unseen = set(range(scene.world)) - set(scene.states)
    finding = Problem(
        confidence=_confidence(scene, cut_off=cut_off),
        ranks=() if own else ranks_of(scene.job, lost, unseen),
        hosts=own or hosts_of_nodes(lost),
        summary=_summary(scene, lost, cut_off=cut_off),
        evidence=(
            *(sentence for node in lost for sentence in _seen_words(scene, node)),
            *reached_words(scene.job.reached),
            *say.classes(scene, sorted(scene.states)),
            *say.cascade_words(scene.failures, ()),
        ),
        fix=_fix(scene, lost, cut_off=cut_off),
    )
    certain = scene.stands_still(()) and not scene.is_ending()
    return judged([finding], certain=certain, may_resume=not all(_is_gone(scene, node) for node in lost))


def _is_gone(scene: Scene, node: NodeSeen) -> bool:
    """Return whether a node will not come back: it said that it left, or was silent for the whole hang timeout."""
    silent_ns = moment(scene.job) - (node.heard_ns or moment(scene.job))
    return node.presence is Presence.LEFT or silent_ns >= timeout_ns(scene.job)


def _stands(scene: Scene) -> bool:
    """Return whether the rest has made no progress for the hang timeout; without ranks, whether none has started."""
    if not scene.states:
        return scene.job.now_ns - scene.job.launched_ns >= timeout_ns(scene.job)
    return scene.waited_long() and set(scene.living) <= scene.quiet


def _blamed(scene: Scene) -> tuple[NodeSeen, ...]:
    """Return the lost nodes that do not answer, or all of them if all answer or none was tried.

    A member that hears nothing from the first node also hears nothing about the nodes that only the first reported on.
    """
    silent = tuple(node for node in scene.lost if not _answers(scene, node))
    return silent if is_alone(scene.job) and silent else scene.lost


def _answers(scene: Scene, node: NodeSeen) -> bool:
    return any(attempt.contact in _UP for attempt in attempts_at(scene.job.reached, node.host))


def _is_cut_off(scene: Scene) -> bool:
    """Return whether this node itself is cut off: it tried several others, and none answers."""
    others = others_of(scene.job)
    tried = [attempts_at(scene.job.reached, node.host) for node in others]
    hosts = {node.host for node in others}
    return is_alone(scene.job) and len(hosts) > 1 and all(tried) and not any(_answers(scene, n) for n in others)


def _confidence(scene: Scene, *, cut_off: bool) -> Confidence:
    if is_alone(scene.job) and not cut_off:
        return Confidence.MEDIUM  # with only one other node, either may be the one that is cut off
    return Confidence.HIGH


def _summary(scene: Scene, lost: tuple[NodeSeen, ...], *, cut_off: bool) -> str:
    waiters = scene.waits.waiters
    waiting = f", and {rank_list(waiters)} {verb(waiters, 'waits', 'wait')}{_where(scene)} in vain" if waiters else ""
    if cut_off:
        hosts = name_list(hosts_of_nodes(others_of(scene.job)))
        return f"this node ({scene.job.host}) is cut off from {hosts}: none of them answers"
    who = node_words(scene.job, lost)
    silent = seconds(max(moment(scene.job) - (node.heard_ns or moment(scene.job)) for node in lost))
    if all(_answers(scene, node) for node in lost):
        return f"the job on {who} is gone, though the host answers{waiting}"
    left = [node.status for node in lost if node.presence is Presence.LEFT]
    if left:
        return f"{who} ended with status {left[0]}, and what its ranks did was not told{waiting}"
    heard = f": nothing was heard of {'it' if len(lost) == 1 else 'them'} {silent}".rstrip() if silent else ""
    return f"{who} died or {verb(range(len(lost)), 'was', 'were')} cut off{heard}{waiting}"


def _where(scene: Scene) -> str:
    calls = {state.call.op for n in scene.waits.waiters if (state := scene.states[n]).call is not None}
    return f" in {calls.pop()}" if len(calls) == 1 else ""


def _seen_words(scene: Scene, node: NodeSeen) -> list[str]:
    who = node_words(scene.job, (node,))
    found = [f"{who}: {node.why}"] if node.why else []
    unseen = set(range(scene.world)) - set(scene.states)
    ranks = ranks_of(scene.job, (node,), ()) if node.ranks else tuple(sorted(unseen))
    if ranks and (node.ranks or len(scene.lost) == 1):
        found.append(f"{who} has {rank_list(ranks)}")
    return found


def _fix(scene: Scene, lost: tuple[NodeSeen, ...], *, cut_off: bool) -> str:
    if cut_off:
        return f"look at the network of {scene.job.host}: ip -s link show; nft list ruleset; dmesg"
    where = name_list(hosts_of_nodes(lost)) if hosts_of_nodes(lost) else "the node"
    if all(_answers(scene, node) for node in lost):
        return f"find out on {where} what ended the job there: dmesg, the batch system's log, who sent a SIGKILL"
    return (
        f"look whether {where} runs (its console, sinfo, kubectl get nodes), then at its network: ip -s link show; "
        "nft list ruleset; dmesg"
    )
