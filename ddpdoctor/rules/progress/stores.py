"""Ranks that meet in vain: at a store that no process serves, or in a file that an earlier job has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.findings import Confidence, Place
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, unknown

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.places import places
from ddpdoctor.rules.progress.states import Activity
from ddpdoctor.rules.progress.words import line_of, verb

if TYPE_CHECKING:
    from ddpdoctor.model.facts import ProcessCauses, Rank, StoreSought
    from ddpdoctor.model.stacks import Frame

    from ddpdoctor.rules.progress.job_state import JobState

_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0", "[::1]")  # noqa: S104 - compared, not bound
CHECK = "ddpdoctor check-rendezvous"


def judge_stores(job: JobState) -> Answer:
    """Blame the ranks whose store does not answer, if no rank that should serve it exists or is on its way."""
    if job.waits.blockers or job.waits.absent:
        return passed()
    blamed = tuple(n for n in job.waits.waiters if _is_unserved(job, n))
    if not blamed or not set(blamed) <= job.quiet:
        return passed()
    if not job.waited_long():
        return unknown(f"{rank_list(blamed)} {verb(blamed, 'is', 'are')} connecting to the job's store")
    sure = all(_is_sure(job, n) for n in blamed)
    return judged([_finding(job, blamed, sure=sure)], certain=sure and job.stands_still(blamed))


def left_file(job: JobState) -> tuple[str, tuple[int, ...]] | None:
    """Return the file with an earlier job's addresses in which ranks meet, and those ranks; None if there is none.

    It held something before the first rank opened it. On several hosts, whose clocks differ, it did so for each rank.
    """
    ranks = [job.rank(n) for n in sorted(job.states) if job.rank(n).meeting is not None]
    if not ranks or not job.sees_all or any(job.rank(n).steps for n in job.states):
        return None
    first = min(ranks, key=lambda rank: rank.init_ns or 0)
    seen = ranks if len({rank.host for rank in ranks}) > 1 else [first]
    path = first.meeting.path if first.meeting is not None else ""
    mine = tuple(r.rank for r in ranks if r.meeting is not None and r.meeting.path == path)
    return (path, mine) if all(r.meeting is not None and r.meeting.size_bytes for r in seen) else None


def left_file_problem(job: JobState, path: str, blamed: tuple[int, ...]) -> Problem:
    """Report ranks that got the addresses of an earlier job's ranks from a file."""
    where = tuple(place for n in blamed for place in places(n, [_init_line(job, n)]))
    at = f" ({line_of(where[0])})" if where else ""
    return Problem(
        confidence=Confidence.HIGH,
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=where,
        summary=f"{say.who(job, blamed)} {verb(blamed, 'meets', 'meet')} in {path}{at}, which existed before the start "
        "and holds the addresses of an earlier job",
        evidence=(
            "the file was not empty when the first rank opened it; torch removes it only after a job that ends well",
            *say.classes(job, blamed),
            *say.others(job, blamed),
            *say.cascade_words(job.failures, (), also=""),
        ),
        fix=f"remove {path} before each start, give each start a file of its own, or call init_process_group() "
        "without init_method under torchrun",
    )


def _init_line(job: JobState, number: int) -> Frame | None:
    """Return the line at which a rank called ``init_process_group``."""
    rank = job.rank(number)
    calls = [call for call in rank.open_calls if call.op == "init_process_group"]
    ended = pack_calls(rank.recent_calls).last_of_kinds(lambda kind: kind.op == "init_process_group")
    call = calls[-1] if calls else ended
    return call.site if call is not None else say.line_at(job.states[number])


def _sought(rank: Rank) -> StoreSought | None:
    return rank.causes.store if rank.causes is not None else None


def _is_unserved(job: JobState, number: int) -> bool:
    """Return whether a rank is a client of a store that no rank of the job serves at that address."""
    rank = job.rank(number)
    store = _sought(rank)
    if job.states[number].doing is not Activity.INIT or store is None or _serves(store):
        return False
    return store.port not in _ports_served(job) or _is_elsewhere(job, store, rank)


def _is_elsewhere(job: JobState, store: StoreSought, rank: Rank) -> bool:
    """Return whether a rank looks for the store on its own host, where nobody listens, while rank 0 is on another."""
    apart = 0 in job.states and job.rank(0).host != rank.host
    return apart and _is_local(store, rank) and _nobody_listens(store, rank.causes)


def _serves(store: StoreSought) -> bool:
    return store.rank == 0 and not store.of_agent


def _ports_served(job: JobState) -> set[int]:
    """Return the ports at which a rank serves its store while it waits for the others."""
    stores = (_sought(job.rank(n)) for n in job.states)
    return {store.port for store in stores if store is not None and _serves(store)}


def _is_sure(job: JobState, number: int) -> bool:
    """Return whether nobody will serve a rank's store: it looks on its own host, where no agent or rank 0 serves it."""
    rank = job.rank(number)
    store = _sought(rank)
    if store is None:
        return False
    alone = store.of_agent and _is_local(store, rank) and _nobody_listens(store, rank.causes)
    return alone or _is_elsewhere(job, store, rank)


def _is_local(store: StoreSought, rank: Rank) -> bool:
    connections = rank.causes.connections if rank.causes is not None else None
    own = {address for address, _ in connections.by_address} if connections is not None else set()
    return store.host.startswith(_LOOPBACK) or store.host in own | {rank.host}


def _nobody_listens(store: StoreSought, causes: ProcessCauses | None) -> bool:
    """Return whether the host's sockets were read, and none listens on the store's port."""
    if causes is None or causes.connections is None or not causes.connections.listening:
        return False
    return not any(end.endswith(f":{store.port}") for end in causes.connections.listening)


def _finding(job: JobState, blamed: tuple[int, ...], *, sure: bool) -> Problem:
    rank = job.rank(blamed[0])
    store = rank.causes.store if rank.causes is not None else None
    assert store is not None
    ends = {f"{one.host}:{one.port}" for one in map(_sought, map(job.rank, blamed)) if one is not None}
    where = tuple(place for n in blamed for place in _places(job, n))
    at = f" ({line_of(where[0])})" if where and {(p.file, p.line) for p in where if p.rank == blamed[0]} else ""
    return Problem(
        confidence=Confidence.HIGH if sure else Confidence.MEDIUM,
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=where,
        summary=f"{say.who(job, blamed)} {verb(blamed, 'is', 'are')} waiting in init_process_group{at} for a store at "
        f"{', '.join(sorted(ends))} that does not respond",
        evidence=(
            *_server_words(job, blamed, store),
            *_answer_words(rank, store),
            *say.classes(job, blamed),
            *say.others(job, blamed),
        ),
        fix=_fix(store),
    )


def _places(job: JobState, number: int) -> tuple[Place, ...]:
    store = _sought(job.rank(number))
    return places(number, (store.set_at if store is not None else None, say.line_at(job.states[number])))


def _is_moved(store: StoreSought) -> bool:
    """Return whether the script uses another address than the launcher gave."""
    if store.given is None or store.given.startswith("None:"):
        return False
    host, _, port = store.given.rpartition(":")
    return (_plain(host), port) != (_plain(store.host), str(store.port))


def _plain(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def _server_words(job: JobState, blamed: tuple[int, ...], store: StoreSought) -> list[str]:
    found = []
    if _is_moved(store):
        who = f"{line_of(store.set_at)} sets" if store.set_at is not None else "the script uses"
        via = f" ({store.method})" if store.method else ""
        found.append(f"the launcher set the store address to {store.given}, but {who} {store.host}:{store.port}{via}")
    if store.of_agent:
        found.append(
            "torchrun's agent serves the store at the address that torchrun set: with "
            "TORCHELASTIC_USE_AGENT_STORE=True, rank 0 is a client too, so no rank opens a store"
        )
    elif 0 in blamed or 0 not in job.states:
        found.append("rank 0 should serve the store")
    else:
        other = _sought(job.rank(0))
        at = f" at {other.host}:{other.port}" if other is not None else " at another address, or did so before"
        on = f" on {job.rank(0).host}" if job.rank(0).host != job.rank(blamed[0]).host else ""
        found.append(f"rank 0 should serve the store, but it serves one{at}{on}")
    return found


def _answer_words(rank: Rank, store: StoreSought) -> list[str]:
    """Return what happens to the connections."""
    causes = rank.causes
    if causes is None:
        return []
    end = f":{store.port}"
    connections = causes.connections
    if causes.blocked is not None and causes.blocked.remote is not None and causes.blocked.remote.endswith(end):
        who = causes.listener
        server = f"process {who.pid} ({who.command})" if who is not None else "the process that accepted the connection"
        return [f"{server} accepted the connection on port {store.port}, but it is no torch store"]
    if connections is not None and any(one.endswith(end) for one in connections.unanswered):
        return [f"{store.host}:{store.port} does not respond: packets are dropped, or the host does not exist"]
    if _nobody_listens(store, causes):
        return [f"no process listens on port {store.port} of {rank.host or 'this host'}; torch keeps retrying"]
    return []


def _fix(store: StoreSought) -> str:
    if store.of_agent and store.method == "env://" and _is_moved(store):
        at = f" (remove {line_of(store.set_at)})" if store.set_at is not None else ""
        return (
            f"keep the MASTER_ADDR and MASTER_PORT that torchrun sets{at}; to choose a port, pass `--master-port "
            "PORT` to the launcher"
        )
    if store.of_agent and _is_moved(store):
        return "with torchrun, call init_process_group() without init_method, so that it uses the launcher's address"
    if store.of_agent:
        return f"check that torchrun's agent on {store.host} is running and its port is reachable: `{CHECK}`"
    return f"give all ranks the address of rank 0's host, and check that its port {store.port} is reachable: `{CHECK}`"
