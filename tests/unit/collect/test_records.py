"""What a run folder keeps is read field by field: damage costs itself, and the rest is there."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import gc
import json
import os
import pickle
import sys
import time
import tracemalloc
import types
import typing
import zlib
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdoctor.collect.proc import Process
from ddpdoctor.collect.recorded import (
    Recorded,
    device_times,
    pending_on_device,
    read_all,
    read_dump,
    read_flight,
    read_gradient_times,
    read_models,
    read_or_none,
    read_parameters,
    read_process_causes,
    read_record,
    unpack,
)
from ddpdoctor.collect.run import read_job, shift_times
from ddpdoctor.collect.run_files import (
    MAX_SOURCE_BYTES,
    MAX_WIDTH,
    keep_users_logs,
    load,
    parse_watch,
    read_excerpt,
    read_trial,
    read_warnings,
)
from ddpdoctor.launch.seen import CausesSeen
from ddpdoctor.model.codec import Decoder, _modules_by_class, encode
from ddpdoctor.model.facts import Call, CallLog, GroupState, HostCauses, ProcessCauses, Raised, Rank, ReducerSaid
from ddpdoctor.model.node import Node
from ddpdoctor.model.stacks import Frame
from ddpdoctor.model.tuning import TrialStop
from ddpdoctor.recorder import replicas
from ddpdoctor.recorder.state import start_ticks
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.flight import chosen, parse_cut_pickle, parse_plain_pickle
from ddpdoctor.recorder.storage.ring_reading import read_ring_file
from ddpdoctor.recorder.storage.ring_writing import Ring
from tests.golden import Cases, table
from tests.rules.build import pack_calls
from tests.synthetic import Job, write_gathered

CASES = Cases(__name__)
test_kept = CASES.test()

# Records of recorders and watchers are read field by field: what is damaged costs its field and no other.


WRITTEN = {"f": "train.py", "l": 7, "n": "main", "u": 1}


SEEN = {
    "state": "S", "frozen_since_ns": "long", "ended_ns": 2**70, "dumps": [[0, 9, 5], "x"],
    "children": [{"pid": 8, "ticks": 5, "state": "R", "name": "python"}],
    "before_call": {"until_ns": 3, "lines": [["train.py", 7, "main"]]}, "causes": {"memory": 3, "children_count": 2},
}  # fmt: skip


@CASES
def damage_costs_its_field_and_no_other():
    """A record that cannot do without the field is dropped."""
    frames = (WRITTEN, ["train.py", 7, "main"], {"f": "train.py", "l": "?"}, {}, None, "train.py", ["train.py"])
    note = {"type": "ValueError", "at": "then", "main": 1, "call": 3, "frames": [WRITTEN, 3, {}], "ranks": [1, "2", 3],
            "reducer": {"what": "unheard of"}}  # fmt: skip
    sound = {"what": "static", "names": ["w"], "count": 1, "of": 2, "frame": WRITTEN}
    assert read_or_none(ReducerSaid, {"what": 3}) is None
    return {
        "frames": [[f"{entry}:", read_or_none(Frame, entry)] for entry in frames],
        "an error": read_record(Raised, note, message="m"),
        "what the reducer said": read_all(ReducerSaid, [sound, {"what": 3}, "x"]),
        "what the watcher saw": parse_watch({"now_ns": 7, "processes": {"42": SEEN, "x": SEEN, "43": 3}}).processes,
    }


# What a run folder keeps of causes comes back as it was, and what is damaged is absent.


MIB = 2**20


def process(pid, rss, ppid=1, state="S"):
    return Process(pid=pid, ppid=ppid, state=state, start_ticks=5, cpu_ticks=0, name="python", rss_bytes=rss)


@CASES
def causes_that_come_back():
    """Memory is kept at its most and at its last."""
    seen = CausesSeen()
    sizes = ((10, ()), (90, (process(8, 5 * MIB), process(9, 7 * MIB))), (40, (process(8, MIB),)), (0, ()))
    for second, (used, below) in enumerate(sizes):
        seen.follow(process(7, used * MIB), below, second * 10**9)
    assert seen.row(7, 6) is None
    seen.follow_host(10**12)
    host = read_or_none(HostCauses, json.loads(json.dumps(encode(HostCauses(**seen.host)))))
    assert 0 < host.machine.used_bytes < host.machine.limit_bytes
    memory = {"resident": [1, 2], "address_space": [9, 8], "shared_memory": None, "devices": [[0, 1, 2, 3, 4]]}
    children = [{"k": "child_end", "pid": 8, "code": -9}, {"k": "child_end", "pid": 9, "code": 0}]
    notes = [*children, {"k": "raised", "memory": memory}, {"k": "raised", "memory": None}]
    return {
        "what was followed": read_or_none(ProcessCauses, json.loads(json.dumps(seen.row(7, 5)))),
        "notes of a rank": read_process_causes(None, notes, {"lock_path": "/x/lock"}),
    }


def test_what_is_damaged_or_absent_is_absent(tmp_path):
    assert read_or_none(ProcessCauses, {"memory": 3, "children_count": 2}) == ProcessCauses(children_count=2)
    assert read_process_causes(None, [], {}) is None
    assert read_or_none(HostCauses, "x") is None
    (tmp_path / "machine.json").write_text('{"host": 3}')
    assert load(Node, tmp_path / "machine.json") is None


WARNINGS = """\
node3:4711:4720 [0] transport/net_ib.cc:12 NCCL WARN NET/IB : Got completion with error 12
node3:4711:4720 [0] NCCL INFO Channel 00 : 0[0] -> 1[1]
[2026-11-21 10:00:00] node3:4711:4721 [1] misc/socket.cc:5 NCCL WARN Connection timed out
NCCL WARN a line without a head
"""


@CASES
def nccls_warnings_of_the_folder_and_the_users_own_files(tmp_path):
    for name, text in {
        "run/nccl/node3.4711.log": WARNINGS,
        "own/log.node3.4800": WARNINGS.replace("4711:", "4800:"),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    keep_users_logs(tmp_path / "run", f"{tmp_path}/own/log.%h.%p")
    return read_warnings(tmp_path / "run")


# What the ranks of a trial wrote is read, also where a file is cut off or damaged.


PLAN = {"plan": ["base", "again"], "rounds": 1, "forwards": 1, "needs": 26}
LINES = [
    PLAN,
    {"tries": "again", "round": 0},
    {"round": 0, "setting": "again", "steps_ns": [2_000_000, 3_000_000]},
    {"tries": "base", "round": 0},
    {"round": 0, "setting": "base", "steps_ns": [1_000_000, 4_000_000]},
    {"end": "done", "steps": 26},
]


def write(folder, *ranks):
    (folder / "tuning").mkdir(exist_ok=True)
    for number, lines in enumerate(ranks):
        text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        (folder / "tuning" / f"{number}.jsonl").write_text(text)


OTHERS = {"refused": "static_graph", "reason": "another rank refuses it"}
ONE_SETTING = [
    {"launch": "base", "fits": ["static_graph"], "forwards": 1, "needs": 30},
    {"round": 0, "setting": "base", "steps_ns": [2_000_000]}, {"end": "cannot switch", "reason": "a hook"},
]  # fmt: skip
TRIALS = {
    "of two ranks": (LINES, LINES), "one did not end a block": (LINES, LINES[:4]),
    "one follows another": ([PLAN, {"end": "with another rank"}], [PLAN, {"end": "cannot switch", "reason": "a hook"}]),
    "one refused": ([PLAN, OTHERS], [PLAN, {**OTHERS, "reason": "RuntimeError: no"}], [PLAN, OTHERS]),
    "of one setting": (ONE_SETTING, ONE_SETTING), "none": (),
}  # fmt: skip


@CASES
def trials(tmp_path):
    found = {}
    for name, ranks in TRIALS.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, *ranks)
        trial = read_trial(tmp_path / name)
        found[f"{name}, a result: {trial.has_result}"] = trial
    return found


def test_a_damaged_line_costs_only_itself(tmp_path):
    for rest in ('{"round": 0, "setti', "null\n", "[1]\n", '{"round": 0, "steps_ns": ["x"]}\n', "\0\n"):
        write(tmp_path, [*LINES[:3], rest], [*LINES[:3], rest])
        trial = read_trial(tmp_path)
        assert ([block.setting for block in trial.blocks], trial.stop) == (["again"], TrialStop.CUT_SHORT)


# Notes about gradients become records, also where they are damaged.


COLUMNS = {"sizes": [400, 40], "ready": [2500, -1], "buckets": [440]}


def note(columns=COLUMNS, **more):
    packed = base64.b64encode(zlib.compress(json.dumps(columns).encode())).decode()
    fields = {"group": "0", "readings": 3, "reductions": 20, "compute_us": 3000, "exposed_us": 1500}
    return {"k": "gradient_times", "n": 1, "columns": packed, **fields, **more}


@CASES
def times_of_gradients():
    """The last note of each model counts, and a damaged one is left out."""
    damaged = [note(n=1, columns="???"), note({"sizes": [1, 2], "ready": [1]}, n=2), note([], n=3), note({}, n=4)]
    return {
        "settings": read_gradient_times([note(cap=1024, finds_unused=1, static=0, same_unused=1, unused_bytes=40)]),
        "several": read_gradient_times([note(), note(n=2), {"k": "ddp"}, note(readings=12)]),
        "damaged": [one.number for one in read_gradient_times([*damaged, note(n=5)])],
    }


# What DDP was given is written small, and read back as it was.


def note_models(module, *, with_buffers=True, room=replicas.MAX_ROWS_BYTES):
    noted = []
    here = types.SimpleNamespace(ring=True, note=lambda kind, **entry: noted.append({"k": kind, **entry}))
    with pytest.MonkeyPatch.context() as fresh:
        for name, value in (("here", here), ("MAX_ROWS_BYTES", room), ("_model_digests", set()), ("_rows_bytes", 0)):
            fresh.setattr(replicas, name, value)
        replicas.note_model(module, types.SimpleNamespace(group_name="0"), with_buffers, finds_unused=False)
    noted[0].pop("finds_unused")
    return {**noted[0], "frame": {"f": "train.py", "l": 7, "n": "main", "u": 1}}


def pack_names(named):
    rows = [replicas._tensor_row("p", name, tensor) for name, tensor in named]
    return replicas._packed_rows(rows, replicas.MAX_ROWS_BYTES // 4)


@CASES
def models_that_ddp_was_given():
    """In order, without what DDP passes over. A lazy layer has no shape."""
    module, ignoring = (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
    module[0].bias.requires_grad = False
    ignoring._ddp_params_and_buffers_to_ignore = ["0.weight"]
    notes = [note_models(module), note_models(ignoring, with_buffers=False), note_models(torch.nn.LazyLinear(3))]
    return [read_models([one]) for one in notes]


def test_parameters_that_an_optimizer_trains_without_ddp_come_back_with_their_names():
    named = [(f"model.{name}", tensor) for name, tensor in torch.nn.Linear(2, 3).named_parameters()]
    notes = [{"k": "named", "rows": pack_names(named)}, {"k": "named", "rows": "!"}, {"k": "named"}]
    assert [(one.name, one.shape) for one in read_parameters(notes)] == [("model.weight", (3, 2)), ("model.bias", (3,))]
    many = [(f"layer.{hash(str(n))}.{n}", torch.zeros(1)) for n in range(8000)]
    assert len(pack_names(many)) <= replicas.MAX_ROWS_BYTES // 4


def test_many_rows_take_little_room_are_cut_and_counted_and_written_once_for_equal_models():
    layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(1000)])
    written = note_models(layers)
    assert len(written["rows"]) < 16 * 1024
    assert len(read_models([written])[0].tensors) == 2000
    (found,) = read_models([note_models(layers[:500], room=1500)])
    assert 0 < len(found.tensors) < found.count == 1000
    first = note_models(torch.nn.Linear(2, 2))
    both = read_models([first, {name: value for name, value in first.items() if name != "rows"}])
    assert both[0].tensors == both[1].tensors != ()
    assert unpack("not base64!") == unpack("AAAA") == unpack("") == ()


# The lines around a blamed one: of a file that is still the one that ran, and without secrets.


LATER = time.time() + 3600


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


TEN = "\n".join(f"line {n}" for n in range(1, 11)) + "\n"


@CASES
def lines_around_a_blamed_one(tmp_path):
    """Fewer than five at the ends, and none of a line that is not there. A link is followed."""
    path = written(tmp_path / "a.py", TEN.rstrip())
    (tmp_path / "link.py").symlink_to(path)
    found = {line: read_excerpt(path, line, LATER) for line in (1, 2, 5, 9, -1, 0, 12)}
    assert read_excerpt(str(tmp_path / "link.py"), 5, LATER).lines == found[5].lines
    return {line: one and dataclasses.replace(one, file="") for line, one in found.items()}


def test_secrets_are_hidden(tmp_path):
    text = 'api_key = "sk-proj-abcdefghij0123456789ABCDEFGHIJ"\nwandb.login(key="x")\npassword = "hunter2!"\n'
    shown = " ".join(read_excerpt(written(tmp_path / "a.py", text), 2, LATER).lines)
    assert "abcdefghij" not in shown
    assert "hunter2" not in shown
    key = 'KEY = """-----BEGIN PRIVATE KEY-----\nabcd\nefgh\nijkl\n-----END PRIVATE KEY-----"""\nx = 1\n'
    found = read_excerpt(written(tmp_path / "b.py", key), 4, LATER)
    assert found.first == 2
    assert not {"abcd", "efgh", "ijkl"} & set(found.lines)
    assert found.lines[-1] == "x = 1"


def test_bytes_that_are_not_utf8_long_lines_and_a_file_that_changed_since(tmp_path):
    found = read_excerpt(written(tmp_path / "a.py", b"# gr\xf6\xdfe\r\n" + b"x" * 5000), 1, LATER)
    assert (found.lines[0], len(found.lines[1])) == ("# gr��e", MAX_WIDTH)
    assert read_excerpt(str(tmp_path / "a.py"), 1, time.time() - 3600) is None


def test_what_is_no_regular_file_or_too_large(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    large = written(tmp_path / "large.py", "x\n" * (MAX_SOURCE_BYTES // 2 + 1))
    for path in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path), str(tmp_path / "none"), large, "a\0b", "<string>",
                 str(tmp_path / "circle")):  # fmt: skip
        assert read_excerpt(path, 1, LATER) is None


# Every time that a rank's facts hold is brought to another clock, and nothing else is changed.


AHEAD = 1_000_000


def fill(kind, name="", above=()):
    """Return a value of a type: every time is 5 s, and every tuple and optional has something in it.

    A record that may hold another of its own type holds one, and that holds none.
    """
    if above.count(kind) > 1:
        return None
    inner = [one for one in typing.get_args(kind) if one not in {type(None), Ellipsis}]
    if dataclasses.is_dataclass(kind):
        models = ((name, import_module(f"ddpdoctor.model.{module}")) for name, module in _modules_by_class().items())
        names = {**vars(typing), **{name: getattr(module, name) for name, module in models}}
        hints = typing.get_type_hints(kind, localns=names)
        above = (*above, kind)
        return kind(**{field.name: fill(hints[field.name], field.name, above) for field in dataclasses.fields(kind)})
    if kind is CallLog:
        return pack_calls([fill(Call, above=above)])
    if inner:
        is_one = typing.get_origin(kind) in {typing.Union, types.UnionType}
        return fill(inner[0], name, above) if is_one else tuple(fill(one, name, above) for one in inner)
    if issubclass(kind, Enum):
        return next(iter(kind))
    return 5 * 10**9 if name.endswith("_ns") else {bool: True, int: 3, float: 1.5, str: "text"}[kind]


def times(value, path=""):
    """Return every field that is named as a time, by its place."""
    if dataclasses.is_dataclass(value):
        found = {}
        for field in dataclasses.fields(value):
            inner, place = getattr(value, field.name), f"{path}.{field.name}"
            several = inner if isinstance(inner, tuple) else (inner,)
            is_time = field.name.endswith("_ns")
            found |= {f"{place}[{i}]": one for i, one in enumerate(several)} if is_time else times(inner, place)
        return found
    if isinstance(value, (tuple, list, CallLog)):
        return {place: one for i, item in enumerate(value) for place, one in times(item, f"{path}[{i}]").items()}
    return {}


def test_every_time_is_shifted_and_all_else_stays():
    rank = fill(Rank)
    shifted = shift_times(rank, AHEAD)
    before, after = times(rank), times(shifted)
    assert {
        ".speed.kept.ended_ns[0]", ".started_ns[0]", ".open_calls[0].ended_ns[0]", ".step_times.ended_ns[0]",
        ".samples[0].time_ns[0]", ".helper_errors[0].error.first.time_ns[0]",
    } <= set(before)  # fmt: skip
    assert after == {place: moment - AHEAD for place, moment in before.items()}
    back = shift_times(shifted, -AHEAD)
    assert tuple(back.recent_calls) == tuple(rank.recent_calls)
    assert dataclasses.replace(back, recent_calls=rank.recent_calls) == rank


def test_packed_calls_stay_packed_open_ones_open_and_times_may_be_before_the_boot_of_this_host():
    call = fill(Call)
    rank = dataclasses.replace(fill(Rank), recent_calls=pack_calls([call, dataclasses.replace(call, ended_ns=None)]))
    calls = shift_times(rank, AHEAD).recent_calls
    assert isinstance(calls, CallLog)
    assert [one.ended_ns for one in calls] == [call.ended_ns - AHEAD, None]
    assert shift_times(rank, 10**10).recent_calls[0].started_ns == 5 * 10**9 - 10**10


# Dumps of torch's flight recorder are read without running anything.


DATA = Path(__file__).parents[2] / "data" / "flight-recorder"
DUMP = (DATA / "nccl2-2.15.pickle").read_bytes()
PLAIN = {"a": [1, -2, 2**40, 1.5, True, None, ()], "b": {"c": (1, 2, 3, 4)}, "d": [], "e": ("x",)}


def test_a_dump_of_torch_holds_what_its_json_does_and_plain_values_come_back():
    reported, expected = parse_plain_pickle(DUMP), json.loads((DATA / "nccl2-2.15.json").read_text())
    names = [[entry["profiling_name"] for entry in one["entries"]] for one in (reported, expected)]
    assert (names[0], reported["version"]) == (names[1], expected["version"])
    assert [parse_plain_pickle(pickle.dumps(PLAIN, protocol=protocol)) for protocol in (2, 4)] == [PLAIN, PLAIN]


CALLS_SYSTEM = b"cos\nsystem\n(S'true'\ntR."
NOT_PLAIN = (
    b"", b"\x80\x02.", b"\x80\x02a.", b"\x80\x02}]]s.", b"\x80\x02h\x07.", b"\x80\x02(K\x01u.",
    b"\x80\x02K\x01K\x02a.", CALLS_SYSTEM, pickle.dumps(dt.date(2026, 1, 1), protocol=2), DUMP[:-100],
)  # fmt: skip


def test_what_is_damaged_or_more_than_plain_is_refused_and_one_that_is_cut_off_keeps_what_came_before():
    for data in NOT_PLAIN:
        with pytest.raises(ValueError):  # noqa: PT011 - pickletools has its own words
            parse_plain_pickle(data)
    for data in (b"", b"\x80\x02(", b"\x80\x02}(" + CALLS_SYSTEM[:-1]):
        with pytest.raises(ValueError, match=r"left|plain"):
            parse_cut_pickle(data)
    whole, cut = parse_plain_pickle(DUMP), parse_cut_pickle(DUMP[: len(DUMP) // 2])
    assert (cut["version"], cut["entries"][0]) == (whole["version"], whole["entries"][0])
    assert 0 < len(cut["entries"]) < len(whole["entries"])


def ring_of(folder):
    """Return what is in the ring of this process, as its reader has it."""
    (folder / "rings").mkdir()
    (folder / "evidence").mkdir()
    ring = Ring(str(folder / "rings"), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, os.getpid(), start_ticks())
    return read_ring_file(ring.path)


def test_the_dump_of_a_process_is_read_by_its_clock(tmp_path):
    content = ring_of(tmp_path)
    path = tmp_path / "evidence" / f"{content.pid}-{content.start_ticks}.flight1"
    assert read_dump(tmp_path, content) is None
    path.write_bytes(DUMP[:500])
    assert read_dump(tmp_path, content) is None
    path.write_bytes(DUMP)
    found = read_dump(tmp_path, content)
    assert found is not None
    assert [entry["collective_seq_id"] for entry in found.entries if not entry["is_p2p"]] == [1, 6]
    assert found.wall_ahead_ns == pytest.approx(time.time_ns() - time.monotonic_ns(), abs=1e9)


# What a job of many ranks takes: its records once, and the members of its groups once for all.


STEPS = 270
RECORDS = 7 * STEPS


def bytes_a_rank(folder, world):
    """Return what the facts of each rank take at the peak of reading a job of two hosts."""
    write_gathered(folder, Job(world=world, steps=STEPS, situation="stuck", tp=4), hosts=2, skew_ns=10**9)
    gc.collect()
    tracemalloc.start()
    try:
        job = read_job(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(job.ranks) == world
    assert all(len(rank.recent_calls) > RECORDS for rank in job.ranks)
    return peak / world


@pytest.mark.full
def test_the_records_of_a_rank_are_in_memory_once(tmp_path):
    # Two times and a number of 8 bytes and a kind of 2 make 49 KB; steps, stacks and notes take 40 KB.
    assert bytes_a_rank(tmp_path, 64) < 2.5 * RECORDS * (8 + 8 + 8 + 2)


def records_read(folder, world):
    """Return how many records of notes and answers are read in a job of plain data parallelism."""
    write_gathered(folder, Job(world=world, steps=1, situation="stuck", tp=0), hosts=2)
    entered = 0

    def count(frame, event, _argument):
        nonlocal entered
        entered += event == "call" and frame.f_code is Decoder.record.__code__

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        read_job(folder)
    finally:
        sys.setprofile(before)
    return entered


@pytest.mark.full
def test_cost_grows_with_the_ranks_and_not_with_their_pairs(tmp_path):
    assert records_read(tmp_path / "many", 192) < 3.3 * records_read(tmp_path / "few", 64)


# The flight recorder tells what a rank waits for on the device: entries of torch 2.6, 2.13 and 2.15.


SITE = Frame(file="train.py", line=7, function="main", user=True)
GROUPS = (
    GroupState(name="0", ranks=(0, 1, 2, 3), backend="nccl", enqueued=9),
    GroupState(name="1", ranks=(1, 3), backend="nccl", enqueued=2),
)
WALL = 1_795_000_000_000_000_000
"""Where CLOCK_REALTIME is when CLOCK_MONOTONIC is 0."""


def entry(seq, state="completed", *, name="nccl:all_reduce", group="0", **more):
    """Return an entry of ProcessGroupNCCL's own recorder in torch 2.6 or 2.13, by form: both builds need a GPU for it.

    The keys are those that FlightRecorder.cpp and FlightRecorderDetail.hpp write; Gloo's real entries have them too.
    """
    return {
        "record_id": seq, "pg_id": 0, "process_group": [group, "default_pg"], "collective_seq_id": seq,
        "p2p_seq_id": 0, "op_id": seq, "profiling_name": name, "time_created_ns": WALL + seq, "input_sizes": [[68]],
        "input_dtypes": ["Float"], "output_sizes": [[68]], "output_dtypes": ["Float"], "state": state,
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": state == "completed",
        "timeout_ms": 600000, "is_p2p": False, **more,
    }  # fmt: skip


def p2p(number, name, state="scheduled", **more):
    return entry(
        4, state, name=f"nccl:{name}", is_p2p=True, p2p_seq_id=number, time_created_ns=WALL + 10 + number, **more
    )


def call(seq, op="all_reduce", **more):
    fields: dict[str, Any] = {"seq": seq, "peer": None, "redop": "SUM", "started_ns": seq, "ended_ns": seq + 1, **more}
    return Call(
        index=seq, op=op, api=op, group="0", dtype="torch.float32", shape=(4,), tensors=1, site=SITE, is_async=False,
        failed=False, thread_is_main=True, **fields,
    )  # fmt: skip


def pending(entries, *calls, timed=False):
    """Return what a reader finds in a rank's answer, in which the rank itself has chosen the entries."""
    answer = {"flight_recorder": {"wall_ns": WALL + 5, "at": 5, "timed": int(timed), "entries": chosen(entries)}}
    return pending_on_device(read_flight(answer), pack_calls(calls), GROUPS)


TIMED = [entry(seq, duration_ms=0.5) for seq in (1, 2)]
PARTS = [p2p(1, "send 1->2"), p2p(1, "recv 1<-0")]
RECEIVES = (call(6, "isend", peer=0), call(7, "irecv", peer=2), call(8, "irecv", peer=0), call(30, "irecv", peer=0))
test_rows = table("pending", globals())


@CASES
def answers_of_an_earlier_recorder_and_durations_of_what_torch_timed():
    kept = ("process_group", "collective_seq_id", "profiling_name", "state", "retired", "is_p2p")
    old = [{name: value for name, value in entry(2, "started").items() if name in kept}]
    assert read_flight({}) == Recorded()
    entries = [
        entry(1, duration_ms=2.5),
        entry(2),
        entry(3, "started"),
        p2p(1, "send 1->0", "completed", duration_ms=1.0),
    ]
    answer = {"flight_recorder": {"wall_ns": 1, "at": 1, "timed": 1, "entries": entries}}
    pending = pending_on_device(read_flight({"flight_recorder": old}), pack_calls((call(2),)), GROUPS)
    return {"earlier": pending, "durations": device_times(read_flight(answer))}
