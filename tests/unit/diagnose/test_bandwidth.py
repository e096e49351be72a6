"""From a bench to its report and exit status."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.collect.gpus import read_gpu_facts
from ddpdoctor.collect.launch import read_process
from ddpdoctor.collect.system import COLLECTORS, SECTIONS_FOR_BENCH, ReadingPlan, read_node
from ddpdoctor.diagnose.bandwidth import (
    CHECKS,
    BenchReportOptions,
    build_report,
    check_ranks,
    describe_rank,
    exit_status,
    find_reasons,
    read_baseline,
    reason_rules,
    stop_findings,
)
from ddpdoctor.diagnose.machines import sections_of
from ddpdoctor.model.bandwidth import (
    Advice,
    Bench,
    BenchSettings,
    Comparison,
    Curve,
    Ending,
    Measurement,
    Member,
    Position,
    Stop,
    Wrong,
)
from ddpdoctor.model.codec import decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.node import Fleet, Limits
from ddpdoctor.model.reading import Unread
from ddpdoctor.report.formats import parse_report, render_json
from ddpdoctor.rules.bandwidth.curves import Baseline
from tests.golden import outline, words
from tests.machines import load_machine, shared_machine
from tests.nvml import load_nvml
from tests.rules.bandwidth.build import GIB, H200, MIB, bench, load, log, member, members, row, sweep, upto
from tests.rules.bandwidth.build import bench_of as bench_made

FULL = sweep(upto(H200, GIB))
SLOW = sweep({size: gb_s / 2 for size, gb_s in upto(H200, GIB).items()})
NOISY = sweep({MIB: 1.0, 2 * MIB: 1.0}, noise=0.2)
WRONG = Wrong(
    rank=3, host="node0", collective=FULL[0].collective, dtype="float32", redop="sum", in_place=False, size_bytes=MIB,
    index=5, expected=6.0, found=7.0, count=1,
)  # fmt: skip


def cpus(rows=(), **changes):
    return bench(rows, device="cpu", name="AMD EPYC", **changes)


def position(rank, **changes):
    given = {"phase": "measure", "what": "all_reduce float32 1 MiB", "op": "all_reduce", "inside": True, **changes}
    return Position(rank=rank, group=(0, 1), calls=7, stale_s=70.0, **given)


def stopped_bench(made, ending, *positions, **more):
    return replace(made, stop=Stop(ending=ending, phase="measure", positions=positions, **more))


def baseline_of(made):
    return Baseline(name="m.json", results=made.results, members=made.members, settings=made.settings)


FOUR_RANKS = baseline_of(cpus(sweep({MIB: 1.0}, ranks=4), ranks=4))
SAVED = baseline_of(cpus(sweep({MIB: 1.0, 2 * MIB: 2.0})))
NOW = cpus([row(MIB, 1.0), row(2 * MIB, 1.0)])
EXPECTED = {"expect_gb_s": 400.0}


def report_of(text):
    """Return what the report of a bench says with these options."""
    made, asked = eval(text)
    report = build_report(made, BenchReportOptions(**asked))
    assert report.started_at <= report.ended_at
    return {
        "status": {level: exit_status(report, level) for level in (*Severity, None)}, "job": report.job,
        "findings": [f"{one.code} {one.kind}: {one.summary}" for one in report.findings],
        "verdict": report.verdict and [report.verdict.code, report.verdict.ranks, report.verdict.hosts],
        "checks": [
            f"{one.group} {one.code} {one.id} {one.outcome.value}: {one.seen}{one.reason}" for one in report.checks
        ],
        "ranks": [[one.rank, one.host, one.state, one.gpu, one.stack] for one in report.ranks],
        "data": [report.data["hosts"], len(report.data["results"]), report.data["advice"] is None],
        "command": report.command,
    }  # fmt: skip


def test_the_report_holds_all_that_was_measured_and_what_follows_and_comes_back_from_json():
    made = replace(bench(FULL, wrong=(WRONG,)), notes=("warm",))
    baseline = Baseline(name="monday.json", results=FULL, members=made.members, settings=made.settings)

    report = build_report(made, BenchReportOptions(baseline=baseline, fail_below=0.9, model_size=350_000_000))
    data = parse_report(render_json(report)).data

    assert data["verb"] == "allreduce-bench"
    assert (data["world_size"], data["hosts"], data["notes"]) == (8, ["node0"], ["warm"])
    assert tuple(decode(Measurement, one) for one in data["results"]) == FULL
    assert tuple(decode(Member, one) for one in data["members"]) == made.members
    assert [decode(Wrong, one) for one in data["wrong"]] == [WRONG]
    assert [decode(Curve, one).plateau_from_bytes for one in data["curves"]] == [256 * MIB]
    assert len(decode(Comparison, data["comparison"]).changes) == len(FULL)
    assert decode(Advice, data["advice"]).model_bytes == 1_400_000_000
    empty = {name for name, value in data.items() if value in ([], None)}
    assert empty == {"arrivals", "pairs", "nodes", "left_out", "loads", "nccl_logs", "reasons", "stop"}


def test_a_saved_run_is_read_as_a_baseline():
    saved = parse_report(render_json(build_report(cpus(SAVED.results), BenchReportOptions())))
    assert read_baseline(saved, "m.json") == SAVED


def damaged_baseline(spoil):
    """Read a saved run after something was done to its data."""
    plain = json.loads(render_json(build_report(cpus(sweep({MIB: 1.0})), BenchReportOptions())))
    eval(spoil, {"data": plain["data"]})
    return read_baseline(parse_report(json.dumps(plain)), "monday.json")


def test_a_baseline_of_another_number_of_ranks_is_wrong_use():
    baseline = Baseline(name="m.json", results=FULL, members=members(8), settings=bench().settings)

    check_ranks(baseline, 8)
    with pytest.raises(UserError, match=r"--compare m\.json is a run of 8 ranks, and this one has 2"):
        check_ranks(baseline, 2)


# Reasons for a low bandwidth on recorded machines: healthy ones give none, and every fault that bears on it
# one.


WITH_GPUS = frozenset({"nvlink8", "roce8", "workstation2"})
PLAN = ReadingPlan(sections=SECTIONS_FOR_BENCH, use_torch=False)


@cache
def read(machine, states):
    """Return the machine as the bench reads it, without GPUs."""
    system = shared_machine(machine, *states)
    return system, read_node(system, PLAN, (read_process(system, rank=0, local_rank=0),))


@cache
def gpus_of(machine, states):
    *_, gpus = read_gpu_facts(load_nvml(machine, *states), read(machine, ())[0])
    return gpus


def node_of(machine, *, host="host0", ranks=range(8), states=(), nvml=(), **variables):
    """Return a node on which these ranks run with these variables, each with all processors."""
    node = read(machine, tuple(states))[1]
    if machine in WITH_GPUS:
        node = replace(node, gpus=gpus_of(machine, tuple(nvml)))
    processes = tuple(
        replace(node.first, rank=rank, local_rank=rank - ranks[0], pid=100 + rank, variables=variables)
        for rank in ranks
    )
    return replace(node, host=host, processes=processes)


def bench_of(*nodes, backend="nccl", logs=(), **settings):
    seen = bench_made(backend=backend, logs=logs, **settings)
    return replace(seen, members=tuple(member(rank, node.host) for node in nodes for rank in node.ranks))


def reasons(*nodes, **asked):
    return find_reasons(bench_of(*nodes, **asked), Fleet(nodes=nodes))


def sources(*nodes, **asked):
    return [reason.source for reason in reasons(*nodes, **asked)]


def pair(machine, **state):
    """Return two hosts, of which the first is in a state."""
    return node_of(machine, **state), node_of(machine, host="host1", ranks=range(8, 16))


def logs(world, **ways):
    return [log(rank, nvls=True, P2P_CUMEM=48, **ways) for rank in range(world)]


def crowded():
    """Return a machine on one of whose processors all ranks and others run."""
    node = node_of("container-nogpu", ranks=range(2))
    return replace(node, processes=tuple(replace(one, cpus=(0,)) for one in node.processes), load=load({0: 0.9}))


def reasons_of(row):
    """Evaluate a row. What a collective does not feel is no reason; nor are ways between hosts for ranks of one."""
    return eval(row)


# What is read


def test_the_bench_reads_what_its_reasons_need_and_starts_no_child_that_imports_torch():
    needed = sections_of(reason_rules()) - {"torch", "gpu_trial"}
    assert needed <= SECTIONS_FOR_BENCH <= COLLECTORS.keys()
    assert not SECTIONS_FOR_BENCH & {"torch", "gpu_trial", "clock", "kernel_log", "stuck_processes"}
    assert {rule.kind for rule in reason_rules()} == CHECKS.keys()


def test_what_is_read_by_itself_comes_last(tmp_path):
    (tmp_path / "proc").mkdir()
    system = load_machine("container-nogpu", tmp_path / "root")
    node = read_node(system, PLAN, (read_process(system),))

    assert isinstance(node.limits, Limits)
    assert isinstance(node.load, Unread)
    assert node.load.reason == "this system does not report how busy its processors are"


# From where the ranks of a bench stood to who is to blame.


LIMIT_S = 60.0
TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py:3000 all_reduce"
OURS = f"{Path(ddpdoctor.__file__).parent}/probes/bandwidth/collectives.py:49 <lambda>"
PLUGIN = "/home/me/plugin.py:12 all_reduce"
EVERYBODY = (0, 1, 2)


def reached(rank, *, group=EVERYBODY, calls=7, op="all_reduce", inside=True, stack=(OURS, TORCH), **more):
    fields = {"phase": "measure", "what": "all_reduce float32 1 MiB", "stale_s": LIMIT_S + 1, **more}
    return Position(rank=rank, group=group, calls=calls, op=op, inside=inside, stack=stack, **fields)


def between(rank, calls=6, **more):
    """A rank that is between two calls."""
    return reached(rank, calls=calls, inside=False, stack=(OURS,), **more)


def connecting(rank, **more):
    return reached(rank, phase="connect", what="", op="init_process_group", calls=1, **more)


def starting(rank, **more):
    fields = {"phase": "start", "what": "", "op": "", "group": (), "calls": 0, **more}
    return reached(rank, inside=False, stack=(PLUGIN,), **fields)


def in_pair(rank, *pair, calls=3, **more):
    return reached(rank, group=pair, calls=calls, phase="pairs", what="all_reduce float32 8 MiB", **more)


def stopped(*positions, ending=Ending.HUNG, hosts=("node0",) * 3, signal=None, backend="gloo"):
    members = tuple(member(rank, host) for rank, host in enumerate(hosts))
    phase = next((one.phase for one in positions), "measure")
    stop = Stop(ending=ending, phase=phase, positions=positions, signal=signal)
    return Bench(settings=BenchSettings(hang_timeout_s=LIMIT_S, backend=backend), members=members, stop=stop)


IN_RING = (reached(0), reached(1), reached(2))
WAITS_IN_PYTHON = (OURS, PLUGIN, "/usr/lib/python3.12/threading.py:359 wait")
PEER = "RuntimeError: Connection closed by peer [127.0.0.1]:5549"
FOUR = tuple(in_pair(rank, rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(4))
BY_CTRL_C = {"ending": Ending.INTERRUPTED, "signal": "SIGINT"}


def blamed_for_the_end(row):
    """Return the one finding, of which every part is known; a bench that ended well, or by its user, has none."""
    shown = outline(stop_findings(eval(row))).replace(str(Path(ddpdoctor.__file__).parent), "ddpdoctor")
    assert "not known" not in shown
    return shown


test_words = words(
    __name__, reasons=reasons_of, damaged_baseline=damaged_baseline, report=report_of, blame=blamed_for_the_end,
    describe_rank=lambda row: describe_rank(1, Stop(ending=Ending.HUNG, phase="measure", positions=(eval(row),))),
)  # fmt: skip
