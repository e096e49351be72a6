"""DD219 and DD221: whether every node reaches the store of torch, and whether a real start works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.launch import Contact, say_place
from ddpdoctor.model.words import grouped, name_list
from ddpdoctor.rules.answers import Answer, Problem, found, judged, passed, skipped, unknown
from ddpdoctor.rules.network import open_ports
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.rendezvous import mesh

if TYPE_CHECKING:
    from ddpdoctor.model.launch import Connecting, StoreView, Visit
    from ddpdoctor.rules.rendezvous.mesh import Meeting

    Attempts = list[tuple[Visit, Connecting]]


WORDS = {
    Contact.REFUSED: "is refused",
    Contact.RESET: "is accepted and then closed",
    Contact.UNREACHABLE: "is rejected with an error: a firewall prohibits it, or no route exists",
    Contact.NO_ANSWER: "gets no response: packets are dropped, or the host is down",
    Contact.NO_STORE: "reaches a program that is not a torch store",
    Contact.UNRESOLVED: "is not possible: the name does not resolve",
    Contact.FAILED: "fails",
}
# How a firewall, or a missing route, can show.
CLOSED = (Contact.REFUSED, Contact.RESET, Contact.UNREACHABLE, Contact.NO_ANSWER)


@rule(
    "DD219", "tcp-store", Severity.ERROR, "A node cannot reach torch's store",
    after=("port-free",), group=CheckGroup.NETWORK,
)  # fmt: skip
def check_tcp_store(meeting: Meeting) -> Answer:
    """Report nodes that cannot connect to the store, and a store that cannot be served."""
    seen = [(visit, visit.store_view) for visit in meeting.arrived() if visit.store_view is not None]
    if not seen:
        return skipped("no node tried to reach the store")
    untried = next((pair for pair in seen if pair[1].serves and pair[1].without_torch), None)
    if untried is not None:
        return unknown(f"{untried[0].host} could not serve a test store: {untried[1].without_torch}")
    failing = [(visit, view) for visit, view in seen if fails(view)]
    causes = [meeting.cause(mesh.PLACE_IS_WRONG, visit.host) for visit, _ in failing]
    open_ones = [
        (visit, view)
        for (visit, view), cause in zip(failing, causes, strict=True)
        # No other kind reports an answer that is not a store.
        if cause is None or any(attempt.contact is Contact.NO_STORE for attempt in view.attempts)
    ]
    if failing and not open_ones:
        first = next(cause for cause in causes if cause is not None)
        return skipped(f"another check already found the cause: {first.code} {first.kind}")
    is_short = any(error.kind == "rank-set" and error.severity is Severity.ERROR for error in meeting.found)
    if meeting.rendezvous.complete and is_short and not any(view.serves for _, view in seen):
        return skipped("the node that should serve the store did not join")
    place = f"{seen[0][1].host}:{seen[0][1].port}"
    reach = f"{sum(not fails(view) for _, view in seen)} of {len(seen)} nodes reach {place}"
    servers = [(visit, view) for visit, view in seen if view.serves]
    problems = [
        Problem(
            summary=f"{visit.host} cannot serve the store on port {view.port}: {view.not_served}",
            hosts=(visit.host,),
            evidence=("without it, torch reports on all other nodes that the client socket has timed out",),
            fix=f"run `ss -ltnp 'sport = :{view.port}'` on {visit.host} to find the process; or use another port on "
            "all nodes",
        )
        for visit, view in open_ones
        if view.not_served
    ]
    last = ((visit, view.attempts[-1]) for visit, view in open_ones if not view.not_served and view.attempts)
    by_contact = grouped((attempt.contact, (visit, attempt)) for visit, attempt in last)
    works_for = [visit for visit, view in seen if reached(view) and not view.serves]
    server = servers[0][0] if servers and not servers[0][1].not_served else None
    problems += (_unreached(meeting, contact, those, server, works_for) for contact, those in by_contact.items())
    # The addresses at which torch waits in vain before it tries the one that works
    told = {Contact.NO_ANSWER, Contact.CONNECTED}
    firsts = (
        (visit, next(attempt for attempt in view.attempts if attempt.contact in told))
        for visit, view in seen
        if reached(view)
    )
    held_up = [(visit, attempt) for visit, attempt in firsts if attempt.contact is Contact.NO_ANSWER]
    if held_up:
        problems.append(_held_up(held_up, seen, server))
    return judged(problems, reach)


def reached(view: StoreView) -> bool:
    """Return whether a node reached a store."""
    return any(attempt.contact is Contact.CONNECTED for attempt in view.attempts)


def fails(view: StoreView) -> bool:
    """Return whether a node did not reach the store, or could not serve it."""
    return bool(view.not_served) or not reached(view)


def _held_up(those: Attempts, seen: list[tuple[Visit, StoreView]], server: Visit | None) -> Problem:
    dead = those[0][1]
    clients = tuple(visit.host for visit, _ in those)
    works = next(attempt for _, view in seen for attempt in view.attempts if attempt.contact is Contact.CONNECTED)
    silent = [{attempt.address for attempt in view.attempts if attempt.contact is dead.contact} for _, view in seen]
    everywhere = all(dead.address in addresses for addresses in silent)
    lines = mesh.first_few(f"{visit.host} to {mesh.describe(attempt)}" for visit, attempt in those)
    return Problem(
        summary=f"on {name_list(clients)}, {dead.host} first resolves to an address that does not respond: torch "
        "waits there for minutes, before it tries the next address",
        hosts=(server.host,) if server is not None and everywhere else clients,
        evidence=(*lines, f"{works.address} works"),
        fix=f"remove {dead.address} from the entries of {dead.host} in DNS and /etc/hosts, or open port {dead.port} "
        f"there; or use {works.address} as the master address on all nodes",
    )


def _unreached(
    meeting: Meeting, contact: Contact, those: Attempts, server: Visit | None, works_for: list[Visit]
) -> Problem:
    clients = tuple(dict.fromkeys(visit.host for visit, _ in those))
    attempt = those[0][1]
    place = say_place(attempt.host, attempt.port)
    outbound = server is not None and bool(works_for) and contact in CLOSED
    alone = server is None or len(those) == 1
    blamed = clients if outbound else (server.host if server is not None else attempt.host,)
    words = WORDS[contact]
    if contact is Contact.REFUSED:
        nobody = "no process listens there, or a firewall answers with a reset"
        words += f": {nobody if server is None else 'a firewall answers'}"
    if server is None or contact not in CLOSED:
        direction = ""
    elif works_for:
        others, these = name_list(tuple(visit.host for visit in works_for)), name_list(clients)
        direction = f"; it works from {others}, so check what leaves {these}, and what {server.host} accepts from there"
    else:
        direction = f"; the store listens there, so check what {server.host} accepts"
    lines = list(mesh.first_few(f"{visit.host} to {mesh.describe(attempt)}" for visit, attempt in those))
    if server is not None:
        lines.append(f"{server.host} serves the store and can reach it")
    if works_for:
        lines.append(f"{name_list(tuple(visit.host for visit in works_for))} reached it")
    if not meeting.rendezvous.complete:
        lines.append("only one node saw this: it could not reach the others at all")
        # Nothing else reports, for example, an answer that wants another token.
        lines += [f"{visit.host} looked for them {visit.way_lost}" for visit, _ in those if visit.way_lost]
    return Problem(
        summary=f"{name_list(clients)} cannot reach the store: a connection to {place} {words}" + direction,
        hosts=clients if contact is Contact.UNRESOLVED else blamed,
        evidence=tuple(lines),
        fix=_store_fix(meeting, contact, those, server, outbound=outbound),
        confidence=Confidence.MEDIUM if alone or outbound else Confidence.HIGH,
    )


def _store_fix(meeting: Meeting, contact: Contact, those: Attempts, server: Visit | None, *, outbound: bool) -> str:
    attempt = those[0][1]
    clients = tuple(dict.fromkeys(visit.host for visit, _ in those))
    if contact is Contact.UNRESOLVED:
        return f"run `getent hosts {attempt.host}` on the node; add the name to DNS or /etc/hosts"
    look = f"run `ss -ltnp 'sport = :{attempt.port}'` on {attempt.host} to see what listens there"
    if contact not in CLOSED:
        return f"{look}; if it is another program, use another port on all nodes"
    if outbound and server is not None:
        return (
            f"check the outgoing rules on {name_list(clients)} and the incoming rules on {server.host} (nft list "
            f"ruleset, as root), and the route (ip route get {attempt.address})"
        )
    if server is None:
        return f"start the command on {attempt.host} too; {look}; if the store listens, a firewall blocks it"
    sources = tuple(visit.published for visit, _ in those)
    ports = (attempt.port, attempt.port)
    return f"{open_ports(meeting.node(server.number), ports, sources)} (as root on {server.host})"


STAGES = {
    "store": "the store was not reached",
    "init_process_group": "init_process_group did not return",
    "all_reduce": "the first all_reduce did not complete",
    "result": "the all_reduce gave a wrong sum",
}


@rule(
    "DD221", "start-trial", Severity.ERROR, "A real start with torch fails for an unknown reason",
    after=("mtu",), group=CheckGroup.NETWORK,
)  # fmt: skip
def check_start_trial(meeting: Meeting) -> Answer:
    """Report that `init_process_group` and an all-reduce fail between the nodes although everything they need works."""
    trials = meeting.rendezvous.trials
    if not trials:
        return skipped("no start was tested")
    failed = [trial for trial in trials if not trial.ok]
    worked = f"{len(trials) - len(failed)} of {len(trials)} nodes started and reduced a tensor"
    if not failed:
        return passed(worked)
    known = next((f"{f.code} {f.kind}" for f in meeting.found if f.severity is Severity.ERROR), "")
    if known:
        reason = known
    elif any(visit.store_view is not None and fails(visit.store_view) for visit in meeting.arrived()):
        reason = "not all nodes reach the store"
    elif any(mesh.failure_of(pair) is not None for pair in meeting.rendezvous.pairs):
        reason = "not all nodes can connect to each other"
    else:
        stalled = (pair.large for pair in meeting.rendezvous.pairs if pair.large and mesh.is_black_hole(pair))
        reason = next((f"a payload of {mesh.say_size(large.size_bytes)} stalls" for large in stalled), "")
    if reason:
        return skipped(f"a real start fails, as expected: {reason}")
    hosts = meeting.names(trial.node for trial in failed)
    stage, whole = STAGES.get(failed[0].stage, "it failed"), len(failed) == len(trials)
    return found(
        f"a real start with torch fails on {'all hosts' if whole else name_list(hosts)}: {stage}, "
        "although the store and all connections work",
        worked,
        hosts=hosts,
        evidence=mesh.first_few(
            f"{meeting.name(trial.node)}, after {mesh.say_duration(trial.duration_s)}: {trial.error or trial.stage}"
            for trial in failed
        ),
        fix="env | grep -E '^(GLOO|TP|USE_LIBUV|TORCH)' on each host lists variables that change how torch connects: "
        "unset them",
        confidence=Confidence.MEDIUM if whole else Confidence.HIGH,
    )
