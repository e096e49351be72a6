"""What is written of calls, groups, kernels and errors is read back, and is bounded."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from ddpdoctor.recorder import calls, fingerprinting, gradients, groups, schedule, surroundings
from ddpdoctor.recorder.schedule import ALLOWANCE_S, LEAST, SHARE, AutoDistance, Wishes, next_due
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.step_clock import clock
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_layout import is_sampled, parts_of
from ddpdoctor.recorder.storage.ring_reading import parse_group_json, read_ring_file
from ddpdoctor.recorder.storage.ring_writing import Ring, to_json
from ddpdoctor.rules.progress.recording import losses_of
from tests.golden import words
from tests.preloaded import preloaded
from tests.scenarios.harmless.alone import RECORDER, make_folder, read_rings, run_recorded

# What the recorder keeps is bounded, whatever a script does for however long; what matters always finds room.


def test_a_process_that_calls_exec_takes_its_ring_along(tmp_path):
    first = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=1, start_ticks=1)
    first.note({"k": "before"})
    inode = Path(first.path).stat().st_ino
    second = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=1, start_ticks=1)
    assert (Path(second.path).stat().st_ino, read_ring_file(second.path).notes) == (inode, [])
    third = Ring(str(tmp_path), ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE, pid=1, start_ticks=1)
    assert Path(third.path).stat().st_ino != inode


@pytest.mark.usefixtures("ring")
def test_parameters_that_came_after_an_optimizer_are_forgotten_with_their_model(monkeypatch):
    monkeypatch.setattr(torch.nn.modules.module, "register_module_parameter_registration_hook", lambda _hook: None)
    monkeypatch.setattr(fingerprinting, "_made", 0)
    monkeypatch.setattr(fingerprinting, "_numbers", weakref.WeakKeyDictionary())
    early, late = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    first, second = torch.optim.SGD([early]), torch.optim.SGD([late])
    fingerprinting.made(first)
    fingerprinting._registered(None, "late", late)
    fingerprinting.made(second)
    pairs = [(late, first), (late, second), (early, first)]
    assert [fingerprinting.is_later_than(*pair) for pair in pairs] == [True, False, False]
    pairs.clear()
    del late, second
    assert len(fingerprinting._came_after) == 0


# Which functions of torch.distributed are recorded: all that talk to other ranks, each call once.


MADE_OF_OTHERS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "new_subgroups", "new_subgroups_by_enumeration",
}  # fmt: skip
"""They make calls that are recorded."""
PHASES = {"init_process_group", "new_group", "destroy_process_group"}
"""Recorded by ``training``."""
UNRECORDED = {"split_group", "shrink_group"}
"""With NCCL only; where a rank waits in one, its stack tells."""
ALONE = {
    "get_backend", "get_backend_config", "get_backend_impl", "get_default_backend_for_device", "get_global_rank",
    "get_group_rank", "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank", "get_world_size",
    "is_backend_available", "is_gloo_available", "is_initialized", "is_mpi_available", "is_nccl_available",
    "is_torchelastic_launched", "is_ucc_available", "is_xccl_available", "record_comm", "set_timeout",
    "supports_complex",
}  # fmt: skip
"""They talk to nobody."""
JOB = """
import json, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
one, two, made = torch.ones(2), torch.ones(4), []
for name, given in {
    "all_gather_into_tensor": (two, one), "all_gather_single": (two, one), "_all_gather_base": (two, one),
    "reduce_scatter_tensor": (one, two), "reduce_scatter_single": (one, two), "_reduce_scatter_base": (one, two),
    "gather_into_tensor": (one, two), "gather_single": (one, two), "all_to_all_single": (two, two),
    "all_gather": ([one, one], one), "all_reduce": (one,), "barrier": (),
}.items():
    if not hasattr(dist, name):
        continue
    made.append(name)
    try:
        getattr(dist, name)(*given)
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
print(json.dumps(made))
"""


def test_every_function_that_talks_to_other_ranks_is_known():
    known = {
        *calls.COLLECTIVES, *calls.RENAMED, *calls.POINT_TO_POINT, *MADE_OF_OTHERS, *PHASES, *UNRECORDED, *ALONE,
    }  # fmt: skip
    public = {
        name
        for name, value in vars(c10d).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == c10d.__name__
    }
    assert not public - known, "new in this torch: record it (recorder/calls.py), or say here why not"


def test_what_a_call_is_given_and_both_helpers_that_pickle_are_found_where_they_are_expected():
    expected = {name: calls.COLLECTIVES[op] for name, op in calls.RENAMED.items()}
    for name, tensor in {**calls.COLLECTIVES, **calls.POINT_TO_POINT, **expected}.items():
        arguments = inspect.signature(getattr(c10d, name)).parameters if hasattr(c10d, name) else {}
        assert not arguments or tensor is None or tensor in arguments, name
    assert all(callable(getattr(c10d, name)) for name in calls.PICKLING)


def test_a_call_is_recorded_once_whatever_it_is_called(tmp_path):
    (tmp_path / "calls.py").write_text(JOB)
    with preloaded():
        done = run_recorded(make_folder(tmp_path / "run"), str(tmp_path / "calls.py"))
    assert done.status == 0, done.stderr
    (ring,) = read_rings(tmp_path / "run")
    old = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}
    expected = Counter((old | calls.RENAMED).get(name, name) for name in json.loads(done.stdout))
    assert Counter(slot.op for slot in ring.slots if slot.op in expected) == expected
    assert not [note for note in ring.notes if note["k"] == "defect"]


# Where torch times its kernels, a rank notes the times before it ends its groups, and asks no device elsewhere.


NOTE = """
from ddpdoctor.recorder.state import here
here.ring = types.SimpleNamespace(note=lambda entry, **more: print(json.dumps(entry)))
groups.note_device_times()
"""
ENTRY = {
    "process_group": ["0", ""], "collective_seq_id": 3, "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce",
    "state": "completed", "retired": True, "time_created_ns": 1, "is_p2p": False, "duration_ms": 2.5,
}  # fmt: skip
QUEUED = {**ENTRY, "collective_seq_id": 4, "state": "scheduled", "retired": False}


def test_times_are_noted_where_torch_has_them():
    build = {"version": "2.13.0", "nccl": True, "docs": {}, "dumps": {"own": {"entries": [ENTRY, QUEUED]}}}
    for timing, rows in (("1", [["0", 3, "all_reduce", 2.5]]), ("0", None)):
        env = {**os.environ, "TORCH_NCCL_ENABLE_TIMING": timing}
        command = [sys.executable, "-c", PROGRAM.rpartition("print(")[0] + NOTE]
        done = subprocess.run(command, input=json.dumps(build), capture_output=True, text=True, check=True, env=env)
        assert [json.loads(text)["rows"] for text in done.stdout.splitlines()] == ([rows] if rows else [])


# What is written without the module json is read back by it.


def test_what_is_written_without_json_is_read_back_by_it():
    values = [
        None, True, False, 0, -5, 2**63, 1.5, -1e-300, "", 'a "quoted" \\ line\n', "tr\u00e4ger \U0001f3d6", "\udc80",
        [], [1, [None, "x"]], {}, {"k": "note", "frames": [{"f": "a.py", "l": 3, "u": True}]},
    ]  # fmt: skip
    assert [json.loads(to_json(value)) for value in values] == values
    assert [to_json(value) for value in values] == [json.dumps(value, separators=(",", ":")) for value in values]
    assert json.loads(to_json({1: (1, 2), "inf": float("inf"), "nan": float("nan")})) == {
        "1": [1, 2], "inf": None, "nan": None,
    }  # fmt: skip
    with pytest.raises(TypeError, match="set"):
        to_json({"x": {1}})


# The recorder times Python's collections, also the last one, in which no code of the script runs any more.


SCRIPT = """
import _thread
from ddpdoctor.recorder import surroundings
from ddpdoctor.recorder.state import here

here.main_thread = _thread.get_ident()
surroundings.clock.number = 1
surroundings.watch_collections()
objects = [[] for _ in range(100_000)]
"""


def test_the_collection_at_exit_prints_nothing():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""


# Under ``wrap --speed`` gradients are checked in the steps in which replicas are compared, else in all.


def test_with_the_option_the_steps_of_comparisons_are(monkeypatch):
    monkeypatch.setenv("DDPDOCTOR_CHECK_EVERY", "50")
    monkeypatch.setattr(schedule, "fixed", lambda: 50)
    for is_speed, steps in ((False, [*range(1, 151)]), (True, [1, 2, 4, 8, 16, 32, 50, 100, 150])):
        monkeypatch.setattr(gradients._kept, "is_speed", is_speed)
        left_out = {step: gradients._is_left_out(SimpleNamespace(reductions=step - 1)) for step in range(1, 151)}
        assert [step for step, out in left_out.items() if not out] == steps


# Long lists of members are parsed once and shared; all else is what plain JSON says.


WORLD = list(range(400))


def entry(ranks, **more):
    return json.dumps({"groups": [{"name": "0", "ranks": ranks, "backend": "gloo", "enqueued": 7}], **more}).encode()


def ranks_in(data):
    return parse_group_json(data)["groups"][0]["ranks"]


def test_equal_lists_of_members_are_one_tuple():
    first, second = ranks_in(entry(WORLD, pid=1)), ranks_in(entry(WORLD, pid=2))
    assert first == tuple(WORLD)
    assert first is second


STAY = [
    *map(entry, ([0, 1, 2], [*WORLD, "1"], [*WORLD, 1.5], [*WORLD, -1], [*WORLD, 2**70], [[0], *WORLD], [], None, -1)),
    b"[%s, %s]" % (entry(WORLD), entry(WORLD[::2])),
    json.dumps({"handled": {"ranks": WORLD, "text": '"ranks": [1], "backend":'}, "groups": 3}).encode(),
    # A number in place of members refers to no list beyond the last.
    json.dumps({"groups": [{"ranks": WORLD, "backend": "gloo"}, {"ranks": -2}, {"ranks": 1}, "text"]}).encode(),
]


@pytest.mark.parametrize("data", STAY)
def test_all_else_and_the_order_of_lists_stay_as_they_are(data):
    assert json.loads(json.dumps(parse_group_json(data))) == json.loads(data)


@pytest.mark.parametrize("data", [b"", b'{"groups": [{"ranks": [' + b"1, " * 400, b"[" + b"1," * 2**20 + b"1]"])
def test_what_is_cut_off_or_too_large_is_refused(data):
    with pytest.raises(ValueError, match=r"Expecting|more than"):
        parse_group_json(data)


# In a group of Gloo and NCCL each backend counts its own calls.


class Counts:
    number = 0

    def _get_sequence_number_for_group(self):
        return self.number


class Group(Counts):
    """torch shows the counter of NCCL, and that of Gloo where it is asked for it."""

    group_name, group_desc, bound_device_id = "0", "default_pg", None

    def __init__(self):
        self.gloo = Counts()

    def _get_backend(self, device):
        return self.gloo if str(device) == "cpu" else self


def numbers_in(config):
    """Return group and number of each call in a group of such backends, and the groups that the evidence tells of."""
    own = Group()

    def all_reduce(tensor, op=None, group=None, async_op=False):  # noqa: ARG001, FBT002 - as torch's
        (own if tensor.device.type == "cuda" or config == "nccl" else own.gloo).number += 1

    def barrier(group=None, async_op=False, device_ids=None):  # noqa: ARG001, FBT002 - as torch's
        (own if config == "nccl" else own.gloo).number += 1

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        ring = Ring(folder, ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=1, start_ticks=1)
        patched.setattr(here, "ring", ring)
        world = {"pg_backend_config": {own: config}, "pg_group_ranks": {own: {0: 0, 1: 1}}, "pg_map": {}}
        patched.setattr(groups, "c10d", SimpleNamespace(_world=SimpleNamespace(default_pg=own, **world)))
        reduce = calls.wrap("all_reduce", all_reduce, "tensor")
        for device in ("cuda", "cpu", "cpu", "", "cuda"):
            tensor = SimpleNamespace(dtype="torch.float32", shape=(4,), device=SimpleNamespace(type=device))
            reduce(tensor) if device else calls.wrap("barrier", barrier, None)()
        told = [(one["name"], one["enqueued"], one["ranks"]) for one in groups.groups_now()]
        return [f"{slot.group} {slot.seq}" for slot in read_ring_file(ring.path).slots], told


# Which calls of all_reduce count as reductions of the optimizer's gradients.


SHAPES = (4, 4), (4,), (2, 4)


def noted(monkeypatch, given, reductions=()):
    """Return what is noted of a step in which all_reduce gets ``given(parameters)``."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    notes = list[Any]()
    monkeypatch.setattr(here, "ring", SimpleNamespace(note=lambda entry, **_: notes.append(entry)))
    monkeypatch.setattr(surroundings, "_reduced_at", None)
    monkeypatch.setattr(surroundings.clock, "step", SimpleNamespace(reductions=dict(reductions)))
    monkeypatch.setattr(surroundings.frames, "describe_user", lambda frame: frame)
    for tensor in given(parameters):
        surroundings.hand_made_reduction(tensor, "line 9")
    surroundings.hand_made_step(SimpleNamespace(param_groups=[{"params": parameters}]))
    return [(one["gradients"], one["copied"], one["frame"]) for one in notes]


def copies(parameters):
    return [p.grad.clone() for p in parameters]


NO_REDUCTIONS = [
    lambda _: [torch.zeros(()) for _ in range(40)],  # metrics
    lambda parameters: [p.data for p in parameters],  # weights
    lambda parameters: [torch.cat([p.grad.flatten() for p in parameters])],
    lambda parameters: copies(parameters)[1:],
]


def test_gradients_and_their_copies_are_noted_and_other_tensors_or_copies_beside_ddp_are_not(monkeypatch):
    assert noted(monkeypatch, lambda parameters: [p.grad for p in parameters]) == [(3, False, "line 9")]
    assert noted(monkeypatch, copies) == [(3, True, "line 9")]
    assert [noted(monkeypatch, given) for given in NO_REDUCTIONS] == [[]] * len(NO_REDUCTIONS)
    assert not noted(monkeypatch, copies, reductions={1: 1})


# Which steps of the whole run a ring keeps, and what they add up to.


INSIDE = (0,) * len(ring_layout.STEP_INSIDE)


def record(folder, walls_us):
    ring = Ring(str(folder), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)
    for number, wall in enumerate(walls_us, start=1):
        ring.step(number, number, 0, ring_layout.STEP_OPTIMIZER, [wall, 0, 0, 0], [0] * 4, INSIDE)
    return ring_reading.read_ring_file(ring.path)


def test_a_short_run_is_kept_whole_and_of_a_long_one_an_even_sample_and_the_longest_steps(tmp_path):
    content = record(tmp_path, [2**32 - 1] * 3)
    assert dict(zip(ring_layout.PARTS, content.totals, strict=True))["wall"][0] == 3 * (2**32 - 1), "beyond 32 bits"
    content = record(tmp_path, [1000] * 200)
    assert (list(content.kept[0]), content.cells["sample_bits"]) == (list(range(1, 201)), 0)
    content = record(tmp_path, [50_000 if number % 500 == 499 else 1000 for number in range(1, 20_001)])
    kept, bits = set(content.kept[0]), content.cells["sample_bits"]
    assert {number for number in range(1, 20_001) if is_sampled(number, bits)} <= kept
    assert set(range(499, 20_000, 500)) <= kept
    assert len(kept) <= ring_layout.SAMPLED_STEPS + ring_layout.LONGEST_STEPS


def test_a_sample_has_its_share_of_steps_that_come_back_regularly():
    sampled = [number for number in range(1, 64_001) if is_sampled(number, 6)]
    for period in (2, 3, 4, 8, 10, 64, 100):
        for offset in (0, 1):
            found = sum(number % period == offset for number in sampled)
            assert abs(found - len(sampled) / period) <= max(3, 0.2 * len(sampled) / period), (period, offset)


def test_totals_are_those_of_the_whole_run_and_begin_anew_with_the_numbers(ring):
    for number in (1, 2, 3, 1, 2):
        ring.step(number, number, 0, ring_layout.STEP_OPTIMIZER, [3000, 1000, 0, 0], [0] * 4, INSIDE)
    content = ring_reading.read_ring_file(ring.path)
    totals = dict(zip(ring_layout.PARTS, content.totals, strict=True))
    assert (totals["host"][0], totals["forward"][0], totals["wall"][0]) == (6000, 2000, 8000)
    assert totals["host"][1:][(3000).bit_length()] == 2
    assert sum(totals["data"][1:]) == 2
    assert list(content.kept[0]) == [1, 2]


def test_the_parts_of_a_step_add_up_to_it():
    inside = dict.fromkeys(ring_layout.STEP_INSIDE, 0)
    inside.update(data_us=10, buffers_us=5, exposed_us=40, optimizer_us=7, own_us=3)
    waits = [20, 5 + 1, 0, 40]
    for flags in (0, ring_layout.STEP_WAIT_UNKNOWN):
        parts = dict(
            zip(ring_layout.PARTS, parts_of([100, 50, 8, 90], waits, tuple(inside.values()), flags), strict=True)
        )
        assert parts["calls"] == 21
        assert parts["host"] == 100 - 20 - 10 - 7
        assert sum(value for part, value in parts.items() if part not in ("gc", "wall")) == parts["wall"] == 251
        assert parts["unsplit" if flags else "backward"] == 50


def library(name):
    """Return a function that calls what it is given, in a file of torch.distributed's."""
    names: dict[str, Any] = {}
    path = "/x/site-packages/torch/distributed/made.py"
    exec(compile(f"def {name}(f, *args): f(*args)", path, "exec"), names)
    return names[name]


# What collectives of objects do in Python counts as a part of the call, where all ranks wait for it.


PICKLING_S = 0.01


def pickle(_):
    time.sleep(PICKLING_S)


@pytest.mark.parametrize(
    ("call", "pickled", "thread"),
    [
        ("all_gather_object", 1, 0),
        ("broadcast_object_list", 2, 0),
        ("gather_object", 0, 0),
        ("all_gather_object", 0, 1),
    ],
)
def test_pickling_counts_where_all_ranks_wait_for_it_in_the_main_thread(call, pickled, thread, monkeypatch):
    monkeypatch.setattr(clock, "waits", [0, 0, 0, 0])
    monkeypatch.setattr(clock, "waiting", False)
    monkeypatch.setattr(here, "main_thread", here.main_thread + thread)
    helper = calls.count_pickling(pickle)
    for _ in range(max(pickled, 1)):
        library(call)(helper, "x")
    assert clock.waits[clock.phase] / 1e9 >= PICKLING_S * pickled
    assert bool(clock.waits[clock.phase]) == bool(pickled)


# What calls share is worked out once, and for each line, shape, group and caller by itself.


def call(ring, op="all_reduce", shape=(), redop="", peer=ring_layout.NO_PEER):
    kind = calls.kind_of(ring, sys._getframe(1), op, 0, "float32", shape, 1, redop, peer, ring_layout.FLAG_MAIN)
    ring.end(ring.begin(kind.packed))


def slots(ring):
    return list(ring_reading.read_ring_file(ring.path).slots)


def test_a_call_that_comes_again_is_worked_out_once(ring):
    for _ in range(3):
        call(ring, shape=(4,))
    assert len(ring.kinds) == 1
    assert [slot.shape for slot in slots(ring)] == [(4,)] * 3


def test_what_a_line_is_given_may_change_from_call_to_call_and_another_line_is_another(ring):
    given = [("all_reduce", (4,), "SUM", -1), ("all_reduce", (5,), "SUM", -1), ("all_reduce", (5,), "MAX", -1),
             ("send", (5,), "", 1), ("send", (5,), "", 2), ("all_reduce", (4,), "SUM", -1)]  # fmt: skip
    for op, shape, redop, peer in given:
        call(ring, op, shape, redop, peer)
    call(ring), call(ring, "barrier")
    call(ring)
    assert [(slot.op, slot.shape, slot.redop, slot.peer) for slot in slots(ring)][:6] == given
    lines = [slot.site["l"] for slot in slots(ring)]
    assert lines[:6] == lines[:1] * 6
    assert (lines[7:], [slot.op for slot in slots(ring)][6:8]) == ([lines[6], lines[6] + 1], ["all_reduce", "barrier"])


def test_a_call_that_torch_makes_stands_at_each_line_that_asked_for_it(ring):
    for name in ("all_gather_object", "broadcast_object_list"):
        for _ in range(2):
            library(name)(call, ring)
    gathered = library("all_gather_object")
    gathered(call, ring)
    gathered(call, ring)
    found = [(slot.api, slot.site["l"] if slot.site else 0) for slot in slots(ring)]
    first, (api, line) = found[0], found[-2]
    assert [name for name, _ in found[:4]] == ["all_gather_object"] * 2 + ["broadcast_object_list"] * 2
    assert {number for _, number in found[:4]} == {first[1]}
    assert (api, found[-1]) == ("all_gather_object", ("all_gather_object", line + 1))


def test_kinds_are_bounded(ring):
    for size in range(calls.MAX_KINDS + 10):
        call(ring, shape=(size,))
    assert len(ring.kinds) <= calls.MAX_KINDS
    assert slots(ring)[-1].shape == (calls.MAX_KINDS + 9,)


# Which steps are compared with ``--check-every auto``: a simulated job of two ranks with a clock of its own.


def train(path, *, steps, step_s, costs_s, slower_from=None):
    """Return the steps at which each rank compared, the time in all and what comparing took on the slowest rank."""
    ranks = [AutoDistance(Wishes(str(path), rank)) for rank in range(len(costs_s))]
    due = [[] for _ in ranks]
    now_s = spent_s = 0.0
    for number in range(1, steps + 1):
        now_s += step_s * (10 if slower_from and number >= slower_from else 1)
        for auto, found in zip(ranks, due, strict=True):
            auto.step(now_s)
            early = number <= LEAST and number & (number - 1) == 0
            if early or (number > LEAST and number >> auto.exponent > (number - 1) >> auto.exponent):
                auto.taken += 1
                found.append(number)
        if due[0][-1] == number:
            for auto, cost_s in zip(ranks, costs_s, strict=True):
                auto.spent_s += cost_s
            now_s, spent_s = now_s + max(costs_s), spent_s + max(costs_s)
    return due, now_s, spent_s


@pytest.mark.parametrize(
    ("step_s", "costs_s"),
    [
        (0.013, (0.045, 0.045)),
        (0.013, (0.010, 0.090)),  # one host's rank is slower: both follow it
        (0.035, (0.045, 0.030)),
        (0.5, (3.0, 2.9)),
        (0.05, (0.6, 0.6)),  # a comparison takes 12 steps
    ],
)
def test_comparing_takes_less_than_its_share_and_ranks_agree(tmp_path, step_s, costs_s):
    due, took_s, spent_s = train(tmp_path / "page", steps=20_000, step_s=step_s, costs_s=costs_s)
    assert due[0] == due[1]
    assert due[0][:6] == [1, 2, 4, 8, 16, 32]
    assert spent_s <= max(ALLOWANCE_S, 6 * max(costs_s), SHARE * took_s) + max(costs_s)
    assert spent_s + 2 * max(costs_s) >= 0.4 * SHARE * took_s  # and the budget is used
    assert max(due[0]) > 10_000  # comparing goes on


def test_what_costs_next_to_nothing_is_compared_at_most_every_32nd_step_and_slower_steps_allow_more(tmp_path):
    due, _, _ = train(tmp_path / "page", steps=3_000, step_s=0.1, costs_s=(0.001, 0.001))
    assert due[0] == [1, 2, 4, 8, 16, *range(32, 3_001, 32)]
    due, _, _ = train(tmp_path / "slower", steps=20_000, step_s=0.01, costs_s=(0.1, 0.1), slower_from=10_000)
    early, late = (sum(first <= step < first + 5_000 for step in due[0]) for first in (5_000, 15_000))
    assert late > 4 * early


DUE = {50: [1, 2, 4, 8, 16, 32, 50, 100], 4: [1, 2, 4, 8, 12], 3: [1, 2, 3, 6], 2: [1, 2, 4], 1: [1, 2, 3]}


def test_with_a_fixed_distance_powers_of_two_are_due_and_then_multiples():
    for every, due in DUE.items():
        assert [next_due(before, every) for before in [0, *due[:-1]]] == due


# The recorder reads every flight recorder that a build of torch has, and sets what the user has not.


DATA = Path(__file__).parents[2] / "data" / "flight-recorder"
PROGRAM = """
import json, os, sys, types
build = json.load(sys.stdin)
native = types.ModuleType("torch._C._distributed_c10d")

def text_of(dump):
    if dump is None:
        raise RuntimeError("no such recorder\\nsecond line")
    return json.dumps(dump).encode()

for name, dumps in build["dumps"].items():
    def one_for_all(includeCollectives=None, onlyActive=None, dump=dumps):
        return text_of(dump)
    def one_for_each(includeCollectives=None, onlyActive=None, backend="gloo", *, dumps=dumps):
        return text_of(dumps.get(backend, {}))
    function = one_for_each if name == "hooked" else one_for_all
    function.__doc__ = build["docs"].get(name)
    setattr(native, "_dump_nccl_trace_json" if name == "own" else "_dump_fr_trace_json", function)
    if name in ("hooked", "shared"):
        native.FlightRecorderHook = object
if build["nccl"]:
    native.ProcessGroupNCCL = object
torch = types.ModuleType("torch")
torch.__version__ = build["version"]
sys.modules.update({"torch": torch, "torch._C._distributed_c10d": native})
from ddpdoctor.recorder import groups
world = types.SimpleNamespace(default_pg=object(), pg_names={1: "0", 2: "1"})
groups.c10d = types.SimpleNamespace(_world=world)
groups.turn_on_flight_recorders()
if build.get("idle") is not None:
    torch._C = sys.modules["torch._C"] = types.ModuleType("torch._C")
    torch._C._cuda_hasPrimaryContext = lambda device: build["idle"][device] is not None
    torch.cuda = sys.modules["torch.cuda"] = types.ModuleType("torch.cuda")
    torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing = lambda: True, lambda: False
    torch.cuda.device_count = lambda: len(build["idle"])
    torch.cuda.default_stream = lambda device: types.SimpleNamespace(query=lambda: int(build["idle"][device]) > 0)
names = [name for name in os.environ if name.startswith(("TORCH_NCCL", "TORCH_FR"))]
print(json.dumps([groups.flight_entries_now(), {name: os.environ[name] for name in names}]))
"""
TAKES = "_dump_fr_trace_json(includeCollectives: bool | None = None, onlyActive: bool | None = None"
SIGNATURES = {
    "shared": f"{TAKES}) -> bytes\n\n\n    Arguments:\n        includeCollectives(bool): Include the backend: all.",
    "hooked": f"{TAKES}, backend: str = 'gloo') -> bytes",
}
"""Docstrings of torch 2.14.1 and 2.15. The hook came before the argument."""


def run(version, dumps, *, nccl=True, idle=None, **env):
    """Return the entries and the variables of a recorder that meets such a build of torch.

    ``idle`` has, for each device, whether its default stream is; None: this process does not use the device.
    """
    build = json.dumps({"version": version, "dumps": dumps, "nccl": nccl, "docs": SIGNATURES, "idle": idle})
    env = {"DDPDOCTOR_RUN": "/run/folder", "PYTHONPATH": str(RECORDER.parents[1]), **env}
    command = [sys.executable, "-S", "-c", PROGRAM]
    return json.loads(subprocess.run(command, input=build, env=env, capture_output=True, text=True, check=True).stdout)


def flight_entry(number, name="nccl:all_reduce", **more):
    return {
        "process_group": ["0", "default_pg"], "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False,
        "profiling_name": name, "state": "scheduled", "retired": False, "time_created_ns": number, **more,
    }  # fmt: skip


UNTOLD = {"retired": True, "name": "nccl2:all_reduce"}


def nccl2(*entries):
    return {"own": {}, "hooked": {"nccl2": {"entries": entries}}}


OWN, NEW = (json.loads((DATA / name).read_text()) for name in ("nccl-2.14.1.json", "nccl2-2.15.json"))
TWO, ONE = nccl2(flight_entry(1, **UNTOLD), flight_entry(2, **UNTOLD)), nccl2(flight_entry(1, **UNTOLD))
MANY = {"own": {"entries": [flight_entry(at) for at in range(1, 12)]}}
OF_OLD = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/trace_"}
OF_NEW = {"TORCH_FR_BUFFER_SIZE": "50", "TORCH_FR_DUMP_TEMP_FILE": "/mine/trace_"}


def read_of_build(row):
    """Return what is read of a build and set in it. Dumps are named by the process, of more digits than one."""
    answer, variables = eval(row)
    assert answer.pop("wall_ns") > answer.pop("at") > 0
    answer["entries"] = [f"{one['collective_seq_id']} {one['profiling_name']}" for one in answer["entries"]]
    return answer | {
        key: re.sub(r"evidence/(?!1-1\.)\d+-\d+", "evidence/PID", value) for key, value in variables.items()
    }


def lost_of(dumps):
    """Return which entries are read where some recorders fail, which takes no other with it, and what is told of it."""
    with TemporaryDirectory() as folder:
        answer, _ = run("2.15.0+cu132", eval(dumps), DDPDOCTOR_RUN=folder)
        (note,) = [path.read_text() for path in Path(folder).glob("lost-*")]
    assert note.startswith("\n")
    return [one["collective_seq_id"] for one in answer["entries"]], note.strip(), losses_of(note.strip())


test_words = words(__name__, build_of_torch=read_of_build, numbers_in=numbers_in, lost_of=lost_of)
