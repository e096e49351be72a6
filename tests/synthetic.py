"""Makes run folders of jobs that never ran: real ring files, evidence and logs of any number of ranks.

A job of data and tensor parallelism: every rank is in the world, in a group of the ranks beside it ("tp") and in a
group of those at the same place of the other tp groups ("dp"). Each step has a batch, a forward with two collectives in
tp, a backward with one bucket of DDP's, a collective in dp, and one in the world; each tenth ends with a barrier.

Its ranks may be on several hosts, whose clocks differ and which use the same process ids.
"""

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpdoctor.launch.evidence import EvidenceTaker
from ddpdoctor.model.codec import encode
from ddpdoctor.model.facts import NodeSeen, NodesSeen, Presence
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.files import CONTROL, make_record
from ddpdoctor.recorder.storage.ring_writing import Ring

S = 1_000_000_000
LAUNCHED = 1000 * S
CALL_NS = 2_000_000
WAITED = 60 * S
TORCH = "/usr/lib/python3/site-packages/torch"
SCRIPT = "/home/me/train.py"
FIRST_PID = 100_000
LINES = {
    "init_process_group": 10, "new_group": 12, "ddp_init": 15, "next_batch": 20, "ddp_forward": 21, "tp": 33,
    "backward": 23, "dp": 24, "world": 25, "barrier": 27,
}  # fmt: skip
STUCK_LINE = 41
STEP_US = (500, 3000, 200, 9000)
STEP_WAITS_US = (0, 400, 0, 900)
NOTHING_INSIDE = (0,) * len(ring_layout.STEP_INSIDE)
DDP_PHASES = ("ddp_init", "ddp_forward", "backward")
SITUATIONS = ("stuck", "short", "deadlock", "crash", "healthy")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One call of the script: a phase (``kind`` "") or a collective in the world, in tp or in dp."""

    op: str
    kind: str
    line: int
    dims: tuple[int, ...] = ()
    native: bool = False
    """DDP's C++ makes a collective of the world meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a synthetic job is like, and what is wrong with it."""

    world: int
    steps: int
    situation: str
    culprit: int = 1
    tp: int = 8
    """Ranks in a tp group; 0 for a job of plain data parallelism, whose collectives are all in the world."""

    @property
    def exit_code(self) -> int | None:
        """What all ranks ended with; None where they did not end."""
        return {"healthy": 0, "crash": 1}.get(self.situation)

    @property
    def width(self) -> int:
        """The size of the tp groups."""
        return min(self.tp, self.world)

    def kind(self, kind: str) -> str:
        """Return the kind of group that a call for such a group is made in."""
        return kind if self.tp or not kind else "world"

    def members(self, rank: int, kind: str) -> tuple[int, ...]:
        """Return the ranks of a group that a rank is in."""
        kind = self.kind(kind)
        if kind == "tp":
            first = rank - rank % self.width
            return tuple(range(first, min(first + self.width, self.world)))
        return tuple(range(rank % self.width, self.world, self.width)) if kind == "dp" else tuple(range(self.world))

    def name(self, rank: int, kind: str) -> str:
        """Return torch's name of a group that a rank is in: groups are numbered as they are made."""
        if self.kind(kind) == "world":
            return "0"
        return str(1 + rank // self.width) if kind == "tp" else str(1 + self.tp_groups + rank % self.width)

    @property
    def tp_groups(self) -> int:
        """How many tp groups there are."""
        return -(-self.world // self.width)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One host of a job: which of how many it is, its ranks, and what its clock showed at the launch."""

    number: int
    of: int
    ranks: range
    launched_ns: int = LAUNCHED

    @property
    def host(self) -> str:
        """What it calls itself."""
        return f"node{self.number}"

    @property
    def offset_ns(self) -> int:
        """How far its clock is ahead of that of the first host."""
        return self.launched_ns - LAUNCHED

    def pid(self, rank: int) -> int:
        """Return the process of one of its ranks."""
        return FIRST_PID + rank - self.ranks.start


@dataclass(kw_only=True)
class Tape:
    """The calls of one rank so far."""

    records: list[tuple[Event, int]] = field(default_factory=list)
    """Each call with its number: of a collective its own, of a phase how many the world has begun."""
    job: Job
    begun: dict[str, int] = field(default_factory=lambda: {"world": 0, "tp": 0, "dp": 0})
    collectives: list[tuple[Event, str, int]] = field(default_factory=list)
    """What a flight recorder sees: each collective with its group and number, DDP's own among them."""
    open: bool = False
    """The last call has not ended."""
    failed: bool = False
    """The last call has raised."""

    def add(self, event: Event) -> None:
        """Make a call."""
        kind = self.job.kind(event.kind)
        if kind:
            self._count(event, kind)
        self.records.append((event, self.begun[kind or "world"]))
        if event.native:
            self._count(event, "world")

    def _count(self, event: Event, kind: str) -> None:
        self.begun[kind] += 1
        self.collectives.append((event, kind, self.begun[kind]))


def phase(op: str, *, native: bool = False) -> Event:
    """Return a phase of training."""
    return Event(op=op, kind="", line=LINES[op], native=native)


def collective(op: str, kind: str, dims: tuple[int, ...] = ()) -> Event:
    """Return a recorded collective."""
    return Event(op=op, kind=kind, line=LINES["barrier" if op == "barrier" else kind], dims=dims)


TP = collective("all_reduce", "tp", (8, 512))
DP = collective("all_reduce", "dp", (1024,))
LOSS = collective("all_reduce", "world", (1,))
BARRIER = collective("barrier", "world")
BACKWARD = phase("backward", native=True)
BEGIN_STEP = (phase("next_batch"), phase("ddp_forward"), TP, TP, BACKWARD)


def prologue(job: Job) -> Iterator[Event]:
    """Return the calls before the first step."""
    yield phase("init_process_group")
    for _ in range(job.tp_groups + job.width if job.tp else 0):
        yield phase("new_group")
    yield phase("ddp_init")


def step(number: int) -> tuple[Event, ...]:
    """Return the calls of one step; each tenth has a barrier."""
    return (*BEGIN_STEP, DP, LOSS, *((BARRIER,) if number % 10 == 9 else ()))


def last_step(job: Job, rank: int) -> tuple[tuple[Event, ...], bool]:
    """Return a rank's calls of the step in which the job comes to its end, and whether the last of them is open."""
    culprit = rank == job.culprit
    if job.situation == "stuck":
        return ((*BEGIN_STEP, DP), False) if culprit else ((*BEGIN_STEP, DP, LOSS), True)
    if job.situation == "crash":
        return (*BEGIN_STEP, DP, *(() if culprit else (LOSS,))), False
    if job.situation == "short":
        return (*BEGIN_STEP, DP, *((BARRIER,) if culprit else (LOSS,))), True
    if job.situation == "deadlock":
        if rank // job.width > 1:  # in a tp group of its own, which completes
            return BEGIN_STEP, True
        return (*BEGIN_STEP[:2], DP if rank in reversed_ranks(job) else TP), True
    return (*BEGIN_STEP, DP, LOSS, BARRIER), False


def reversed_ranks(job: Job) -> tuple[int, int]:
    """Return the ranks that use dp before tp in a deadlock: each keeps the tp group that the other's dp needs."""
    return 0, job.width + 1


def tape_of(job: Job, rank: int) -> Tape:
    """Return all calls of a rank."""
    tape = Tape(job=job)
    for event in prologue(job):
        tape.add(event)
    for number in range(job.steps):
        for event in step(number):
            tape.add(event)
    last, tape.open = last_step(job, rank)
    for event in last:
        tape.add(event)
    tape.failed = job.situation == "crash" and rank != job.culprit
    return tape


def steps_for(world: int, records: int) -> int:
    """Return how many steps it takes until each rank has about so many records."""
    before = sum(1 for _ in prologue(Job(world=world, steps=0, situation="healthy")))
    return round((records - before) / 7.1) - 1


def ended_ns(tapes: list[Tape]) -> int:
    """Return when the job came to its end or to a halt."""
    return LAUNCHED + max(len(tape.records) for tape in tapes) * CALL_NS


def places_of(job: Job, hosts: int, skew_ns: int = 0) -> list[Place]:
    """Return the hosts of a job, equally many ranks on each; the clock of each is so far ahead of the one before it."""
    each = job.world // hosts
    assert each * hosts == job.world
    return [
        Place(number=n, of=hosts, ranks=range(n * each, n * each + each), launched_ns=LAUNCHED + n * skew_ns)
        for n in range(hosts)
    ]


def write_folder(folder: Path, job: Job) -> None:
    """Write the whole run folder of a job on one host."""
    write_host(folder, job, *places_of(job, 1))


def write_hosts(folder: Path, job: Job, hosts: int, skew_ns: int = 0) -> list[Path]:
    """Write a run folder of each host of a job, as it is before any host has heard of another; return all of them."""
    places = places_of(job, hosts, skew_ns)
    for place in places:
        write_host(folder / place.host, job, place)
    return [folder / place.host for place in places]


def write_gathered(folder: Path, job: Job, hosts: int, skew_ns: int = 0) -> None:
    """Write the run folder of a job as its first host has it: with what all others have sent."""
    first, *others = places_of(job, hosts, skew_ns)
    write_host(folder, job, first)
    for place in others:
        write_host(folder / "nodes" / str(place.number), job, place)
    write_json(folder / "nodes.json", encode(seen_by_first(job, [first, *others])))


def seen_by_first(job: Job, places: list[Place]) -> NodesSeen:
    """Return what the first host saw of all: each was heard a moment ago, or has said how it ended."""
    heard_ns = halted_ns(job)
    nodes = [
        NodeSeen(
            number=place.number, host=place.host, heard_ns=heard_ns, status=job.exit_code, gathered=True,
            presence=Presence.HERE if job.exit_code is None else Presence.LEFT,
            clock_offset_ns=place.offset_ns, clock_error_ns=50_000, wall_offset_s=0.0,
        )
        for place in places
    ]  # fmt: skip
    return NodesSeen(expected=len(places), own=0, nodes=tuple(nodes))


def halted_ns(job: Job) -> int:
    """Return when somebody looked at the job that had ended, or had come to a halt, by the clock of the first host."""
    return LAUNCHED + (len(tape_of(job, 0).records) + 1) * CALL_NS + WAITED


def write_host(folder: Path, job: Job, place: Place) -> None:
    """Write the run folder of one host."""
    for name in ("rings", "evidence"):
        (folder / name).mkdir(parents=True)
    now = halted_ns(job) + place.offset_ns
    rows = {}
    with (folder / "agent.jsonl").open("w") as agent:
        for rank in place.ranks:
            tape = tape_of(job, rank)
            write_ring(folder, job, rank, tape, place)
            write_evidence(folder, job, rank, tape, place)
            write_agent(agent, job, rank, place)
            rows[str(place.pid(rank))] = watched(job, now)
    write_json(folder / "watch.json", {
        "now_ns": now, "ended": job.exit_code is not None, "stopping_since_ns": None, "interrupted_by": None,
        "launcher_status": job.exit_code, "processes": rows,
    })  # fmt: skip
    write_json(folder / "run.json", {
        "format": "ddpdoctor-run", "version": 1, "command": ["ddpdoctor", "wrap", "torchrun", "train.py"],
        "started_at": "2026-01-01T00:00:00.000+00:00", "launched_ns": place.launched_ns, "hang_timeout_s": 10.0,
        "debug_level": "OFF", "host": place.host, "torch_version": "2.13.0", "environment": {},
        "nproc": len(place.ranks), "nnodes": place.of, "node_rank": place.number,
    })  # fmt: skip


def write_json(path: Path, body: Any) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(body))


def write_agent(log: Any, job: Job, rank: int, place: Place) -> None:
    """Write what torch's agent says of one rank."""
    common = {"pid": place.pid(rank), "attempt": 0}
    local, began = rank - place.ranks.start, place.launched_ns - S
    start = {"k": "rank", "local_rank": local, "rank": rank, "world_size": job.world, "at": began}
    log.write(json.dumps({**start, **common}) + "\n")
    if job.exit_code is not None:
        ended = halted_ns(job) + place.offset_ns - WAITED
        log.write(json.dumps({"k": "end", "code": job.exit_code, "at": ended, **common}) + "\n")


def watched(job: Job, now: int) -> dict[str, Any]:
    """Return what the watcher says of a process."""
    ended = None if job.exit_code is None else now - WAITED
    return {
        "state": None if ended else "S", "cpu_share": None if ended else 0.0, "tracer": 0, "ended_ns": ended,
        "last_progress_ns": now - WAITED, "oom": False if ended else None, "dumps": [], "children": [],
    }  # fmt: skip


def write_ring(folder: Path, job: Job, rank: int, tape: Tape, place: Place) -> None:
    """Write a rank's ring as its recorder would have left it."""
    launched = place.launched_ns
    ring = Ring(str(folder / "rings"), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, place.pid(rank), 7)
    ring.note({"k": "process", "ppid": 1, "main": 1, "roots": ["/usr/lib/python3.11/"], "env": {}, "at": launched})
    ring.note({"k": "init", "rank": rank, "world_size": job.world, "at": launched})
    ring.note({"k": "initialized", "rank": rank, "world_size": job.world, "backend": "gloo", "at": launched})
    if job.situation == "crash":
        ring.note(raised(tape, launched))
    cells = {
        "started_ns": launched, "initialized": 1, "slots_claimed": len(tape.records), "steps": job.steps,
        "batches": job.steps + 1, "steps_recorded": job.steps, "calls_done": len(tape.records) - tape.open,
        "main_ended_ns": launched + len(tape.records) * CALL_NS if job.exit_code is not None else 0,
    }  # fmt: skip
    for name, value in cells.items():
        ring.set(name, value)
    parts = {
        ring_layout.RANK_SHAPE.slots_at: pack_slots(ring, job, rank, tape, launched),
        ring_layout.RANK_SHAPE.steps_at: pack_steps(job, ring.intern("0"), launched),
    }
    fd = os.open(ring.path, os.O_RDWR)
    try:
        for at, data in parts.items():
            os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def raised(tape: Tape, launched: int) -> dict[str, Any]:
    """Return the error of a rank: of its own, or in the call that it was in when another had gone."""
    at = launched + (len(tape.records) + 1) * CALL_NS
    own = [frame(SCRIPT, 60, "<module>", 1), frame(SCRIPT, STUCK_LINE, "parse", 1)]
    lost = [
        frame(SCRIPT, LINES["world"], "main", 1),
        frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"),
    ]
    reported = {
        "type": "RuntimeError",
        "text": "Connection closed by peer",
        "at": at + S,
        "call": "all_reduce",
        "frames": lost,
    }
    if not tape.failed:
        reported = {"type": "ValueError", "text": "invalid literal for int()", "at": at, "call": None, "frames": own}
    return {"k": "raised", "main": 1, "uncaught": 1, "child": 0, "groups": [], **reported}


def pack_steps(job: Job, group: int, launched: int) -> bytes:
    """Return the records of a job's steps, the oldest overwritten; all ranks are equally fast."""
    space = ring_layout.RANK_SHAPE.steps
    data = bytearray(min(job.steps, space) * ring_layout.STEP_SIZE)
    for number in range(max(1, job.steps - space + 1), job.steps + 1):
        at = (number - 1) % space * ring_layout.STEP_SIZE
        ended = launched + number * 7 * CALL_NS
        ring_layout.STEP.pack_into(
            data, at, number, ended, group, ring_layout.STEP_REDUCED, *STEP_US, *STEP_WAITS_US, *NOTHING_INSIDE
        )
    return bytes(data)


def pack_slots(ring: Ring, job: Job, rank: int, tape: Tape, launched: int) -> bytes:
    """Return the records of a tape, the oldest overwritten where there are more than a ring holds."""
    count = ring_layout.RANK_SHAPE.slots
    data = bytearray(min(len(tape.records), count) * ring_layout.SLOT_SIZE)
    last = len(tape.records)
    float32 = ring.intern("torch.float32")
    kinds: dict[int, tuple[int, ...]] = {}
    for index, (event, seq) in enumerate(tape.records, start=1):
        if last - index >= count:
            continue
        known = kinds.get(id(event))
        if known is None:
            key = (SCRIPT, event.line)
            site = ring.known_site(key) or ring.intern_site(key, frame(*key, "main", 1))
            op = ring.intern(event.op)
            group = ring.intern(job.name(rank, event.kind or "world")) if event.kind or event.op in DDP_PHASES else 0
            dims = (*event.dims, 0, 0, 0, 0, 0, 0)[: ring_layout.MAX_DIMS]
            tensors = 1 if event.dims else 0
            redop = ring.intern("SUM") if event.op == "all_reduce" else 0
            known = kinds[id(event)] = (
                op, op, group, site, redop, float32 if event.dims else 0, ring_layout.NO_PEER, tensors,
                ring_layout.FLAG_MAIN, len(event.dims), *dims,
            )  # fmt: skip
        began = launched + index * CALL_NS
        ended = 0 if tape.open and index == last else began + CALL_NS // 2
        if tape.failed and index == last:
            known = (*known[:8], known[8] | ring_layout.FLAG_FAILED, *known[9:])
        at = ((index - 1) % count) * ring_layout.SLOT_SIZE
        ring_layout.SLOT.pack_into(data, at, index, began, ended, seq, ring_layout.KIND.pack(*known))
    return bytes(data)


def write_evidence(folder: Path, job: Job, rank: int, tape: Tape, place: Place) -> None:
    """Write a rank's answer: two looks at its threads, and how far its groups have come."""
    if job.exit_code is not None:
        return
    pid, now = place.pid(rank), halted_ns(job) + place.offset_ns
    groups = [
        {"name": job.name(rank, k), "ranks": list(job.members(rank, k)), "backend": "gloo", "enqueued": tape.begun[k]}
        for k in (("world", "tp", "dp") if job.tp else ("world",))
    ]
    looks = [{"at": now - at, "stacks": stacks(tape)} for at in (S, S // 2)]
    body = {"groups": groups, "flight_recorder": [], "looks": looks, "pid": pid, "request": 1}
    write_json(folder / "evidence" / f"{pid}-7-1.json", body)


def stacks(tape: Tape) -> list[dict[str, Any]]:
    """Return the threads of a rank that stands in its last call, or behind it."""
    event = tape.records[-1][0]
    line = event.line if tape.open else STUCK_LINE
    frames = [frame(SCRIPT, 60, "<module>", 1), frame(SCRIPT, line, "main", 1)]
    if tape.open:
        inside = (
            [("_tensor.py", 630, "backward"), ("autograd/graph.py", 800, "_engine_run_backward")]
            if event.native
            else [("distributed/c10d_logger.py", 83, "wrapper"), ("distributed/distributed_c10d.py", 3000, event.op)]
        )
        frames += [frame(f"{TORCH}/{file}", number, function) for file, number, function in inside]
    waits = [frame("/usr/lib/python3.11/threading.py", line, "wait") for line in (1002, 982, 629, 324)]
    return [
        {"thread": "MainThread", "main": 1, "daemon": 0, "frames": frames},
        {"thread": "Thread-1 (_pin_memory_loop)", "main": 0, "daemon": 1, "frames": waits},
    ]


def frame(file: str, line: int, function: str, user: int = 0) -> dict[str, Any]:
    """Return a frame as the recorder writes it."""
    return {"f": file, "l": line, "n": function, "u": user}


def new_taker(folder: Path) -> EvidenceTaker:
    """Return what takes evidence in a folder, as a session makes it."""
    make_record(str(folder))
    with (folder / CONTROL).open("r+b") as file:
        return EvidenceTaker(folder, mmap.mmap(file.fileno(), ring_layout.CONTROL_SIZE))
