"""DD601: a living rank does not come to the collective that the others wait in, or to the store where they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.findings import Confidence, Place, Severity
from ddpdoctor.model.words import rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, unknown
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.job_state import Cause, JobState, asked_if
from ddpdoctor.rules.progress.states import Activity, innermost_user, line_of, own_error, place_words, places
from ddpdoctor.rules.progress.transport import closed, queued_behind
from ddpdoctor.rules.progress.wait_causes import (
    busy_at,
    clues_of,
    compiles,
    find_late,
    is_held_outside,
    is_left_behind,
    is_surely_left,
    late_problem,
    limit_words,
    places_held_up,
)
from ddpdoctor.rules.progress.words import fix_of, sentences
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.facts import ProcessCauses, Rank, StoreSought


_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0", "[::1]")  # noqa: S104 - compared, not bound
CHECK = "ddpdoctor check-rendezvous"
_HOLDS_UP = frozenset({Activity.USER, Activity.DATA, Activity.BACKWARD, Activity.NATIVE})
# How many hang timeouts a rank gets if others have ended and nobody waits for it. Our choice: a last export may be
# long.
ALONE_PATIENCE = 4


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
    where: tuple[Place, ...] = ()
    for n in blamed:
        calls = [call for call in job.rank(n).open_calls if call.op == "init_process_group"]
        log = pack_calls(job.rank(n).recent_calls)
        call = calls[-1] if calls else log.last_of_kinds(lambda kind: kind.op == "init_process_group")
        where += places(n, [call.site if call is not None else say.line_at(job.states[n])])
    at = f" ({line_of(where[0])})" if where else ""
    return say.problem_of(
        job,
        blamed,
        confidence=Confidence.HIGH,
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
        step=None,
    )


def _sought(rank: Rank) -> StoreSought | None:
    return rank.causes.store if rank.causes is not None else None


def _serves(store: StoreSought) -> bool:
    return store.rank == 0 and not store.of_agent


def _is_local(store: StoreSought, rank: Rank) -> bool:
    connections = rank.causes.connections if rank.causes is not None else None
    own = {address for address, _ in connections.by_address} if connections is not None else set()
    return store.host.startswith(_LOOPBACK) or store.host in own | {rank.host}


def _nobody_listens(store: StoreSought, causes: ProcessCauses | None) -> bool:
    """Return whether the host's sockets were read, and none listens on the store's port."""
    if causes is None or causes.connections is None or not causes.connections.listening:
        return False
    return not any(end.endswith(f":{store.port}") for end in causes.connections.listening)


def _is_moved(store: StoreSought) -> bool:
    """Return whether the script uses another address than the launcher gave."""
    if store.given is None or store.given.startswith("None:"):
        return False
    host, _, port = store.given.rpartition(":")
    given, used = ("127.0.0.1" if name == "localhost" else name for name in (host, store.host))
    return (given, port) != (used, str(store.port))


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


def _store_fix(store: StoreSought) -> str:
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


@rule("DD601", "stuck", Severity.ERROR, "A rank is stuck, and the others wait for it")
@asked_if(Cause.HANG, Cause.NONE)
def check_stuck(job: JobState) -> Answer:
    """Report a rank that is in no collective and makes no progress while others wait for it."""
    left = left_file(job) if job.waits.waiters and not job.waits.blockers and job.waited_long() else None
    if left is not None and set(job.living) <= job.quiet:
        return judged([left_file_problem(job, *left)], certain=True)
    if not job.waits.waiters:
        return _all_stuck(job)
    held = tuple(n for n in job.waits.blockers if job.states[n].doing in _HOLDS_UP)
    if not held:
        return _nobody_held(job)
    blamed = tuple(n for n in held if n in job.quiet)
    if not blamed:
        return unknown(f"{rank_list(held)} {verb(held, 'is', 'are')} still making progress")
    if not any(job.rank(n).initialized for n in job.states) and not job.waited_long():
        return unknown("no rank has waited for the whole --hang-timeout yet")
    busy = [busy_at(job, n) for n in blamed]
    inside = any(job.states[n].doing in (Activity.BACKWARD, Activity.NATIVE) or compiles(job.rank(n)) for n in blamed)
    spins = any(one is not None and one.may_spin for one in busy)
    if not all(job.rank(n).recorded for n in blamed) or spins or job.may_have_come:
        return _stuck(job, blamed, Confidence.LOW)
    return _stuck(job, blamed, Confidence.MEDIUM if any(busy) or inside else Confidence.HIGH)


def _nobody_held(job: JobState) -> Answer:
    """Judge a job in which every rank waits: one came too late, its device is behind, or they look for a store."""
    late = find_late(job)
    if late:
        return judged([late_problem(job, late)], certain=not job.is_ending())
    behind = queued_behind(job) if closed(job) is not None else ()
    if behind and set(job.waits.waiters) <= job.quiet and job.waited_long():
        return _behind(job, behind)
    if job.waits.blockers or job.waits.absent:
        return passed()
    # A rank is not served if it is a client of a store that no rank of the job serves at that address, or if it looks
    # for the store on its own host, where nobody listens, while rank 0 is on another. That nobody will serve it is sure
    # only of a store on its own host, where no agent or rank 0 serves it.
    stores = {n: store for n in job.states if (store := _sought(job.rank(n))) is not None}
    served = {store.port for store in stores.values() if _serves(store)}
    deserted = {
        n for n, one in stores.items() if _is_local(one, job.rank(n)) and _nobody_listens(one, job.rank(n).causes)
    }
    elsewhere = {n for n in deserted if 0 in job.states and job.rank(0).host != job.rank(n).host}
    blamed = tuple(
        n
        for n in job.waits.waiters
        if job.states[n].doing is Activity.INIT
        and n in stores
        and not _serves(stores[n])
        and (stores[n].port not in served or n in elsewhere)
    )
    if not blamed or not set(blamed) <= job.quiet:
        return passed()
    if not job.waited_long():
        return unknown(f"{rank_list(blamed)} {verb(blamed, 'is', 'are')} connecting to the job's store")
    sure = all((n in deserted and stores[n].of_agent) or n in elsewhere for n in blamed)
    store = stores[blamed[0]]
    ends = {f"{stores[n].host}:{stores[n].port}" for n in blamed}
    where = tuple(place for n in blamed for place in places(n, (stores[n].set_at, say.line_at(job.states[n]))))
    at = f" ({line_of(where[0])})" if where and {(p.file, p.line) for p in where if p.rank == blamed[0]} else ""
    return judged(
        [
            say.problem_of(
                job,
                blamed,
                confidence=Confidence.HIGH if sure else Confidence.MEDIUM,
                where=where,
                summary=f"{say.who(job, blamed)} {verb(blamed, 'is', 'are')} waiting in init_process_group{at} for a "
                f"store at {', '.join(sorted(ends))} that does not respond",
                evidence=(
                    *_server_words(job, blamed, store),
                    *_answer_words(job.rank(blamed[0]), store),
                    *say.classes(job, blamed),
                    *say.others(job, blamed),
                ),
                fix=_store_fix(store),
                step=None,
            )
        ],
        certain=sure and job.stands_still(blamed),
    )


def _behind(job: JobState, blamed: tuple[int, ...]) -> Answer:
    """Report ranks whose device still runs work queued before a collective that the others are in."""
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
            *say.classes(job, blamed), *say.others(job, blamed), *limit_words(job),
        ),
        fix="use a profiler to find a slow kernel before that call on these ranks; check for a throttled or hung GPU "
        "with nvidia-smi and `ddpdoctor check-env`",
    )  # fmt: skip
    return judged([finding], may_resume=True)


def _all_stuck(job: JobState) -> Answer:
    """Judge a job in which no rank waits for another."""
    blamed = tuple(n for n in job.living if job.states[n].doing in _HOLDS_UP)
    if not blamed or not job.was_left_running() or not set(blamed) <= job.quiet:
        return passed()
    ranks = [job.rank(n) for n in blamed]
    last_ns = max(max(rank.last_progress_ns or 0, rank.started_ns or 0) for rank in ranks)
    long = job.time_ns - last_ns >= ALONE_PATIENCE * job.timeout_ns
    # Ranks that prepare may wait for something outside the job: a stale lock, or another's. The holder of a lock may
    # release it, so it gets time.
    left = all(is_left_behind(rank.causes) for rank in ranks)
    outside = left or (long and all(is_held_outside(job, rank) for rank in ranks))
    if not any(job.rank(n).initialized for n in job.states) and not outside:
        return unknown("no rank has called init_process_group yet, so none is waiting")
    if len(blamed) < len(job.states) and not long:
        return unknown(f"{rank_list(blamed)} {verb(blamed, 'is', 'are')} still running; no rank is waiting")
    if not long and any(busy_at(job, n) for n in blamed):
        return unknown(f"{rank_list(blamed)} {verb(blamed, 'is', 'are')} busy; no rank is waiting")
    if unread := _unread_words(ranks):
        return _stuck(job, blamed, Confidence.LOW) if long else unknown(unread)
    if not job.sees_all or any(rank.device_idle for rank in ranks):  # only the default streams were asked
        return _stuck(job, blamed, Confidence.LOW)
    sure = all(is_surely_left(rank.causes) for rank in ranks)
    return _stuck(job, blamed, Confidence.HIGH if sure else Confidence.MEDIUM)


def _unread_words(ranks: Iterable[Rank]) -> str:
    """Return of which ranks torch did not say what they wait for on their devices: they may wait for each other."""
    unread = [rank.rank for rank in ranks if rank.device_unread]
    has = verb(unread, "has", "have")
    return f"torch did not say what {rank_list(unread)} {has} pending on the device" if unread else ""


def _stuck(job: JobState, blamed: tuple[int, ...], confidence: Confidence) -> Answer:
    in_loader = {n: job.states[n].doing is Activity.DATA for n in blamed}
    where = tuple(place for n in blamed for place in places_held_up(job.rank(n), waits_for_child=in_loader[n]))
    error = own_error(job.rank(blamed[0])) if len(blamed) == 1 else None
    raised_at = innermost_user(error.frames) if error is not None else None
    mine = [place for place in where if place.rank == blamed[0]]
    after = [p for p in mine if raised_at is None or (p.file, p.line) != (raised_at.file, raised_at.line)]
    first = next(iter(after or mine), None)
    one_line = len({(p.file, p.line) for p in where}) == 1 or len(blamed) == 1
    at = f" {place_words(first)}" if one_line else ""
    waiters = say.waiters_words(job, blamed)
    causes = job.rank(blamed[0]).causes
    left = ""
    if one_line and causes is not None and causes.lock_file is not None and is_left_behind(causes):
        left = f": it waits for lock file {causes.lock_file.path}, and the owner of that file is gone"
    busy = [one for n in blamed if (one := busy_at(job, n)) is not None]
    does = f"{verb(blamed, 'is', 'are')} {'stuck' if len(busy) < len(blamed) else 'busy'}{at}"
    if busy and len(blamed) == 1:
        does += f": {busy[0].sentence}"
    before = f"raised {error.type} {place_words(raised_at)} and " if error is not None else ""
    summary = f"{say.who(job, blamed)} {before}{does}{left}"
    seen = [*say.classes(job, blamed), *say.others(job, blamed)]
    seen += [*say.handled_words(job, blamed)]
    seen += [*say.progress_words(job, blamed), *say.process_words(job, blamed)]
    idle = () if waiters else tuple(n for n in blamed if job.rank(n).device_idle)
    if idle:
        seen.append(
            f"the default CUDA streams of {rank_list(idle)} have nothing left to do; under DETAIL this torch does not "
            "tell which NCCL calls have completed on other streams: --debug-level OFF tells"
        )
    seen += [*limit_words(job), *say.cascade_words(job.failures, blamed)]
    clues = {n: clues_of(job, n) for n in blamed[: say.MAX_CLASSES]}
    alone = _unread_words(map(job.rank, blamed)) or "no rank is waiting for another"
    fix = (
        f"see what rank {blamed[0]} waits for {place_words(first)} and give that wait a timeout; if it is just slow, "
        "raise --hang-timeout"
    )
    if in_loader[blamed[0]]:
        fix = f"see what the dataset does {place_words(first)}; DataLoader(timeout=60) turns such a wait into an error"
    finding = say.problem_of(
        job,
        blamed,
        confidence=confidence,
        where=where,
        summary=summary if left and not waiters else f"{summary}; {waiters or alone}",
        evidence=(*sentences(clues), *seen),
        fix=fix_of((clue for found in clues.values() for clue in found), fix),
    )
    works = any(compiles(job.rank(n)) or is_held_outside(job, job.rank(n)) for n in blamed)
    # It might go on, if a silent rank may wait for ranks that nobody sees.
    known = (job.sees_all or bool(job.waits.waiters)) and not job.may_have_come
    # On a busy machine a rank may be late to answer, and the next look shows what it waits for.
    unread = [rank for rank in map(job.rank, blamed) if rank.device_unread]
    last_ns = max((max(rank.last_progress_ns or 0, rank.started_ns or 0) for rank in unread), default=0)
    known = known and job.time_ns - last_ns >= (2 * ALONE_PATIENCE * job.timeout_ns if unread else 0)
    certain = known and job.stands_still(blamed) and all(job.rank(n).recorded for n in blamed) and not works
    in_vain = all(is_surely_left(job.rank(n).causes) for n in blamed)
    return judged([finding], certain=certain, may_resume=not in_vain)
