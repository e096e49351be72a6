"""Takes evidence: asks every recorder for its stacks, inspects processes, and saves both before anything is judged."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect import proc
from ddpdoctor.launch.run_folder import copy_elsewhere
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.files import open_new, open_plain, read_plain, remove, write_whole

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from pathlib import Path

# The time that a recorder has to answer. It takes two samples 0.3 s apart; the launcher pauses a little longer.
ANSWER_LIMIT_S = 0.9
# The time that it has while the launcher does not wait: on a busy machine an answer can take more than a second.
PATIENT_LIMIT_S = 3.0
RESERVE = "reserve"  # a file that makes room for the evidence
PIECE_BYTES = 16 * 1024  # the piece size for copying rings; pieces that are all zeros are skipped
# A heartbeat younger than this promises an answer. So does any younger than HELD_S if there is time for it: on a busy
# machine heartbeats are late too.
FRESH_S = 1.5
ASK_EVERY_S = 0.05
Dump = list[tuple[int, int, int]]  # begin and end in the file of a process's stacks, and when they were written
HELD_S = 3.0  # if a live process has had no heartbeat for this long, C code holds the GIL


@dataclass(slots=True)
class Followed:
    """One recorded process and its last known state."""

    pid: int
    ticks: int
    role: int
    ring: mmap.mmap
    cells: dict[str, int] = field(default_factory=dict)
    io_bytes: int | None = None
    main_io_bytes: int | None = None  # what the main thread has read and written
    children: frozenset[int] = frozenset()
    # Time that it waited for a core is added: a process that gets no core does not stand still by itself.
    last_progress_ns: int = 0
    last_new_ns: int = 0
    # Time of the last progress itself, without that of other threads: at a group's limit torch's own threads read much,
    # to write what is pending, while the main thread sleeps on.
    advanced_ns: int = 0
    cpu_since: tuple[int, int] = (0, 0)  # time and CPU ticks at the last progress
    heartbeat_changed_ns: int = 0
    # Since when it was in the stopped state at every check. If the watcher itself was stopped, this starts again.
    frozen_since_ns: int | None = None
    # By thread, of this process and its descendants, at the last check without progress.
    run_delays: dict[int, int] = field(default_factory=dict)
    starved_ns: int = 0  # how long it had made no progress and waited for a core, in all
    # Whether it uses NCCL, so that it may wait for its device anywhere; None until its process group exists.
    uses_nccl: bool | None = None
    ended_ns: int | None = None
    exit_code: int | None = None  # the exit code, a negative signal number, or None if the kernel did not report it

    @property
    def is_rank(self) -> bool:
        return self.role == ring_layout.ROLE_RANK

    @property
    def waits_since_ns(self) -> int:
        """Since when the main thread is in a call that needs other ranks, or 0 if it is in none."""
        return self.cells.get("wait_since_ns", 0)

    def stands(self, now_ns: int, limit_s: float) -> bool:
        """Return whether it has made no progress for the limit, until now or its end, with or without a core."""
        return (self.ended_ns or now_ns) - self.advanced_ns > limit_s * 1e9


@dataclass(slots=True)
class EvidenceTaker:
    """Asks the processes of one run for evidence, and saves it in the run's folder."""

    folder: Path
    control: mmap.mmap  # the run's control file, which recorders and the launcher map too
    unsaved: dict[str, str] = field(default_factory=dict)  # by file name, texts that did not fit into the folder
    request: int = 0
    dumps: dict[int, Dump] = field(default_factory=dict)
    # By pid, the time of the last heartbeat before a process's last dump, and that dump.
    _last_dumps: dict[int, tuple[int, Dump]] = field(default_factory=dict)
    _copy: Path | None = None

    def closing_ns(self) -> int:
        """Return since when the launcher waits to stop its ranks, or 0 if it does not."""
        closing = self.read_control(ring_layout.CONTROL_CLOSING)
        return closing if closing > self.read_control(ring_layout.CONTROL_ACK) else 0

    def dump_asked(self) -> int:
        """Return when `ddpdoctor status --dump` asked for evidence that is not saved yet, or 0."""
        asked = self.read_control(ring_layout.CONTROL_DUMP_ASKED)
        return asked if asked != self.read_control(ring_layout.CONTROL_DUMPED) else 0

    def set_control(self, offset: int, value: int) -> None:
        """Write a cell of the control file, which recorders, the launcher and `ddpdoctor status` read."""
        ring_layout.CELL.pack_into(self.control, offset, value)

    def acknowledge(self) -> None:
        self.set_control(ring_layout.CONTROL_ACK, time.monotonic_ns())

    def take(
        self, followed: dict[int, Followed], check_again: Callable[[], None], *, keep_rings: bool, limit_s: float
    ) -> None:
        """Ask all recorders that can answer, wait for them, and send a signal to ranks whose GIL is held.

        The signal may unblock the job, so ``check_again`` is called before it: a rank that has moved by then moved by
        itself. ``keep_rings`` copies the rings in any case, because a signal on another node may unblock the job too.
        ``limit_s`` is the longest wait; while the launcher waits for the evidence, it is ``ANSWER_LIMIT_S``.
        """
        self.release()
        now_ns = time.monotonic_ns()
        self.request += 1
        self.set_control(ring_layout.CONTROL_REQUEST, self.request)
        alive = [process for process in followed.values() if process.ended_ns is None]
        ranks = [process for process in alive if process.is_rank]
        held = [rank for rank in ranks if now_ns - rank.heartbeat_changed_ns > HELD_S * 1e9]
        fresh_s = HELD_S if limit_s > ANSWER_LIMIT_S else FRESH_S
        asked = [process for process in alive if now_ns - process.heartbeat_changed_ns < fresh_s * 1e9]
        began = time.monotonic()
        while asked := [process for process in asked if not self._has_answered(process)]:
            if time.monotonic() - began > (ANSWER_LIMIT_S if self.closing_ns() else limit_s):
                break
            time.sleep(0.02)
        check_again()
        self.forget_kept()
        if held or keep_rings:
            self._keep_rings(alive)
        if held:
            self._dump(held)

    def _keep_rings(self, alive: list[Followed]) -> None:
        """Copy all rings before the signal, which can interrupt a sleep in C so that the whole job moves on."""
        for process in alive:
            with contextlib.suppress(OSError):
                path = self.folder / "evidence" / f"{process.pid}-{process.ticks}.held"
                with os.fdopen(open_new(path), "wb") as file:
                    for at in range(0, len(process.ring), PIECE_BYTES):
                        piece = process.ring[at : at + PIECE_BYTES]
                        if piece.count(0) < len(piece):
                            file.seek(at)
                            file.write(piece)
                    file.truncate(len(process.ring))

    def forget_kept(self) -> None:
        """Remove the copied rings and dumps of an earlier check, so that the rings themselves count again."""
        self.dumps.clear()
        for path in (self.folder / "evidence").glob("*.held"):
            remove(path)

    def read_control(self, offset: int) -> int:
        return int(ring_layout.CELL.unpack_from(self.control, offset)[0])

    def _has_answered(self, process: Followed) -> bool:
        name = f"{process.pid}-{process.ticks}-{self.request}.json"
        if process.ended_ns is not None or proc.read_process(process.pid) is None:
            return True
        try:
            return bool(json.loads(read_plain(self.folder / "evidence" / name))["complete"])
        except (OSError, ValueError, KeyError):
            return False

    def _dump(self, held: list[Followed]) -> None:
        """Make faulthandler write all stacks: safe only where a handler is installed and no Python code runs.

        One that has not moved since its last dump gets no second signal, because the job may be healthy.
        """
        sent = []
        for process in held:
            beat_ns, known = self._last_dumps.get(process.pid, (0, []))
            if beat_ns == process.heartbeat_changed_ns:
                self.dumps[process.pid] = known
                continue
            path = self.folder / "evidence" / f"{process.pid}-{process.ticks}.dump"
            if process.cells.get("dumps_on_signal") and proc.catches_signal(process.pid, signal.SIGURG):
                before = path.stat().st_size
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGURG)
                    sent.append((process, path, before))
        if not sent:
            return
        time.sleep(0.1)
        for process, path, before in sent:
            size = path.stat().st_size
            if size > before:
                self.dumps[process.pid] = [(before, size, time.monotonic_ns())]
                self._last_dumps[process.pid] = process.heartbeat_changed_ns, self.dumps[process.pid]

    def asked_to_end_ns(self, process: Followed) -> int | None:
        """Return when a rank received SIGTERM, from the file that its recorder then writes, or None."""
        try:
            seen = (self.folder / "evidence" / f"{process.pid}-{process.ticks}.term").stat()
        except OSError:
            return None
        since_boot_ns = process.cells.get("started_ns", 0) - process.cells.get("started_wall_ns", 0)
        return seen.st_mtime_ns + since_boot_ns if seen.st_size else None

    def save(self, facts: dict[str, Any], name: str) -> None:
        """Write the watcher's own facts, completely or not at all. On a full disk they are kept for ``readable``."""
        text = json.dumps(facts)
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)
        self._copy = None
        try:
            write_whole(self.folder / name, text)
            self.unsaved.pop(name, None)
        except OSError:
            self.unsaved[name] = text

    def readable(self) -> Path:
        """Return the folder with all evidence: this one, or if it is full, a copy on another disk."""
        if not self.unsaved:
            return self.folder
        if self._copy is None:
            self._copy = copy_elsewhere(self.folder, self.unsaved)
        return self._copy or self.folder

    def release(self) -> None:
        remove(self.folder / RESERVE)


def describe(
    process: Followed, below: tuple[proc.Process, ...], dumps: dict[int, Dump], *, oom: bool | None
) -> dict[str, Any]:
    """Return the facts about a process that only the watcher knows, in the format of watch.json."""
    now = proc.read_process(process.pid)
    same = now is not None and now.start_ticks == process.ticks
    tracer = proc.read_status(process.pid).get("TracerPid", "0") if same else "0"
    since_ns, ticks = process.cpu_since
    since_s, cpu_share = (time.monotonic_ns() - since_ns) / 1e9, None
    if now is not None and same and since_ns and since_s > 1:
        cpu_share = (now.cpu_ticks - ticks) / os.sysconf("SC_CLK_TCK") / since_s
    return {
        "state": now.state if now is not None and same else None, "cpu_share": cpu_share,
        "tracer": int(tracer) if tracer.isdigit() else 0, "frozen_since_ns": process.frozen_since_ns,
        "ended_ns": process.ended_ns, "code": process.exit_code, "last_progress_ns": process.last_progress_ns,
        "starved_ns": process.starved_ns, "oom": oom, "dumps": dumps.get(process.pid, []),
        "children": [{"pid": c.pid, "ticks": c.start_ticks, "state": c.state, "name": c.name} for c in below],
    }  # fmt: skip


def ask_for_evidence(folder: Path, limit_s: float, is_running: Callable[[], bool]) -> bool:
    """Ask the watcher of a job, by the folder of its record; return whether evidence came. Raises OSError."""
    control = open_plain(folder / "control", os.O_RDWR)
    try:
        asked = time.monotonic_ns()
        os.pwrite(control, ring_layout.CELL.pack(asked), ring_layout.CONTROL_DUMP_ASKED)
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit and is_running():
            dumped = os.pread(control, ring_layout.CELL.size, ring_layout.CONTROL_DUMPED)
            if ring_layout.CELL.unpack(dumped)[0] == asked:
                return True
            time.sleep(ASK_EVERY_S)
    finally:
        os.close(control)
    return False
