"""DD601, DD605 to DD607: ranks that others wait for: stuck, frozen, lost, never started, or looking for the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Presence
from ddpdoctor.model.findings import Confidence, FaultOrigin, Place, Severity
from ddpdoctor.model.launch import Contact
from ddpdoctor.model.words import name_list, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, unknown
from ddpdoctor.rules.network import EPHEMERAL
from ddpdoctor.rules.progress import job_state as jobs
from ddpdoctor.rules.progress import wait_causes as why
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.job_state import Cause, JobState, asked_if
from ddpdoctor.rules.progress.states import Activity, innermost_user, line_of, own_error, place_words, places, seconds
from ddpdoctor.rules.progress.transport import closed, queued_behind
from ddpdoctor.rules.progress.words import fix_of, sentences
from ddpdoctor.rules.registry import rule
from ddpdoctor.rules.rendezvous.mesh import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import Job, NodeSeen, ProcessCauses, Rank, StoreSought
    from ddpdoctor.model.launch import Connecting

CHECK = "run `ddpdoctor check-rendezvous` on every node to see which nodes cannot connect"
# Answers that only a running and reachable host can give.
_UP = frozenset({Contact.CONNECTED, Contact.REFUSED, Contact.RESET, Contact.NO_STORE})
_LOOK_AT_NETWORK = "ip -s link show; nft list ruleset; dmesg"
_NOT_REACHED = {
    Contact.UNRESOLVED: "the name does not resolve here",
    Contact.NO_ANSWER: "no response",
    Contact.NO_STORE: "another program responds",
}


def ranks_of(facts: Job, nodes: Sequence[NodeSeen], unseen: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks of nodes: those they reported, else by their numbers, else all unseen ones."""
    # A node's number is its node rank if the launch gave one. Nodes that never came have the last numbers anyway.
    found: set[int] = set()
    each = facts.local_ranks_expected
    for node in nodes:
        reported = jobs.reported_ranks(facts, node)
        if not reported and each and (facts.node_rank is not None or node.presence is Presence.ABSENT):
            reported = tuple(range(node.number * each, (node.number + 1) * each))
        found.update(reported or unseen)
    return tuple(sorted(found))


def hosts_of_nodes(nodes: Iterable[NodeSeen]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.host for node in nodes if node.host))


def node_words(facts: Job, nodes: Sequence[NodeSeen]) -> str:
    """Return "node 1 (dd1)", "node 1", "nodes dd1 and dd2", or for single ranks "rank 3 on dd1"."""
    hosts = hosts_of_nodes(nodes)
    if facts.members is not None and facts.members.of_ranks:
        return rank_list(node.number for node in nodes) + (f" on {name_list(hosts)}" if hosts else "")
    if len(nodes) == 1:
        return f"node {nodes[0].number}" + (f" ({hosts[0]})" if hosts else "")
    return f"nodes {name_list([node.host or str(node.number) for node in nodes])}"


def _contacts(facts: Job, node: NodeSeen) -> set[Contact]:
    attempts = facts.reached if node.host else ()
    return {attempt.contact for attempt in attempts if node.host in (attempt.host, attempt.address)}


def reached_words(reached: Iterable[Connecting]) -> list[str]:
    return [f"connecting from here to {describe(attempt)}" for attempt in reached]


def _first_failing(facts: Job) -> Connecting | None:
    return next((attempt for attempt in facts.reached if attempt.contact is not Contact.CONNECTED), None)


def reach_fix(attempt: Connecting, here: str) -> str:
    place = f"{attempt.host}:{attempt.port}"
    if attempt.contact is Contact.UNRESOLVED:
        return f"run `getent hosts {attempt.host}` on {here}; add the name to DNS or /etc/hosts"
    if attempt.contact is Contact.REFUSED:
        return (
            f"check that the job was started on {attempt.host}: run `ss -ltnp 'sport = :{attempt.port}'` there; {CHECK}"
        )
    if attempt.contact is Contact.NO_STORE:
        return f"another program uses {place}: choose another port (--rdzv-endpoint, --master-port)"
    ports = f"{EPHEMERAL[0]}-{EPHEMERAL[1]}"
    return f"allow {here} to reach {place} and ports {ports} (nft list ruleset on {attempt.host}); {CHECK}"


def judge_lost(job: JobState) -> Answer:
    facts = job.facts
    stands = job.waited_long() and set(job.living) <= job.quiet
    if not job.states:
        stands = facts.now_ns - facts.launched_ns >= job.timeout_ns
    if job.was_left_running() and not stands:
        return unknown("the remaining ranks have not waited for the whole --hang-timeout yet")
    # A member that hears nothing from the first node also hears nothing about the nodes that only the first reported
    # on: those that answer are not lost, unless all answer or none was tried.
    lost = tuple(node for node in job.lost if not (jobs.is_alone(facts) and _UP & _contacts(facts, node))) or job.lost
    others = jobs.others_of(facts)
    silent = all((found := _contacts(facts, node)) and not _UP & found for node in others)
    cut_off = jobs.is_alone(facts) and len({node.host for node in others}) > 1 and silent
    own = (facts.host,) if cut_off and facts.host else ()
    unseen = tuple(sorted(set(range(job.world)) - set(job.states)))
    seen = []
    for node in lost:
        seen += [f"{node_words(facts, (node,))}: {node.why}"] if node.why else []
        ranks = ranks_of(facts, (node,), ()) if node.ranks else unseen if len(job.lost) == 1 else ()
        seen += [f"{node_words(facts, (node,))} has {rank_list(ranks)}"] if ranks else []
    waiters = say.waiters_words(job, (), "it")
    waiting = f"; {waiters}" if waiters else ""
    whole, where = node_words(facts, lost), name_list(hosts_of_nodes(lost)) or "the node"
    silent_ns = [job.time_ns - (node.heard_ns or job.time_ns) for node in lost]
    left = [node.status for node in lost if node.presence is Presence.LEFT]
    fix = f"check whether {where} is up (console, sinfo, kubectl get nodes), then its network: {_LOOK_AT_NETWORK}"
    if cut_off:
        summary = f"this node ({facts.host}) is cut off: {name_list(hosts_of_nodes(others))} do not respond"
        fix = f"check the network of {facts.host}: {_LOOK_AT_NETWORK}"
    elif all(_UP & _contacts(facts, node) for node in lost):
        summary = f"the job on {whole} is gone, but the host responds{waiting}"
        fix = f"find out what ended the job on {where}: check dmesg and the batch system's log for a SIGKILL"
    elif left:
        summary = f"{whole} exited with status {left[0]} before its ranks sent a report{waiting}"
    else:
        quiet = seconds(max(silent_ns))
        heard = f": no message from {'it' if len(lost) == 1 else 'them'} {quiet}" if quiet else ""
        summary = f"{whole} died or {verb(range(len(lost)), 'was', 'were')} cut off{heard}{waiting}"
    finding = Problem(
        # With only one other node, either may be the one that is cut off.
        confidence=Confidence.MEDIUM if jobs.is_alone(facts) and not cut_off else Confidence.HIGH,
        ranks=() if own else ranks_of(facts, lost, unseen),
        hosts=own or hosts_of_nodes(lost),
        summary=summary,
        evidence=(
            *seen,
            *reached_words(facts.reached),
            *say.classes(job, sorted(job.states)),
            *say.cascade_words(job.failures, ()),
        ),
        fix=fix,
        origin=FaultOrigin.NETWORK if cut_off else FaultOrigin.MACHINE,
    )
    # A node will not come back if it said that it left, or was silent for the whole hang timeout.
    gone = all(node.presence is Presence.LEFT or ns >= job.timeout_ns for node, ns in zip(lost, silent_ns, strict=True))
    return judged([finding], certain=job.stands_still(()) and not job.is_ending(), may_resume=not gone)


def _judge_launchers(job: JobState) -> Answer:
    # What this node sees of them says why, if that can be known. If every node is here, the launchers look for each
    # other in different places.
    facts = job.facts
    if facts.now_ns - facts.launched_ns < facts.hang_timeout_s * 1e9:
        return unknown("the launcher has not waited for the whole --hang-timeout yet")
    waited = seconds(facts.now_ns - facts.launched_ns)
    if facts.members is None:
        return _judge_launcher_alone(facts, waited)
    absent = jobs.never_came(facts)
    if jobs.is_alone(facts) and facts.members.own != 0:  # only the first node would have reported the others
        absent = tuple(node for node in absent if node.number == 0)
    here, bad = facts.host or "this node", _first_failing(facts)
    failing = (
        f"{here} cannot reach {bad.host}:{bad.port} ({_NOT_REACHED.get(bad.contact, bad.contact.value)})" if bad else ""
    )
    unresolved = bad is not None and bad.contact is Contact.UNRESOLVED
    own = (facts.host,) if unresolved and facts.host else ()
    hosts = hosts_of_nodes(absent)
    if absent:
        summary = f"{node_words(facts, absent)} never joined; the launcher on this node has waited {waited}".rstrip()
        gone = {node.number for node in jobs.never_came(facts)}
        came = [node.host or str(node.number) for node in facts.members.nodes if node.number not in gone]
        seen = [f"{len(came)} of {facts.members.expected} nodes joined: {name_list(came)}"] if came else []
        if jobs.is_alone(facts):
            seen = ["this node got no message from any other node; their own reports show what they see"]
            summary = f"{failing}: {summary}" if bad is not None else summary
        where = f" on {name_list(hosts)}" if hosts else " there"
        fix = f"check that the job was started{where} with the same endpoint, id and number of nodes; {CHECK}"
    else:
        count = len(jobs.others_of(facts)) + 1
        summary = f"all {count} nodes are up, but their launchers have not completed the rendezvous {waited}".rstrip()
        summary = f"{summary}: {failing}" if bad is not None else summary
        seen = [f"on {host.host}, {words}" for host in facts.elsewhere for words in reached_words(host.reached)]
        fix = f"give all nodes the same --rdzv-id, --rdzv-endpoint and --nnodes; {CHECK}"
    finding = Problem(
        confidence=Confidence.HIGH if absent and not jobs.is_alone(facts) else Confidence.MEDIUM,
        ranks=ranks_of(facts, absent, ()),
        hosts=own or hosts,
        summary=summary,
        evidence=(
            *(f"{node_words(facts, (node,))}: {node.why}" for node in absent if node.why),
            *reached_words(facts.reached),
            *seen,
        ),
        fix=reach_fix(bad, here) if bad is not None and (jobs.is_alone(facts) or not absent) else fix,
    )
    return judged([finding], certain=True, may_resume=True)


def _judge_launcher_alone(facts: Job, waited: str) -> Answer:
    if facts.node_rank is None or not facts.local_ranks_expected or facts.world_size is None:
        return unknown("the ranks of this node are unknown")
    first = facts.node_rank * facts.local_ranks_expected
    here = range(first, first + facts.local_ranks_expected)
    elsewhere = tuple(n for n in range(facts.world_size) if n not in here)
    finding = Problem(
        confidence=Confidence.LOW,
        ranks=elsewhere,
        summary=f"the launcher of node {facts.node_rank} is waiting for other nodes: no rank has started {waited}",
        evidence=(
            f"the job has {facts.nnodes} nodes; {rank_list(elsewhere)} on the other nodes cannot be seen from here",
            *reached_words(facts.reached),
        ),
        fix=f"check that the other nodes were started and can reach this node's --rdzv-endpoint; {CHECK}",
    )
    return judged([finding])


@rule("DD606", "stopped", Severity.ERROR, "The process of a rank is frozen")
@asked_if(Cause.HANG, Cause.NONE, Cause.CONFLICT)
def check_stopped(job: JobState) -> Answer:
    """Report a process that is frozen: by SIGSTOP, by a debugger, or in the kernel."""
    frozen = tuple(n for n in job.living if job.states[n].doing is Activity.STOPPED)
    if not frozen:
        return passed()
    blamed = tuple(n for n in frozen if n in job.quiet)
    if not blamed:
        return unknown(f"{rank_list(frozen)} made progress just now")
    if not job.waits.waiters and not set(job.living) <= job.quiet:
        return unknown(f"{rank_list(frozen)} {verb(frozen, 'is', 'are')} stopped, but no rank is waiting yet")
    ranks = [job.ranks[n] for n in blamed]
    where = tuple(place for n in blamed for place in why.places_held_up(job.states[n])[:1])
    traced = [rank.traced_by for rank in ranks if rank.traced_by]
    asleep = any(rank.proc_state == "D" for rank in ranks)
    how = f"held by a debugger (process {traced[0]})" if traced else f"stopped (state {ranks[0].proc_state})"
    waiters = say.waiters_words(job, blamed)
    clues = {n: why.clues_of(job, n) for n in blamed[: say.MAX_CLASSES]} if asleep else {}
    by_host = [(f"on {host}: ", [rank for rank in ranks if rank.host == host]) for host in say.hosts_of(job, blamed)]
    kills = (f"{on}kill -CONT {' '.join(str(rank.pid) for rank in those)}" for on, those in by_host or [("", ranks)])
    fix = "check dmesg, and the device or file system that it reads" if asleep else "; ".join(kills)
    if traced:
        fix = "detach the debugger, or continue the process in it"
    finding = say.problem_of(
        job,
        blamed,
        confidence=Confidence.MEDIUM if asleep else Confidence.HIGH,
        where=where,
        summary=f"{say.who(job, blamed)} {verb(blamed, 'is', 'are')} {how}" + (f"; {waiters}" if waiters else ""),
        evidence=(
            *sentences(clues),
            *say.process_words(job, blamed),
            *say.others(job, blamed),
            *say.progress_words(job, blamed),
        ),
        fix=fix_of((clue for found in clues.values() for clue in found), fix),
    )
    # It lasts if they have been stopped for the whole hang timeout and no debugger can continue them. Sleep in the
    # kernel (D) does not count: it ends when the device or the file server answers, however late.
    since_ns = [rank.frozen_since_ns for rank in ranks if rank.proc_state == "T" and not rank.traced_by]
    stopped = [since for since in since_ns if since is not None and job.time_ns - since >= job.timeout_ns]
    lasting = job.waits.waiters and len(stopped) == len(ranks)
    return judged([finding], certain=job.stands_still(blamed), may_resume=not lasting)


@rule("DD607", "missing", Severity.ERROR, "A rank or node never joined")
@asked_if(Cause.HANG, Cause.NONE)
def check_missing(job: JobState) -> Answer:
    """Report ranks that have no process while others wait for them."""
    if job.cause is Cause.NONE and not job.states and (job.facts.nnodes > 1 or job.facts.members is not None):
        return _judge_launchers(job)
    absent = job.waits.absent
    in_init = any(state.doing is Activity.INIT for state in job.states.values())
    if not absent or (not job.sees_all and not in_init):
        return passed()
    if not job.waited_long():
        return unknown("no rank has waited for the whole --hang-timeout yet")
    asked = job.facts.local_ranks_expected
    size = f"the world size is {job.world}, and {len(job.states)} ranks were seen"
    seen = [*say.classes(job, job.waits.waiters), size]
    seen += [f"the launcher on this node starts {asked} ranks"] if asked is not None else []
    taken: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for rank in job.facts.ranks:
        if rank.pid is not None:
            taken.setdefault((rank.attempt, rank.rank), set()).add((rank.host, rank.pid))
    several = len({rank.host for rank in job.facts.ranks}) > 1
    doubled = [
        f"{len(found)} processes use rank {number}: "
        + ", ".join(f"{pid} on {host}" if several else str(pid) for host, pid in sorted(found))
        for (_, number), found in sorted(taken.items())
        if len(found) > 1
    ]
    alone = job.sees_all
    absent_nodes = [node for node in jobs.never_came(job.facts) if set(ranks_of(job.facts, (node,), ())) & set(absent)]
    hosts, bad = hosts_of_nodes(absent_nodes), _first_failing(job.facts)
    fix = f"check that the other nodes were started with the same endpoint and number of nodes; {CHECK}"
    if doubled:
        fix = "give each process its own rank: pass RANK, which the launcher sets, to rank="
    elif absent_nodes:
        where = f" on {name_list(hosts)}" if hosts else ""
        fix = f"check that the job was started{where} with the same endpoint and world size; {CHECK}"
    elif alone:
        fix = "start as many ranks as the world size (--nproc-per-node, --nnodes, or world_size= in the script)"
    elif bad is not None:
        fix = reach_fix(bad, job.facts.host or "this node")
    finding = Problem(
        confidence=Confidence.HIGH if alone else Confidence.LOW,
        ranks=absent,
        hosts=hosts,
        summary=f"{rank_list(absent)} never joined; {rank_list(job.waits.waiters)} "
        f"{verb(job.waits.waiters, 'is', 'are')} waiting for all {job.world} ranks"
        + "".join(f"; {sentence}" for sentence in doubled[:1]),
        evidence=(
            *seen,
            *doubled,
            *[
                f"no message from {node_words(job.facts, (node,))}" + (f": {node.why}" if node.why else "")
                for node in absent_nodes[: say.MAX_CLASSES]
            ],
            *reached_words(job.facts.reached),
        ),
        fix=fix,
    )
    certain = alone and job.stands_still(())
    return judged([finding], certain=certain, may_resume=bool(jobs.never_came(job.facts)))


_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0", "[::1]")  # noqa: S104 - compared, not bound
_CHECK_STORE = "`ddpdoctor check-rendezvous`"
_HOLDS_UP = frozenset({Activity.USER, Activity.DATA, Activity.BACKWARD, Activity.NATIVE})
# How many hang timeouts a rank gets if others have ended and nobody waits for it. Our choice: a last export may be
# long.
ALONE_PATIENCE = 4


def left_file_problem(job: JobState) -> Problem | None:
    """Report ranks that use a store file with the addresses of an earlier job's ranks, or return None if none do."""
    # It held something before the first rank opened it. On several hosts, whose clocks differ, it did so for each rank.
    meetings = {n: meeting for n in sorted(job.states) if (meeting := job.ranks[n].meeting) is not None}
    if not meetings or not job.sees_all or any(job.ranks[n].steps for n in job.states):
        return None
    first = min(meetings, key=lambda n: job.ranks[n].init_ns or 0)
    several = len({job.ranks[n].host for n in meetings}) > 1
    if not all(meetings[n].size_bytes for n in (meetings if several else [first])):
        return None
    path = meetings[first].path
    blamed = tuple(n for n, meeting in meetings.items() if meeting.path == path)
    where: tuple[Place, ...] = ()
    for n in blamed:
        calls = [call for call in job.ranks[n].open_calls if call.op == "init_process_group"]
        log = job.ranks[n].recent_calls
        call = calls[-1] if calls else log.last_of_kinds(lambda kind: kind.op == "init_process_group")
        where += places(n, [call.site if call is not None else say.line_at(job.states[n])])
    at = f" ({line_of(where[0])})" if where else ""
    return say.problem_of(
        job,
        blamed,
        where=where,
        summary=f"{say.who(job, blamed)} {verb(blamed, 'uses', 'use')} store file {path}{at}, which existed before the "
        "start and holds the addresses of an earlier job",
        evidence=(
            "the file was not empty when the first rank opened it; torch removes it only after a clean exit",
            *say.all_classes(job, blamed),
            *say.cascade_words(job.failures, (), also=""),
        ),
        fix=f"remove {path} before each start, use a new file for each start, or call init_process_group() "
        "without init_method under torchrun",
        step=None,
    )


def _nobody_listens(store: StoreSought, causes: ProcessCauses | None) -> bool:
    if causes is None or causes.connections is None or not causes.connections.listening:
        return False
    return not any(end.endswith(f":{store.port}") for end in causes.connections.listening)


def _server_words(job: JobState, blamed: tuple[int, ...], store: StoreSought) -> tuple[list[str], str]:
    found = []
    host, _, port = (store.given or "").rpartition(":")
    given, used = ("127.0.0.1" if name == "localhost" else name for name in (host, store.host))
    is_given = store.given is not None and not store.given.startswith("None:")
    is_moved = is_given and (given, port) != (used, str(store.port))  # the script uses another address
    if is_moved:
        who = f"{line_of(store.set_at)} sets" if store.set_at is not None else "the script uses"
        via = f" ({store.method})" if store.method else ""
        found.append(f"the launcher set the store address to {store.given}, but {who} {store.host}:{store.port}{via}")
    fix = (
        f"give all ranks the address of rank 0's host, and check that its port {store.port} is reachable: "
        f"{_CHECK_STORE}"
    )
    if store.of_agent:
        found.append(
            "torchrun's agent serves the store at the address that torchrun set: with "
            "TORCHELASTIC_USE_AGENT_STORE=True, rank 0 is a client too, so no rank opens a store"
        )
        fix = f"check that torchrun's agent on {store.host} is running and its port is reachable: {_CHECK_STORE}"
        if is_moved and store.method == "env://":
            at = f" (remove {line_of(store.set_at)})" if store.set_at is not None else ""
            fix = (
                f"keep the MASTER_ADDR and MASTER_PORT that torchrun sets{at}; to choose a port, pass `--master-port "
                "PORT` to the launcher"
            )
        elif is_moved:
            fix = "with torchrun, call init_process_group() without init_method, so that it uses the launcher's address"
    elif 0 in blamed or 0 not in job.states:
        found.append("rank 0 should serve the store")
    else:
        causes = job.ranks[0].causes
        other = causes.store if causes is not None else None
        at = f" at {other.host}:{other.port}" if other is not None else " at another address, or did so before"
        on = f" on {job.ranks[0].host}" if job.ranks[0].host != job.ranks[blamed[0]].host else ""
        found.append(f"rank 0 should serve the store, but it serves one{at}{on}")
    return found, fix


def _answer_words(rank: Rank, store: StoreSought) -> list[str]:
    causes = rank.causes
    if causes is None:
        return []
    end = f":{store.port}"
    connections = causes.connections
    if causes.blocked is not None and causes.blocked.remote is not None and causes.blocked.remote.endswith(end):
        who = causes.listener
        server = f"process {who.pid} ({who.command})" if who is not None else "the process that accepted the connection"
        return [f"{server} accepted the connection on port {store.port}, but it is not a torch store"]
    if connections is not None and any(peer.endswith(end) for peer in connections.unanswered):
        return [f"{store.host}:{store.port} does not respond: packets are dropped, or the host does not exist"]
    if _nobody_listens(store, causes):
        return [f"no process listens on port {store.port} of {rank.host or 'this host'}; torch keeps retrying"]
    return []


@rule("DD601", "stuck", Severity.ERROR, "A rank is stuck, and the others wait for it")
@asked_if(Cause.HANG, Cause.NONE)
def check_stuck(job: JobState) -> Answer:
    """Report a rank that is in no collective and makes no progress while others wait for it."""
    left = left_file_problem(job) if job.waits.waiters and not job.waits.blockers and job.waited_long() else None
    if left is not None and set(job.living) <= job.quiet:
        return judged([left], certain=True)
    if not job.waits.waiters:
        return _all_stuck(job)
    held = tuple(n for n in job.waits.blockers if job.states[n].doing in _HOLDS_UP)
    if not held:
        return _nobody_held(job)
    blamed = tuple(n for n in held if n in job.quiet)
    if not blamed:
        return unknown(f"{rank_list(held)} {verb(held, 'is', 'are')} still making progress")
    if not any(job.ranks[n].initialized for n in job.states) and not job.waited_long():
        return unknown("no rank has waited for the whole --hang-timeout yet")
    busy = [why.busy_at(job, n) for n in blamed]
    computing = (Activity.BACKWARD, Activity.NATIVE)
    inside = any(job.states[n].doing in computing or why.compiles(job.states[n]) for n in blamed)
    spins = any(load is not None and load.may_spin for load in busy)
    if not all(job.ranks[n].recorded for n in blamed) or spins or job.may_have_come:
        return _stuck(job, blamed, Confidence.LOW)
    return _stuck(job, blamed, Confidence.MEDIUM if any(busy) or inside else Confidence.HIGH)


def _nobody_held(job: JobState) -> Answer:
    late = why.find_late(job)
    if late:
        return judged([why.late_problem(job, late)], certain=not job.is_ending())
    behind = queued_behind(job) if closed(job) is not None else ()
    if behind and set(job.waits.waiters) <= job.quiet and job.waited_long():
        return _behind(job, behind)
    if job.waits.blockers or job.waits.absent:
        return passed()
    # A rank is not served if it is a client of a store that no rank of the job serves at that address, or if it looks
    # for the store on its own host, where nobody listens, while rank 0 is on another. That nobody will serve it is sure
    # only of a store on its own host, where no agent or rank 0 serves it.
    known = {n: causes.store for n in job.states if (causes := job.ranks[n].causes) is not None}
    stores = {n: store for n, store in known.items() if store is not None}
    servers = {n for n, store in stores.items() if store.rank == 0 and not store.of_agent}
    served = {stores[n].port for n in servers}
    deserted = set()
    for n, sought in stores.items():
        causes, host = job.ranks[n].causes, job.ranks[n].host
        connections = causes.connections if causes is not None else None
        own = {address for address, _ in connections.by_address} if connections is not None else set()
        is_local = sought.host.startswith(_LOOPBACK) or sought.host in own | {host}
        deserted |= {n} if is_local and _nobody_listens(sought, causes) else set()
    elsewhere = {n for n in deserted if 0 in job.states and job.ranks[0].host != job.ranks[n].host}
    blamed = tuple(
        n
        for n in job.waits.waiters
        if job.states[n].doing is Activity.INIT
        and n in stores
        and n not in servers
        and (stores[n].port not in served or n in elsewhere)
    )
    if not blamed or not set(blamed) <= job.quiet:
        return passed()
    if not job.waited_long():
        return unknown(f"{rank_list(blamed)} {verb(blamed, 'is', 'are')} connecting to the job's store")
    sure = all((n in deserted and stores[n].of_agent) or n in elsewhere for n in blamed)
    store = stores[blamed[0]]
    served_by, fix = _server_words(job, blamed, store)
    ends = {f"{stores[n].host}:{stores[n].port}" for n in blamed}
    where = tuple(place for n in blamed for place in places(n, (stores[n].set_at, say.line_at(job.states[n]))))
    at = f" ({line_of(where[0])})" if where and {(p.file, p.line) for p in where if p.rank == blamed[0]} else ""
    finding = say.problem_of(
        job,
        blamed,
        confidence=Confidence.HIGH if sure else Confidence.MEDIUM,
        where=where,
        summary=f"{say.who(job, blamed)} {verb(blamed, 'is', 'are')} waiting in init_process_group{at} for a store at "
        f"{', '.join(sorted(ends))} that does not respond",
        evidence=(*served_by, *_answer_words(job.ranks[blamed[0]], store), *say.all_classes(job, blamed)),
        fix=fix,
        step=None,
    )
    return judged([finding], certain=sure and job.stands_still(blamed))


def _behind(job: JobState, blamed: tuple[int, ...]) -> Answer:
    sites = {n: say.line_at(job.states[n]) for n in blamed}
    where = tuple(place for n, frame in sites.items() for place in places(n, [frame])[:1])
    at = f" {place_words(where[0])}" if len({(p.file, p.line) for p in where}) == 1 else ""
    mine = verb(blamed, "has queued its call", "have queued their calls")
    device = verb(blamed, "its device has not started it", "their devices have not started them")
    waiters = say.waiters_words(job, blamed)
    finding = say.problem_of(
        job,
        blamed,
        confidence=Confidence.MEDIUM,
        where=where,
        summary=f"{say.who(job, blamed)} {mine}{at}, but {device}" + (f"; {waiters}" if waiters else ""),
        evidence=(
            "torch times the kernels: the other ranks' kernels have started, and these have not",
            *say.all_classes(job, blamed), *why.limit_words(job),
        ),
        fix="use a profiler to find a slow kernel before that call on these ranks; check for a throttled or hung GPU "
        "with nvidia-smi and `ddpdoctor check-env`",
    )  # fmt: skip
    return judged([finding], may_resume=True)


def _all_stuck(job: JobState) -> Answer:
    blamed = tuple(n for n in job.living if job.states[n].doing in _HOLDS_UP)
    if not blamed or not job.was_left_running() or not set(blamed) <= job.quiet:
        return passed()
    ranks = [job.ranks[n] for n in blamed]
    last_ns = max(max(rank.last_progress_ns or 0, rank.started_ns or 0) for rank in ranks)
    long = job.time_ns - last_ns >= ALONE_PATIENCE * job.timeout_ns
    # Ranks that prepare may wait for something outside the job: a stale lock, or another's. The holder of a lock may
    # release it, so it gets time.
    left = all(why.is_left_behind(rank.causes) for rank in ranks)
    outside = left or (long and all(why.is_held_outside(job, rank) for rank in ranks))
    if not any(job.ranks[n].initialized for n in job.states) and not outside:
        return unknown("no rank has called init_process_group yet, so none is waiting")
    if len(blamed) < len(job.states) and not long:
        return unknown(f"{rank_list(blamed)} {verb(blamed, 'is', 'are')} still running; no rank is waiting")
    if not long and any(why.busy_at(job, n) for n in blamed):
        return unknown(f"{rank_list(blamed)} {verb(blamed, 'is', 'are')} busy; no rank is waiting")
    if unread := _unread_words(ranks):
        return _stuck(job, blamed, Confidence.LOW) if long else unknown(unread)
    if not job.sees_all or any(rank.device_idle for rank in ranks):  # only the default streams were asked
        return _stuck(job, blamed, Confidence.LOW)
    sure = all(why.is_surely_left(rank.causes) for rank in ranks)
    return _stuck(job, blamed, Confidence.HIGH if sure else Confidence.MEDIUM)


def _unread_words(ranks: Iterable[Rank]) -> str:
    """Name the ranks whose pending device work torch did not report: they may wait for each other."""
    unread = [rank.rank for rank in ranks if rank.device_unread]
    if not unread:
        return ""
    return f"torch did not report what {rank_list(unread)} {verb(unread, 'has', 'have')} pending on the device"


def _stuck(job: JobState, blamed: tuple[int, ...], confidence: Confidence) -> Answer:
    where = tuple(place for n in blamed for place in why.places_held_up(job.states[n]))
    clues = {n: why.clues_of(job, n) for n in blamed[: say.MAX_CLASSES]}
    busy = [work for n in blamed if (work := why.busy_at(job, n)) is not None]
    works = any(why.compiles(job.states[n]) or why.is_held_outside(job, job.ranks[n]) for n in blamed)
    in_vain = all(why.is_surely_left(job.ranks[n].causes) for n in blamed)
    limits = why.limit_words(job)
    error = own_error(job.ranks[blamed[0]]) if len(blamed) == 1 else None
    raised_at = innermost_user(error.frames) if error is not None else None
    mine = [place for place in where if place.rank == blamed[0]]
    after = [p for p in mine if raised_at is None or (p.file, p.line) != (raised_at.file, raised_at.line)]
    one_line = len({(p.file, p.line) for p in where}) == 1 or len(blamed) == 1
    place = place_words(next(iter(after or mine), None))
    at = f" {place}" if one_line else ""
    waiters = say.waiters_words(job, blamed)
    causes = job.ranks[blamed[0]].causes
    left = ""
    if one_line and causes is not None and causes.lock_file is not None and why.is_left_behind(causes):
        left = f": it waits for lock file {causes.lock_file.path}, and the owner of that file is gone"
    does = f"{verb(blamed, 'is', 'are')} {'stuck' if len(busy) < len(blamed) else 'busy'}{at}"
    if busy and len(blamed) == 1:
        does += f": {busy[0].said if busy[0].by_child else f'it {busy[0].said}'}"
    before = f"raised {error.type} {place_words(raised_at)} and " if error is not None else ""
    summary = f"{say.who(job, blamed)} {before}{does}{left}"
    # The error of a thread or child comes before the wait that follows from it
    if len(blamed) == 1 and not busy and (crashed := next(why.lost_helpers(job.states[blamed[0]]), None)) is not None:
        summary = f"on {say.who(job, blamed)}, {crashed.said}; it {before}{does}{left}"
    seen = [*say.all_classes(job, blamed), *say.handled_words(job, blamed)]
    seen += [*say.progress_words(job, blamed), *say.process_words(job, blamed)]
    idle = () if waiters else tuple(n for n in blamed if job.ranks[n].device_idle)
    if idle:
        seen.append(
            f"the default CUDA streams of {rank_list(idle)} have nothing left to do; under DETAIL this torch does not "
            "report which NCCL calls have completed on other streams: --debug-level OFF does"
        )
    seen += [*limits, *say.cascade_words(job.failures, blamed)]
    if not waiters:
        alone = _unread_words(job.ranks[n] for n in blamed) or "no rank is waiting for another"
        summary = summary if left else f"{summary}; {alone}"
    slow = "if it is just slow, raise --hang-timeout"
    fix = f"see what rank {blamed[0]} waits for {place} and give that wait a timeout; {slow}"
    if job.states[blamed[0]].doing is Activity.DATA:
        fix = f"see what the dataset does {place}; DataLoader(timeout=60) turns such a wait into an error"
    summary = f"{summary}; {waiters}" if waiters else summary
    fix = fix_of((clue for found in clues.values() for clue in found), fix)
    evidence = (*sentences(clues), *seen)
    said = say.problem_of(job, blamed, confidence=confidence, where=where, summary=summary, evidence=evidence, fix=fix)
    # It might go on, if a silent rank may wait for ranks that nobody sees.
    known = (job.sees_all or bool(job.waits.waiters)) and not job.may_have_come
    # On a busy machine a rank may be late to answer, and the next look shows what it waits for.
    unread = [job.ranks[n] for n in blamed if job.ranks[n].device_unread]
    last_ns = max((max(rank.last_progress_ns or 0, rank.started_ns or 0) for rank in unread), default=0)
    known = known and job.time_ns - last_ns >= (2 * ALONE_PATIENCE * job.timeout_ns if unread else 0)
    certain = known and job.stands_still(blamed) and all(job.ranks[n].recorded for n in blamed) and not works
    return judged([said], certain=certain, may_resume=not in_vain)
