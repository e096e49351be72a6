"""Simulated jobs: a short program of events, and the real watcher, suspicion, evidence, exchange, judge and report.

Ranks and launchers are scripts that write real rings, logs and answers through the recorder's own writer. The clock
stands still while anybody computes, and jumps to what is next when all wait: a hang of five minutes takes milliseconds,
and all happens in the same order each time. Several nodes are several sessions, each with its own processes and clock,
over the real records of the exchange. The machine is replaced, and nothing else: ``time``, threads that wait, the
process table, ``os.kill``, and the network.
"""

import contextlib
import json
import math
import mmap
import os
import queue
import re
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.cli import running
from ddpdoctor.collect import proc, run_files
from ddpdoctor.exchange import meeting
from ddpdoctor.exchange.store import KeyValues, StoreError
from ddpdoctor.launch import first_node, hang, other_node, replica_exchange, seen, session, stopping, watch
from ddpdoctor.launch.command_line import SplitCommand
from ddpdoctor.launch.placement import Placement, Style, WrapOptions
from ddpdoctor.model.launch import Connecting, Contact
from ddpdoctor.probes import store
from ddpdoctor.recorder.settings import RecorderSettings
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.ring_writing import Ring
from tests.synthetic import SCRIPT, TORCH, frame

S = 10**9
STARTED_NS = 1000 * S
LONGEST_S = 7200.0
FIRST_PID = 2**22 + 1
"""The kernel gives no process such a number, so what is still read from the real /proc finds nothing."""
LOADS_S, STEP_S, TELLS_S = 2.0, 1.0, 0.1
WORK_LINE, CALL_LINE, STUCK_LINE, END_LINE = 20, 25, 41, 60
MODES = {
    "trains": {"cpu": 50}, "lingers": {"cpu": 50}, "stands": {}, "spins": {"state": "R", "cpu": 100},
    "logs": {"written": 1000}, "writes": {"written": 50e6}, "reads": {"read": 50e6}, "maps": {"fetched": 50e6},
    "dumps": {"aside": 50e6},
    "polls": {"cpu": 1}, "explores": {"cpu": 100}, "loads": {"cpu": 1}, "starts": {"cpu": 1}, "freezes": {"state": "T"},
    "holds": {}, "starves": {"state": "R", "delay": S}, "threads": {"thread": S}, "feeds": {},
    "delegates": {}, "dozes": {"delay": S // 50},
}  # fmt: skip
"""What a rank does, and what the kernel says of it: its state, ticks, ns without a core, and bytes in a second."""
ON = ("trains", "lingers")
"""In these its script goes on; in the second its process lives on afterwards."""
SILENT = ("starves", "freezes", "holds")
"""In these no thread of a rank runs Python."""
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


class Killed(BaseException):
    """Ends what runs in a process that is gone."""


class Failed(Exception):  # noqa: N818 - an exception of the script
    """What a rank's script raises, with a text and the call in which it was; without a text it just leaves."""


class Task:
    """What ``threading.Thread`` is in a simulated job: it runs when the turn is passed to it."""

    def __init__(self, world, target, args=(), name="", daemon=True):  # noqa: ARG002, FBT002 - as there
        self.world, self.target, self.args = world, target, args
        self.node = world.current.node if world.tasks else None
        self.go, self.ident = threading.Lock(), 0
        self.go.acquire()
        self.until, self.deadline_ns = lambda: True, math.inf
        self.killed = self.over = False

    def start(self):
        self.world.tasks.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        self.go.acquire()
        self.ident = threading.get_ident()
        try:
            if not self.killed:
                self.target(*self.args)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the test shows it
            self.world.errors.append(error)
        self.over = True
        self.world.tasks.remove(self)
        self.world.pass_on()

    def join(self, timeout=None):
        self.world.block(lambda: self.over, timeout)

    def is_alive(self):
        return not self.over


class Flag:
    """What events, conditions and queues are."""

    def __init__(self, world):
        self.world, self.is_on, self.count, self.items = world, False, 0, []
        self.is_set, self.empty, self.put = lambda: self.is_on, lambda: not self.items, self.items.append

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def set(self):
        self.is_on = True

    def clear(self):
        self.is_on = False

    def notify_all(self):
        self.count += 1

    def wait(self, timeout=None):
        was = self.count
        return self.world.block(lambda: self.is_on or self.count != was, timeout)

    def get(self, timeout=None):
        if not self.world.block(lambda: self.items, timeout):
            raise queue.Empty
        return self.items.pop(0)


class Process:
    """A process of a node's table. What it uses grows with the clock."""

    def __init__(self, node, parent, name):
        self.world, self.node, self.parent, self.name, self.code = node.world, node, parent, name, None
        self.pid = FIRST_PID + 1000 * node.number + len(node.processes)
        self.state, self.was, self.rates, self.since_ns = "S", {}, {}, 0
        node.processes[self.pid] = self

    def uses(self, state="S", **rates):
        self.was = {name: self.used(name) for name in {*self.was, *self.rates, "delay"}}
        self.state, self.rates, self.since_ns = state, rates, self.world.now_ns

    def used(self, name):
        return int(self.was.get(name, 0) + self.rates.get(name, 0) * (self.world.now_ns - self.since_ns) / S)

    def seen(self):
        return proc.Process(
            pid=self.pid, ppid=self.parent, state=self.state, start_ticks=7, cpu_ticks=self.used("cpu"),
            name=self.name, rss_bytes=2**30,
        )  # fmt: skip


class Rank(Process):
    """A rank: its script, its ring, and its sampler, which runs whenever somebody looks."""

    def __init__(self, node, local, attempt):
        super().__init__(node, node.launcher.pid, "python")
        self.number, self.local, self.attempt = node.number * node.world.per_node + local, local, attempt
        self.mode, self.line, self.seq, self.op, self.next_op = "", 1, 0, "", ""
        self.fault, self.request, self.asked_ns, self.killed_by = None, 0, 0, signal.SIGKILL
        self.child, self.rings = None, str(node.folder / "rings")
        self.ring = Ring(self.rings, ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, self.pid, 7)
        self.evidence = f"{node.folder}/evidence/{self.pid}-7"
        self.note("process", ppid=self.parent, main=1, roots=["/usr/lib/python3.11/"], env={})
        self.ring.set("dumps_on_signal", 1)
        self.add(".dump", "")
        self.turn("trains")
        self.task = Task(self.world, self._run)
        self.task.start()

    def note(self, kind, **more):
        self.ring.note({"k": kind, "at": self.world.time_ns(), **more}, vital=True)

    def add(self, name, text):
        with open(self.evidence + name, "a") as file:  # noqa: PTH123 - a suffix of any form
            file.write(text)

    def turn(self, mode):
        self.mode = mode
        self.uses(**MODES[mode])

    def work(self, seconds=STEP_S, line=WORK_LINE):
        """Compute; or do what the test wants instead."""
        self.line = line
        self.world.block(lambda: self.mode not in ON or self.fault, seconds)
        if self.mode not in ON:
            self.line = STUCK_LINE
            self.world.block(lambda: self.mode in ON or self.fault)
        if self.fault:
            raise self.fault

    def call(self, op="all_reduce", line=CALL_LINE):
        """Wait for all ranks in a collective; over Gloo until one has gone. ``init_process_group`` is much the same."""
        ring, world, in_group = self.ring, self.world, op != "init_process_group"
        op, self.next_op, self.line, self.seq = self.next_op or op, "", line, self.seq + in_group
        site = ring.known_site(line) or ring.intern_site(line, frame(SCRIPT, line, "main", 1))
        group = ring.intern("0") if in_group else 0
        kind = ring_layout.pack_kind(
            ring.intern(op), ring.intern(op), group, site, 0, 0, ring_layout.NO_PEER, 0, ring_layout.FLAG_MAIN, ()
        )
        index = ring.begin(kind, self.seq if in_group else ring_layout.NO_SEQ, world.time_ns(), waits=True)
        met = world.meetings.setdefault((self.attempt, self.seq), {})
        met[self.number] = self.op = op

        def is_done():
            return len(met) == world.size and len(set(met.values())) == 1

        def is_lost():
            ranks = [rank for node in world.nodes for rank in node.ranks if rank.attempt == self.attempt]
            return not world.nccl and any(rank.code is not None and rank.number not in met for rank in ranks)

        self.gives_up = False
        world.block(lambda: self.mode not in SILENT and (is_done() or is_lost() or self.gives_up))
        self.op = ""
        ring.end(index, 0 if is_done() else ring_layout.FLAG_FAILED, world.time_ns(), waited=True)
        if not is_done() and not self.gives_up:
            raise Failed("Connection closed by peer", op)

    def _run(self):
        world, code = self.world, 0
        place = {"rank": self.number, "world_size": world.size}
        try:
            world.block(limit_s=LOADS_S)
            self.note("init", **place, timeout_s=1800.0)
            self.call("init_process_group", 10)
            self.note("initialized", **place, backend="nccl" if world.nccl else "gloo")
            self.ring.set("initialized", 1)
            world.script(self)
        except Failed as error:
            text, *ops = error.args
            if text:
                inside = [frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, op) for op in ops]
                frames, kind = [frame(SCRIPT, self.line, "main", 1), *inside], "RuntimeError" if ops else "ValueError"
                code, said = 1, {"type": kind, "text": text, "call": ops[0] if ops else None, "frames": frames}
                self.note("raised", **said, main=1, uncaught=1, child=0, groups=[])
        except Killed:
            code = -self.killed_by
        self.op, self.line = "", self.line if code else END_LINE
        self.ring.set("main_ended_ns", world.time_ns() if code >= 0 else 0)
        if self.mode == "lingers" and code >= 0:
            world.block(lambda: self.mode == "trains")
        self.code = code

    def gets(self, number):
        """Receive a signal."""
        if number == signal.SIGURG and self.mode == "holds":
            self.add(".dump", f"Thread 0x1 (most recent call first):\n  File {SCRIPT!r}, line {self.line} in main\n")
        elif number == signal.SIGKILL or (number == signal.SIGTERM and self.mode not in SILENT):
            self.killed_by, self.task.killed = number, True

    def sample(self, request):
        """Beat, note the line, count functions and children, and answer a while after the request."""
        now_ns, ring = self.world.time_ns(), self.ring
        if self.code is not None or self.mode in SILENT:
            return
        ring.set("heartbeat_ns", now_ns)
        ring.place(SCRIPT, self.line, "main")
        counted = {"polls": "function_changes", "explores": "new_functions", "loads": "batches"}.get(self.mode)
        if counted:
            ring.set(counted, ring.get(counted) + 1)
        children = [one for one in self.node.processes.values() if one.parent == self.pid and one.code is None]
        if self.mode == "starts" or (self.mode == "feeds" and not children):
            for child in children:
                child.code = 0
            Process(self.node, self.pid, "sh").uses("R", delay=S if self.mode == "feeds" else 0)
        if self.mode == "delegates":  # to a child with the recorder in it
            pid = children[0].pid if children else Process(self.node, self.pid, "python").pid
            self.child = self.child or Ring(self.rings, ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE, pid, 7)
            self.child.set("batches", self.child.get("batches") + 1)
        if request != self.request:
            self.request, self.asked_ns = request, now_ns
            self.add(f"-{request}.json", "{}")
        if self.asked_ns and now_ns >= self.asked_ns + self.world.answers_s * S:
            inside = [frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, self.op)] if self.op else []
            frames = [frame(SCRIPT, 60, "<module>", 1), frame(SCRIPT, self.line, "main", 1), *inside]
            stacks = [{"thread": "MainThread", "main": 1, "daemon": 0, "frames": frames}]
            looks = [{"at": at, "stacks": stacks} for at in (now_ns - S // 3, now_ns)]
            groups = [{"name": "0", "ranks": list(range(self.world.size)), "backend": "gloo", "enqueued": self.seq}]
            body = {"groups": groups, "flight_recorder": [], "looks": looks, "pid": self.pid, "request": request}
            self.asked_ns = 0
            Path(f"{self.evidence}-{request}.json").write_text(json.dumps({**body, "complete": 1}))


class Launcher(Process):
    """torchrun as ``wrap`` has started it, with the recorder's hooks."""

    def __init__(self, node):
        super().__init__(node, 1, "torchrun")
        self.told, self.returncode, self.attempt = 0, None, 0
        self.poll, self.send_signal = lambda: self.returncode, self.gets
        self.terminate, self.kill = partial(self.gets, signal.SIGTERM), partial(self.gets, signal.SIGKILL)
        self.task = Task(self.world, self._run)
        self.task.start()

    def gets(self, number):
        if number == signal.SIGUSR1:  # torchrun has no handler
            self.returncode = self.code = -number
            self.task.killed = True
        self.told = self.told or (number if number in ENDS else 0)

    def wait(self, timeout=None):
        self.world.block(lambda: self.returncode is not None, timeout)

    def log(self, **entry):
        with (self.node.folder / "agent.jsonl").open("a") as log:
            log.write(json.dumps({"at": self.world.time_ns(), "attempt": self.attempt, **entry}) + "\n")

    def _run(self):
        self.uses(cpu=100)
        self.world.block(limit_s=LOADS_S)
        self.uses()
        status = self._attempt()
        while status and not self.told and self.attempt < self.world.max_restarts:
            self.attempt += 1
            status = self._attempt()
        self.returncode = self.code = status

    def _attempt(self):
        """Wait for the other nodes, start ranks, and stop them when one has failed."""
        world, node, block, attempt = self.world, self.node, self.world.block, self.attempt
        here = world.rendezvous.setdefault(attempt, set())
        here.add(node.number)
        block(lambda: self.told or len(here) == len(world.nodes))
        ranks = [] if self.told else [Rank(node, local, attempt) for local in range(world.per_node)]
        node.ranks += ranks
        for rank in ranks:
            self.log(k="rank", pid=rank.pid, local_rank=rank.local, rank=rank.number, world_size=world.size)
        block(lambda: self.told or any(rank.code for rank in ranks) or all(rank.code is not None for rank in ranks))
        block(limit_s=TELLS_S)
        left = [rank for rank in ranks if rank.code is None]
        ended = [rank for rank in ranks if rank not in left]
        for rank in ended:
            self.log(k="end", pid=rank.pid, code=rank.code)
        if left:
            self.log(k="closing", running=[rank.pid for rank in left])
            began_ns = node.control(ring_layout.CONTROL_CLOSING, world.time_ns())
            block(lambda: node.control(ring_layout.CONTROL_ACK) >= began_ns, 1.2)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in left:
                rank.gets(number)
            block(lambda: all(rank.code is not None for rank in left), 30.0)
        for rank in left:
            self.log(k="end", pid=rank.pid, code=rank.code)
        return int(self.told != 0 or any(rank.code for rank in ranks))


class Node:
    """A host with its ``wrap``; afterwards what that has shown, its report and its status."""

    def __init__(self, world, number, options):
        self.world, self.number, self.options, self.folder = world, number, options, options.report_dir
        self.processes, self.ranks, self.handlers, self.writes = {}, [], {}, []
        self.host, self.skew_ns, self.is_cut, self.outcome, self._map = f"dd{number}", 0, False, None, None

    def watch(self):
        self.outcome = running.run_and_show(self.options)
        self.ended_s = self.world.now_ns / S

    def start_launcher(self):
        with (self.folder / "control").open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ring_layout.CONTROL_SIZE)
        self.launcher = Launcher(self)
        return self.launcher

    def control(self, offset, value=None):
        """Read a cell of the control page, or write it."""
        if value is not None:
            ring_layout.CELL.pack_into(self._map, offset, value)
        return ring_layout.CELL.unpack_from(self._map, offset)[0]

    def table(self):
        for rank in self.ranks:
            rank.sample(self.control(ring_layout.CONTROL_REQUEST))
        return {pid: process.seen() for pid, process in self.processes.items() if process.code is None}

    @property
    def said(self):
        """What it said, each with the second, and last how it ended and what it found."""
        texts = (
            (at_s, re.sub(r"(?<=-defect-)\w+", "", text.replace(self.world.place, ""))) for at_s, text in self.writes
        )
        lines = [(at_s, line) for at_s, text in texts for line in text.splitlines()]
        shown = [
            f"{at_s:.0f} {line.removeprefix('ddpdoctor: ')}" for at_s, line in lines if line.startswith("ddpdoctor: ")
        ]
        end = f"{self.ended_s:.0f} exit status {self.outcome.exit_status}"
        if not self.options.report_file.exists():
            return [*shown, f"{end}, no report"]
        report = json.loads(self.options.report_file.read_text())
        found = [f"{one['code']} {one['severity']} {one['confidence']} {one['ranks']}" for one in report["findings"]]
        return [*shown, f"{end}, {report['job']['status']}: {', '.join(found) or 'nothing'}"]


class Hosted(meeting.HostedMeeting):
    """The first node's meeting, without a network."""

    def __init__(self, world):
        contextlib.ExitStack.__init__(self)
        self.not_listening, world.hosted = "", KeyValues()
        self.server, self.values = SimpleNamespace(listen=lambda: 0), world.hosted
        self.callback(lambda: setattr(self.values, "ended", True))
        self.serve_folder = str


class Wire:
    """Another node's connection to it, which answers at once unless one of them is cut off."""

    beat_every_s = 1.0

    def __init__(self, world):
        self.world, self.node, self.values, self.close = world, world.current.node, world.hosted, lambda: None

    def __getattr__(self, name):
        def ask(*args):
            task, first = self.world.current, self.world.nodes[0]
            if self.node.is_cut or first.is_cut:
                self.world.block(limit_s=3.0)
                raise StoreError("no answer within 3 s")
            task.node = first  # it answers by its own clock
            try:
                return getattr(self.values, name)(*args)
            finally:
                task.node = self.node

        return ask


def train(rank, steps=60):
    """Train, as most jobs do."""
    for step in range(1, steps + 1):
        rank.work()
        rank.call()
        rank.ring.set("steps", step)


def wrap_options(folder, **given):
    """Return the settings of a ``wrap``, with some of them given."""
    defaults = {
        "hang_timeout_s": 60.0, "on_hang": "auto", "debug_level": None, "report_dir": folder,
        "report_file": folder / "report.json", "placement": Placement(), "format": "text", "quiet": False, "ignore": (),
        "ranks": RecorderSettings(), "allow_different": (), "speed": False, "split": SplitCommand(script=SCRIPT),
        "command": ("ddpdoctor", "wrap", SCRIPT),
    }  # fmt: skip
    return WrapOptions(**{**defaults, **given})


class World:
    """A job, its machines and their time. ``events`` are ``(seconds, name of a method or mode, *arguments)``."""

    def __init__(
        self, folder, events, *, nodes=1, per_node=2, absent=(), script=train, nccl=False, max_restarts=0,
        answers_s=0.3, look_every_s=1.0, judge=None, skews_s=(), most=0, **options,
    ):  # fmt: skip
        self.now_ns, self.wall_ns, self.tasks, self.errors = 0, time.time_ns(), [], []
        self.events, self.meetings, self.rendezvous, self.hosted = sorted(events, key=lambda one: one[0]), {}, {}, None
        self.per_node, self.size, self.script, self.nccl = per_node, per_node * nodes, script, nccl
        self.max_restarts, self.answers_s, self.look_every_s, self.judge = max_restarts, answers_s, look_every_s, judge
        self.main = self.current = Task(self, None)
        self.current.ident = threading.get_ident()
        self.tasks.append(self.current)
        self.nodes, self.place = [], str(folder)
        for number in range(nodes):
            (own := folder / f"n{number}").mkdir(parents=True)
            places = {"hosts": ("dd0",), "store": ("dd0", 29500), "port": 29400} if nodes > 1 else {}
            placement = Placement(style=Style.TORCHRUN, number=number, expected=nodes, most=most or nodes, **places)
            shape = (f"--nproc-per-node={per_node}", f"--nnodes={nodes}", f"--node-rank={number}")
            given = {"report_file": own / f"node-{number}.json"} if number else {}
            split = SplitCommand(script=SCRIPT, torchrun=shape)
            given |= {"placement": placement, "split": split, "debug_level": "OFF"}
            self.nodes.append(Node(self, number, wrap_options(own, **given, **options)))
        for node, skew_s in zip(self.nodes, skews_s, strict=False):
            node.skew_ns = int(skew_s * S)
        self.here = [node for node in self.nodes if node.number not in absent]

    # The clock and the turns

    def is_ours(self):
        """Return whether a thread of the simulation asks."""
        return self.current.ident == threading.get_ident()

    def time_ns(self):
        return STARTED_NS + self.now_ns + (self.current.node.skew_ns if self.current.node else 0)

    def block(self, until=lambda: False, limit_s=None):
        """Let the others go on until something holds, or for so long."""
        me = self.current
        me.until, me.deadline_ns = until, math.inf if limit_s is None else self.now_ns + int(max(limit_s, 0) * S)
        self.pass_on()
        me.go.acquire()
        if me.killed:
            raise Killed
        return bool(until())

    def pass_on(self):
        self.current = self._choose()
        self.tasks.remove(self.current)
        self.tasks.append(self.current)
        self.current.go.release()

    def _choose(self):
        while not self.errors:
            ready = next((task for task in self.tasks if task.killed or task.until()), None)
            if ready is not None:
                return ready
            first = min(self.tasks, key=lambda task: task.deadline_ns)
            event_ns = self.events[0][0] * S if self.events else math.inf
            if min(first.deadline_ns, event_ns) > LONGEST_S * S:
                self.errors.append(AssertionError("the job never ends"))
                break
            self.now_ns = max(self.now_ns, int(min(first.deadline_ns, event_ns)))
            if event_ns > self.now_ns:
                return first
            _, name, *args = self.events.pop(0)
            try:
                self._turn(name, args) if name in MODES else getattr(self, name)(*args)
            except Exception as error:  # noqa: BLE001 - the test shows it, and not the code that waits just now
                self.errors.append(error)
        return self.main

    # Events

    def _turn(self, mode, ranks):
        for number in ranks:
            self.rank(number).turn(mode)

    def raises(self, number, text="invalid literal for int()"):
        self.rank(number).fault = Failed(text)

    def dies(self, number, by=signal.SIGKILL):
        self.rank(number).gets(by)

    def gives_up(self, number):
        """Have a rank catch what its call raises, and go on with something else that takes long."""
        self.rank(number).gives_up = True
        self.rank(number).turn("spins")

    def calls(self, number, op):
        self.rank(number).next_op = op

    def books(self, number, seconds):
        """Say that a rank had waited for a core: the kernel counts that when the rank gets one."""
        self.rank(number).was["delay"] += seconds * S

    def signals(self, number, node=0):
        self.nodes[node].handlers[number](number, None)

    def cuts(self, *nodes):
        for node in self.nodes:
            node.is_cut = node.number in nodes

    def vanishes(self, number):
        """Lose a host with all that runs there; its connections break."""
        node = self.nodes[number]
        for task in self.tasks:
            task.killed = task.killed or task.node is node
        for process in node.processes.values():
            process.code = -9
        node.is_cut, self.hosted.ended = True, self.hosted.ended or number == 0
        self.hosted.lose(str(number))

    # What is asked of the machine

    def rank(self, number):
        return [rank for node in self.nodes for rank in node.ranks if rank.number == number][-1]

    def kill(self, pid, number):
        process = self.current.node.processes.get(pid)
        if process is None or process.code is not None:
            raise ProcessLookupError(pid)
        process.gets(number)

    def connect(self, *_, **__):
        if self.hosted is None or self.hosted.ended or self.current.node.is_cut or self.nodes[0].is_cut:
            self.block(limit_s=0.5)
            raise StoreError("dd0:29400: connection refused")
        return Wire(self)

    def knock(self, host, port, _torch):
        is_up = any(node.host == host and not node.is_cut for node in self.here) and not self.current.node.is_cut
        contact = Contact.CONNECTED if is_up else Contact.NO_ANSWER
        return (Connecting(host=host, address="10.0.0.1", port=port, contact=contact),)

    def _patch(self, patch):
        def ours(module, **replaced):
            for name, function in replaced.items():
                patch.setattr(module, name, partial(self._either, getattr(module, name), function))

        def used(pid, name):
            process = self.current.node.processes.get(pid)
            return 0 if process is None or process.code is not None else process.used(name)

        def open_pidfd(pid):
            fds[fd := os.open(os.devnull, os.O_RDONLY)] = pid
            return fd

        def ended():
            table = self.current.node.processes
            return [(fd, 1) for fd in polled if (one := table.get(fds[fd])) and one.code is not None]

        def poll(milliseconds):
            self.block(limit_s=max(milliseconds / 1000, self.look_every_s))
            return ended()

        def save(path, record):
            run_files.save(path, record)
            os.utime(path, ns=(self.wall_ns + self.now_ns,) * 2)  # whether it is fresh goes by this clock as well

        fds, polled = {}, set()
        table = lambda *_: self.current.node.table()  # noqa: E731
        poller = SimpleNamespace(poll=poll, register=lambda fd, _: polled.add(fd), unregister=polled.discard)
        ours(
            time, monotonic_ns=self.time_ns, monotonic=lambda: self.time_ns() / S,
            time_ns=lambda: self.wall_ns + self.now_ns, time=lambda: (self.wall_ns + self.now_ns) / S,
            sleep=lambda seconds: self.block(limit_s=seconds),
        )  # fmt: skip
        ours(os, kill=self.kill, pidfd_open=open_pidfd)
        ours(socket, gethostname=lambda: self.current.node.host)
        ours(
            signal, signal=lambda number, handler: self.current.node.handlers.update({number: handler}),
            getsignal=lambda _: signal.SIG_DFL,
        )  # fmt: skip
        ours(
            proc, read_processes=table, read_process=lambda pid, *_: table().get(pid), read_status=lambda *_: {},
            read_io=lambda pid, task=0: proc.IoBytes(
                read=used(pid, "read") + (0 if task else used(pid, "aside")), written=used(pid, "written"),
                fetched=used(pid, "fetched"),
            ),
            read_run_delays=lambda pid, *_: {pid: used(pid, "delay"), -pid: used(pid, "thread")},
            read_wanted_ns=lambda *_: None,
            read_exit_code=lambda pid, *_: self.current.node.processes[pid].code, catches_signal=lambda *_: True,
        )  # fmt: skip
        waits = {name: partial(Flag, self) for name in ("Event", "Condition", "Lock", "RLock")}
        for module in (first_node, other_node, hang, meeting, replica_exchange):
            patch.setattr(module, "threading", SimpleNamespace(Thread=partial(Task, self), **waits))
        for module in (other_node, hang):
            patch.setattr(module, "queue", SimpleNamespace(SimpleQueue=partial(Flag, self), Empty=queue.Empty))
        stream = SimpleNamespace(encoding="utf-8", isatty=lambda: False, flush=lambda: None)
        stream.write = lambda text: self.current.node.writes.append((self.now_ns / S, text))
        for module, name, value in (
            (watch, "select", SimpleNamespace(poll=lambda: poller, POLLIN=select.POLLIN)),
            (watch, "read_kernel_oom_pids", lambda: None), (watch, "read_oom_kills", lambda: None),
            (seen, "read_received", tuple), (seen, "MEMORY_READERS", {}),
            (stopping, "Guardian", lambda *_: SimpleNamespace(protect_self=None, dismiss=lambda: None)),
            (session, "start_launcher", lambda *_: self.current.node.start_launcher()),
            (stopping, "is_in_foreground", lambda: False), (sys, "stderr", stream), (tempfile, "tempdir", self.place),
            (first_node, "HostedMeeting", lambda *_, **__: Hosted(self)), (first_node, "further_ways", lambda *_: ()),
            (first_node, "open_job_store", self.connect),
            (meeting, "by_port", lambda *_: meeting.MeetingWay("own port", lambda *_, **__: self.connect())),
            (hang, "save", save), (store, "knock", self.knock),
            (running, "load_judge", self.judge or running.load_judge),
        ):  # fmt: skip
            patch.setattr(module, name, value)

    def _either(self, real, function, *args, **more):
        return (function if self.is_ours() else real)(*args, **more)

    def run(self):
        """Run the job until every ``wrap`` has ended; return the nodes."""
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            watching = []
            for node in self.here:
                self.main.node = node
                watching.append(Task(self, node.watch))
                watching[-1].start()
            self.main.node = None
            self.block(lambda: self.errors or all(task.over or task.killed for task in watching))
            errors, self.errors = self.errors, []
            for task in self.tasks:
                task.killed = task is not self.main
            self.block(lambda: len(self.tasks) == 1)
        if errors:
            print(*(f"{node.host} at {self.now_ns / S:.1f} s: {node.writes}" for node in self.nodes))
            raise errors[0]
        return self.nodes
