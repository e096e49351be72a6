"""Finds a job, looks at it twice, compares, saves. Every source has a time limit, and none stops a rank."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpdoctor.attach import servers
from ddpdoctor.attach.find import choose_job, find_jobs
from ddpdoctor.attach.process import PY_SPY, SUDO, main_frames, read_facts, read_host, read_stacks
from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.model.attached import AttachedJob, Movement, RankLook, RankMovement, Refusal, StoreLook
from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.recorder.storage.files import make_folder, parse_json, read_plain, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from ddpdoctor.attach.find import FoundJob
    from ddpdoctor.attach.process import HostView
    from ddpdoctor.model.attached import Peer, ProcessFacts, SeenRank

    _Looked = tuple[RankLook, Mapping[str, bytes]]  # one look at a rank, and the files of that look

PROC_SOURCE = "/proc"
FACTS_LIMIT_S = 5.0
STACKS_LIMIT_S = 10.0  # our choice: of many ranks on few cores, some wait for their turn
AT_ONCE = max(4, os.cpu_count() or 1)
MOST_WORKERS = 8  # our choice: the workers of one loader do the same
WORKER_NAMES = ("python", "pt_data_worker")
_WAITS_FOR_WORKERS = ("dataloader.py", "/multiprocessing/")
# Our choice: how often a rank is looked at again that ran and was seen at one line twice. A training step spends most
# of its time at one line, where it waits for the GPU, and a rank that hangs there spins at it too.
GLANCES = 5
GAP_S = 3.0  # our choice, as py-spy's users do by hand: most jobs take several steps in that time
SUMMARY = "attach.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Where everything was saved, and what was seen in short."""

    folder: Path
    job: AttachedJob


def attach(
    output: Path, pid: int | None = None, job: str | None = None, *, gap_s: float = GAP_S,
    pause: Callable[[float], None] = time.sleep,
) -> Attached:  # fmt: skip
    """Look twice at the job with this process or name, and save that in a new folder. Raises ``UserError``."""
    chosen = choose_job(find_jobs(), pid, job)
    began_ns = time.time_ns()
    folder = make_attach_folder(output, began_ns)
    first = look_at(chosen, 1)
    files = save_look(folder, first)
    pause(gap_s)
    second = look_at(chosen, 2, first.store)
    files += save_look(folder, second)
    movements = compare_looks(first, second)
    seen = AttachedJob(
        host=socket.gethostname(), wall_ns=began_ns, job=chosen.identity, world_size=chosen.world_size,
        ranks=chosen.ranks, looks=2, gap_s=gap_s, movement=of_job(movements), movements=movements,
        refused=tuple(dict.fromkeys((*first.refused, *second.refused))), files=tuple(files),
    )  # fmt: skip
    write_whole(folder / SUMMARY, to_json(encode(seen)))
    return Attached(folder=folder, job=seen)


def make_attach_folder(parent: Path, wall_ns: int) -> Path:
    """Make ``ddpdoctor-attach-<UTC time>`` in a folder. Raises ``UserError``."""
    stem = "ddpdoctor-attach-" + time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall_ns // 10**9))
    for number in range(1, 100):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            os.mkdir(folder, 0o700)  # noqa: PTH102 - exactly this mode
        except FileExistsError:
            continue
        except OSError as error:
            what = f"no folder can be made in {parent}: {error.strerror or error}"
            raise UserError(what, help="Give another folder with --folder.") from None
        return folder
    raise UserError(f"{parent} has too many folders named {stem}")


def save_look(folder: Path, look: JobLook) -> list[str]:
    below = f"look_{look.number}"
    make_folder(folder / below)
    contents: dict[str, bytes] = dict(look.raw)
    for rank in look.ranks:
        contents[f"rank_{rank.rank.rank}_pid_{rank.rank.pid}.json"] = to_json(encode(rank))
    if look.store is not None:
        contents["store.json"] = to_json(encode(look.store))
    for name, content in contents.items():
        write_whole(folder / below / name, content)
    return [f"{below}/{name}" for name in sorted(contents)]


def to_json(plain: Any) -> bytes:
    return (json.dumps(plain, indent=1) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLook:
    """One look at a job."""

    number: int
    ranks: tuple[RankLook, ...]
    store: StoreLook | None
    refused: tuple[Refusal, ...]
    raw: Mapping[str, bytes]  # files in the words of their sources, by name; a rank's names are in ``RankLook.files``


@dataclass(slots=True, kw_only=True)
class _Seeing:
    number: int
    refused: list[Refusal] = field(default_factory=list)
    raw: dict[str, bytes] = field(default_factory=dict)
    of_ranks: dict[int, list[Refusal]] = field(default_factory=dict)
    files: dict[int, list[str]] = field(default_factory=dict)

    def refuse(self, pid: int, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.of_ranks.setdefault(pid, []).append(refusal)

    def keep(self, rank: SeenRank, stem: str, content: bytes | None, suffix: str = "") -> None:
        if content is not None:
            name = f"{stem}_pid_{rank.pid}_rank_{rank.rank}{suffix}"
            self.raw[name] = content
            self.files.setdefault(rank.pid, []).append(name)


def look_at(job: FoundJob, number: int, earlier: StoreLook | None = None) -> JobLook:
    """Look at all ranks of a job; ``earlier`` is what the first look saw in the store, which is read once."""
    seeing = _Seeing(number=number)
    at_ns = (time.time_ns(), time.monotonic_ns())
    host = read_host(rank.pid for rank in job.ranks)
    facts, threads = _look_from_outside(job, host, seeing)
    for_job = _ask_for_job(job, host, seeing)
    in_store = for_job if for_job is not None else earlier
    _ask_servers(job, host, threads, in_store, seeing)
    # Ask for dumps in the first look, and take those that are there in the second
    for rank in job.ranks:
        env = job.environments[rank.pid]
        if seeing.number == 1:
            seeing.refuse(rank.pid, servers.ask_for_dump(rank, env))
            continue
        since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) - rank.start_ticks / os.sysconf("SC_CLK_TCK")
        dump = servers.find_dump(rank, env, time.time_ns() - int(since_boot_s * 1e9))
        try:
            if dump is not None:
                seeing.keep(rank, "fr_dump", read_plain(dump))
        except OSError as error:
            seeing.refuse(rank.pid, Refusal(source=servers.RECORDER, reason=f"the dump cannot be read: {error}"))
    ranks = tuple(
        RankLook(
            number=number, host=socket.gethostname(), wall_ns=at_ns[0], monotonic_ns=at_ns[1], job=job.identity,
            rank=rank,
            process=_with_workers(facts.get(rank.pid), threads.get(rank.pid)), stacks=threads.get(rank.pid),
            files=tuple(seeing.files.get(rank.pid, ())), refused=tuple(seeing.of_ranks.get(rank.pid, ())),
        )
        for rank in job.ranks
    )  # fmt: skip
    return JobLook(number=number, ranks=ranks, store=for_job, refused=tuple(seeing.refused), raw=seeing.raw)


def _look_from_outside(
    job: FoundJob, host: HostView, seeing: _Seeing
) -> tuple[dict[int, ProcessFacts | None], dict[int, Any]]:
    turns = threading.BoundedSemaphore(AT_ONCE)

    def read_in_turn(pid: int) -> tuple[Any, Refusal | None]:
        with turns:
            return read_stacks(pid)

    calls: dict[str, Callable[[], Any]] = {}
    for rank in job.ranks:
        calls[f"facts {rank.pid}"] = partial(read_facts, rank, host)
        calls[f"stacks {rank.pid}"] = partial(read_in_turn, rank.pid)
    limits = {name: FACTS_LIMIT_S if name.startswith("facts") else STACKS_LIMIT_S for name in calls}
    replies = ask_side_by_side(calls, limits)
    facts: dict[int, ProcessFacts | None] = {}
    threads: dict[int, Any] = {}
    for rank in job.ranks:
        seen, stack = replies[f"facts {rank.pid}"], replies[f"stacks {rank.pid}"]
        facts[rank.pid] = seen.value
        if seen.timed_out:
            reason = f"/proc did not answer within {FACTS_LIMIT_S:.0f} s: the process may be stuck in the kernel"
            seeing.refuse(rank.pid, Refusal(source=PROC_SOURCE, reason=reason))
        elif seen.value is not None and seen.value.peers is None:
            reason = "this user may not read its open files and connections"
            seeing.refuse(rank.pid, Refusal(source=PROC_SOURCE, reason=reason, remedy=SUDO))
        if stack.value is None:
            reason = f"py-spy did not answer within {STACKS_LIMIT_S:.0f} s" if stack.timed_out else str(stack.error)
            seeing.refuse(rank.pid, Refusal(source=PY_SPY, reason=reason))
        else:
            threads[rank.pid], refusal = stack.value
            seeing.refuse(rank.pid, refusal)
    return facts, threads


def _ask_for_job(job: FoundJob, host: HostView, seeing: _Seeing) -> StoreLook | None:
    """Ask the servers of the job as a whole: RAS in each look, the store in the first."""
    place = servers.find_ras(job, host)
    calls: dict[str, Callable[[], Any]] = {}
    if isinstance(place, Refusal):
        seeing.refused.append(place)
    elif place is not None:
        calls["ras"] = partial(servers.ask_ras, *place)
    if seeing.number == 1:
        calls["store"] = partial(servers.read_store, job)
    replies = ask_side_by_side(calls, servers.RAS_LIMIT_S + 1)
    for name, reply in replies.items():
        if isinstance(reply.value, Refusal):
            seeing.refused.append(reply.value)
        elif reply.timed_out or reply.error is not None:
            seeing.refused.append(Refusal(source=name, reason=str(reply.error or "no answer in time")))
    answer = replies["ras"].value if "ras" in replies else None
    if isinstance(answer, servers.RasAnswer):
        seeing.raw["ras.json" if answer.is_json else "ras.txt"] = answer.text
    found = replies["store"].value if "store" in replies else None
    return found if isinstance(found, StoreLook) else None


def _ask_servers(
    job: FoundJob, host: HostView, threads: Mapping[int, Any], in_store: StoreLook | None, seeing: _Seeing
) -> None:
    """Ask torch's servers in the ranks. They are asked for stacks, which need the GIL, only where py-spy got none."""
    addresses = in_store.values if in_store is not None else {}
    found = {rank.pid: servers.find_server(rank, job.environments[rank.pid], addresses, host) for rank in job.ranks}
    calls = {
        str(pid): partial(servers.ask_server, server, want_stacks=threads.get(pid) is None)
        for pid, server in found.items()
        if server is not None
    }
    replies = ask_side_by_side(calls, 3 * servers.SERVER_LIMIT_S)
    for rank in job.ranks:
        reply = replies.get(str(rank.pid))
        answers = reply.value if reply is not None else None
        if reply is not None and answers is None:
            reason = str(reply.error or "torch's server in the rank did not answer in time")
            seeing.refuse(rank.pid, Refusal(source=servers.SERVER, reason=reason))
        if answers is not None:
            seeing.refuse(rank.pid, answers.refused)
            seeing.keep(rank, "fr_trace", answers.trace, ".json")
            seeing.keep(rank, "stacks", answers.stacks, ".txt")


def _with_workers(facts: ProcessFacts | None, threads: Any) -> ProcessFacts | None:
    """Add the stacks of a rank's worker processes if its main thread may wait for one of them."""
    files = [file for file, _, _ in main_frames(threads) or ()]
    if facts is None or not any(mark in file for file in files for mark in _WAITS_FOR_WORKERS):
        return facts
    workers = [child.pid for child in facts.children if child.name.startswith(WORKER_NAMES) and child.state not in "ZX"]
    calls = {str(pid): partial(read_stacks, pid) for pid in workers[:MOST_WORKERS]}
    replies = ask_side_by_side(calls, STACKS_LIMIT_S)
    seen = {int(pid): reply.value[0] for pid, reply in replies.items() if reply.value is not None}
    return replace(facts, children=tuple(replace(child, stacks=seen.get(child.pid)) for child in facts.children))


def compare_looks(first: JobLook, second: JobLook) -> tuple[RankMovement, ...]:
    """Return what each rank did between two looks. One whose main thread ran at the same line is looked at again."""
    ends = {rank.rank.pid: {peer.local for peer in _peers(rank)} for rank in second.ranks}
    found = []
    for before, after in zip(first.ranks, second.ranks, strict=True):
        others = frozenset().union(*(ends[pid] for pid in ends if pid != after.rank.pid))
        found.append(_compare_looks((before, first.raw), (after, second.raw), others))
    return tuple(found)


def of_job(movements: Iterable[RankMovement]) -> Movement:
    seen = {movement.movement for movement in movements}
    if Movement.MOVING in seen:
        return Movement.PARTLY if Movement.STILL in seen else Movement.MOVING
    return Movement.STILL if Movement.STILL in seen else Movement.UNKNOWN


def _compare_looks(before: _Looked, after: _Looked, ends_of_others: frozenset[str]) -> RankMovement:
    old, new = before[0].process, after[0].process
    if old is None or new is None or old.main_switches is None or new.main_switches is None:
        slept = None
    else:
        ran = new.main_cpu_ticks != old.main_cpu_ticks or new.main_switches != old.main_switches
        slept = not ran and "R" not in old.state + new.state
    movement, evidence = Movement.MOVING, tuple[str, ...](("ended",))
    if new is not None or old is None or any(refusal.source == PROC_SOURCE for refusal in after[0].refused):
        compared = dict(_changes(before, after, ends_of_others))
        evidence = tuple(name for name, differs in compared.items() if differs)
        later = (main_frames(read_stacks(after[0].rank.pid)[0]) for _ in range(GLANCES))
        is_at_work = not evidence and "stack" in compared and not slept
        if is_at_work and any(frames is not None and frames != main_frames(after[0].stacks) for frames in later):
            evidence = ("stack",)
        elif not evidence and slept:
            movement, evidence = Movement.STILL, (*compared, "slept")
        elif not evidence:
            movement, evidence = Movement.STILL if "stack" in compared else Movement.UNKNOWN, tuple(compared)
    return RankMovement(
        pid=after[0].rank.pid, rank=after[0].rank.rank, movement=movement, evidence=evidence,
        main_cpu_ticks=new.main_cpu_ticks - old.main_cpu_ticks if old is not None and new is not None else None,
        main_slept=slept,
    )  # fmt: skip


def _changes(before: _Looked, after: _Looked, ends_of_others: frozenset[str]) -> Iterator[tuple[str, bool]]:
    for name, read in (("stack", _stack), ("flight recorder", _trace)):
        old, new = read(*before), read(*after)
        if old is not None and new is not None:
            yield name, old != new
    counts = _received(before[0], ends_of_others), _received(after[0], ends_of_others)
    both = counts[0].keys() & counts[1].keys()
    if both:
        yield "received", any(counts[0][ends] != counts[1][ends] for ends in both)


def _received(look: RankLook, ends_of_others: frozenset[str]) -> dict[tuple[str, str], int]:
    """Return the bytes that came from other ranks, by the ends of the connection; the store's do not count."""
    store = f":{look.job.master_port}"
    ends = [(peer.local, peer.remote, peer.received_bytes) for peer in _peers(look) if peer.remote in ends_of_others]
    of_ranks = [end for end in ends if not end[0].endswith(store) and not end[1].endswith(store)]
    return {(local, remote): count for local, remote, count in of_ranks if count is not None}


def _peers(look: RankLook) -> tuple[Peer, ...]:
    return (look.process.peers or ()) if look.process is not None else ()


def _stack(look: RankLook, raw: Mapping[str, bytes]) -> Any:
    frames = main_frames(look.stacks)
    if frames is not None:
        return frames
    text = next((raw[name] for name in look.files if name.startswith("stacks_")), None)
    # The server's own thread comes first, as "Current thread". Each request is another thread's.
    return [part for part in text.split(b"\n\n") if not part.startswith(b"Current thread")] if text else None


def _trace(look: RankLook, raw: Mapping[str, bytes]) -> Any:
    text = next((raw[name] for name in look.files if name.startswith("fr_trace_")), None)
    try:
        plain = parse_json(text) if text is not None else None
    except ValueError:
        return None
    if not isinstance(plain, dict):
        return None
    entries = [entry for entry in plain.get("entries") or () if isinstance(entry, dict)]
    last = entries[-1].get("record_id") if entries else None
    return plain.get("pg_status"), last, sum(entry.get("retired") is True for entry in entries)
