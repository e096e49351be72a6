"""Compares two looks: which ranks moved between them, and which stayed where they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.attach.look import PROC_SOURCE
from ddpdoctor.attach.stacks import main_frames, read_stacks
from ddpdoctor.model.attached import Movement, RankMovement
from ddpdoctor.recorder.storage.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpdoctor.attach.look import JobLook
    from ddpdoctor.model.attached import Peer, ProcessFacts, RankLook

GLANCES = 5
"""Our choice: how often a rank is looked at again that ran and was seen at one line twice. A training step spends most
of its time at one line, where it waits for the GPU, and a rank that hangs there spins at it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two looks at one rank."""

    before: RankLook
    after: RankLook
    raw_before: Mapping[str, bytes]
    raw_after: Mapping[str, bytes]
    ends_of_others: frozenset[str]
    """The local ends of the connections of the other ranks."""


def compare_looks(first: JobLook, second: JobLook) -> tuple[RankMovement, ...]:
    """Return what each rank did between two looks. A rank whose main thread ran at the same line is looked at again."""
    ends = {rank.rank.pid: {peer.local for peer in _peers(rank)} for rank in second.ranks}
    return tuple(
        _compare(
            _Pair(
                before=before,
                after=after,
                raw_before=first.raw,
                raw_after=second.raw,
                ends_of_others=frozenset().union(*(ends[pid] for pid in ends if pid != after.rank.pid)),
            )
        )
        for before, after in zip(first.ranks, second.ranks, strict=True)
    )


def of_job(movements: Iterable[RankMovement]) -> Movement:
    """Return whether a job moves, from what its ranks did."""
    seen = {one.movement for one in movements}
    if Movement.MOVING in seen:
        return Movement.PARTLY if Movement.STILL in seen else Movement.MOVING
    return Movement.STILL if Movement.STILL in seen else Movement.UNKNOWN


def _compare(pair: _Pair) -> RankMovement:
    old, new = pair.before.process, pair.after.process
    slept = _main_slept(old, new)
    movement, evidence = _judge(pair, slept)
    return RankMovement(
        pid=pair.after.rank.pid,
        rank=pair.after.rank.rank,
        movement=movement,
        evidence=evidence,
        main_cpu_ticks=new.main_cpu_ticks - old.main_cpu_ticks if old is not None and new is not None else None,
        main_slept=slept,
    )


def _judge(pair: _Pair, slept: bool | None) -> tuple[Movement, tuple[str, ...]]:  # noqa: FBT001 - as it was read
    if pair.after.process is None and pair.before.process is not None and not _could_not_be_read(pair.after):
        return Movement.MOVING, ("ended",)
    compared = dict(_changes(pair))
    changed = tuple(name for name, differs in compared.items() if differs)
    if changed:
        return Movement.MOVING, changed
    if "stack" in compared and not slept and _glance_differs(pair.after):
        return Movement.MOVING, ("stack",)
    if slept:
        return Movement.STILL, (*compared, "slept")
    return Movement.STILL if "stack" in compared else Movement.UNKNOWN, tuple(compared)


def _changes(pair: _Pair) -> Iterator[tuple[str, bool]]:
    """Yield what can be compared, and whether it changed."""
    looks = ((pair.before, pair.raw_before), (pair.after, pair.raw_after))
    for name, read in (("stack", _stack), ("flight recorder", _trace)):
        old, new = (read(look, raw) for look, raw in looks)
        if old is not None and new is not None:
            yield name, old != new
    counts = _received(pair.before, pair.ends_of_others), _received(pair.after, pair.ends_of_others)
    both = counts[0].keys() & counts[1].keys()
    if both:
        yield "received", any(counts[0][ends] != counts[1][ends] for ends in both)


def _received(look: RankLook, ends_of_others: frozenset[str]) -> dict[tuple[str, str], int]:
    """Return the bytes that came from other ranks, by the ends of the connection; the store's do not count."""
    store = f":{look.job.master_port}"
    return {
        (peer.local, peer.remote): peer.received_bytes
        for peer in _peers(look)
        if peer.received_bytes is not None
        and peer.remote in ends_of_others
        and not peer.local.endswith(store)
        and not peer.remote.endswith(store)
    }


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
    """Return how far a rank's flight recorder has come."""
    text = next((raw[name] for name in look.files if name.startswith("fr_trace_")), None)
    try:
        plain = parse_json(text) if text is not None else None
    except ValueError:
        return None
    if not isinstance(plain, dict):
        return None
    entries = [one for one in plain.get("entries") or () if isinstance(one, dict)]
    last = entries[-1].get("record_id") if entries else None
    return plain.get("pg_status"), last, sum(one.get("retired") is True for one in entries)


def _main_slept(old: ProcessFacts | None, new: ProcessFacts | None) -> bool | None:
    if old is None or new is None or old.main_switches is None or new.main_switches is None:
        return None
    ran = new.main_cpu_ticks != old.main_cpu_ticks or new.main_switches != old.main_switches
    return not ran and "R" not in old.state + new.state


def _could_not_be_read(look: RankLook) -> bool:
    return any(refusal.source == PROC_SOURCE for refusal in look.refused)


def _glance_differs(look: RankLook) -> bool:
    frames = main_frames(look.stacks)
    later = (main_frames(read_stacks(look.rank.pid)[0]) for _ in range(GLANCES))
    return any(other is not None and other != frames for other in later)
