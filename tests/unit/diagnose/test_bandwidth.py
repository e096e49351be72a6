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
from ddpdoctor.model.findings import Check, JobStatus, Outcome, Severity
from ddpdoctor.model.node import Fleet, Limits
from ddpdoctor.model.reading import Unread
from ddpdoctor.report.formats import parse_report, render_json
from ddpdoctor.rules.bandwidth.curves import Baseline
from tests.machines import load_machine, shared_machine
from tests.nvml import load_nvml
from tests.rules.bandwidth.build import GIB, H200, MIB, bench, load, log, member, members, row, sweep, upto
from tests.rules.bandwidth.build import bench_of as bench_made

FULL = sweep(upto(H200, GIB))
SLOW = sweep({size: gb_s / 2 for size, gb_s in upto(H200, GIB).items()})
NOISY = sweep({MIB: 1.0, 2 * MIB: 1.0}, noise=0.2)
CODES = ["DD401", "DD402", "DD403", "DD404", "DD405", "DD406"]
WRONG = Wrong(
    rank=3, host="node0", collective=FULL[0].collective, dtype="float32", redop="sum", in_place=False, size_bytes=MIB,
    index=5, expected=6.0, found=7.0, count=1,
)  # fmt: skip


def cpus(rows=(), **changes):
    return bench(rows, device="cpu", name="AMD EPYC", **changes)


def position(rank, **changes):
    given = {"phase": "measure", "what": "all_reduce float32 1 MiB", "op": "all_reduce", "inside": True, **changes}
    return Position(rank=rank, group=(0, 1), calls=7, stale_s=70.0, **given)


def checks(report):
    return {check.code: check.outcome for check in report.checks}


def test_a_healthy_bench():
    report = build_report(bench(FULL), BenchReportOptions(command=("ddpdoctor", "allreduce-bench", "--api-key", "x")))

    assert (report.findings, report.verdict) == ((), None)
    assert [check.code for check in report.checks] == CODES
    assert all(check.group == "bandwidth" for check in report.checks)
    assert checks(report)["DD405"] is Outcome.PASSED
    assert report.job is not None
    assert (report.job.world_size, report.job.nnodes, report.job.status) == (8, 1, JobStatus.FINISHED)
    assert [(one.rank, one.host, one.state, one.gpu) for one in report.ranks][3] == (3, "node0", "finished", 3)
    assert report.command[-1] == "***"
    assert report.started_at <= report.ended_at
    assert exit_status(report, Severity.INFO) == 0


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


def test_nothing_measured_is_a_report_too():
    report = build_report(cpus(), BenchReportOptions())

    assert set(checks(report).values()) == {Outcome.SKIPPED}
    assert report.data["advice"] is None
    assert exit_status(report, Severity.INFO) == 0


@pytest.mark.parametrize(
    ("made", "wanted", "fail_on", "status"),
    [
        (bench(FULL), BenchReportOptions(), Severity.ERROR, 0),
        # The table warns.
        (bench(SLOW), BenchReportOptions(), Severity.ERROR, 0),
        (bench(SLOW), BenchReportOptions(), Severity.WARNING, 1),
        (bench(SLOW), BenchReportOptions(use_reference=False), Severity.WARNING, 0),
        (bench(SLOW), BenchReportOptions(expect_gb_s=400.0), Severity.ERROR, 1),
        (bench(SLOW), BenchReportOptions(expect_gb_s=400.0), None, 0),
        # What was demanded and cannot be determined
        (cpus(NOISY), BenchReportOptions(expect_gb_s=1.0), Severity.ERROR, 4),
        (cpus(NOISY), BenchReportOptions(expect_gb_s=1.0), None, 4),
        (cpus(NOISY), BenchReportOptions(expect_gb_s=1.0), Severity.INFO, 1),
        (cpus(NOISY), BenchReportOptions(), Severity.INFO, 0),
        (cpus(), BenchReportOptions(expect_gb_s=1.0), Severity.ERROR, 4),
        (bench(FULL, wrong=(WRONG,)), BenchReportOptions(), Severity.ERROR, 1),
    ],
)
def test_exit_status(made, wanted, fail_on, status):
    assert exit_status(build_report(made, wanted), fail_on) == status


def test_wrong_data_are_the_verdict_before_any_figure():
    report = build_report(bench(SLOW, wrong=(WRONG,)), BenchReportOptions(expect_gb_s=400.0))

    assert [finding.code for finding in report.findings] == ["DD401", "DD405"]
    assert report.verdict is not None
    assert (report.verdict.kind, report.verdict.ranks, report.verdict.hosts) == ("wrong-data", (3,), ("node0",))


def test_noise_is_never_the_verdict():
    report = build_report(cpus(NOISY), BenchReportOptions(expect_gb_s=1.0))

    assert [finding.kind for finding in report.findings] == ["too-noisy"]
    assert report.verdict is None


def test_against_a_saved_run():
    saved = parse_report(render_json(build_report(cpus(sweep({MIB: 1.0, 2 * MIB: 2.0})), BenchReportOptions())))
    baseline = read_baseline(saved, "monday.json")
    now = cpus([row(MIB, 1.0), row(2 * MIB, 1.0)])

    shown = build_report(now, BenchReportOptions(baseline=baseline))
    demanded = build_report(now, BenchReportOptions(baseline=baseline, fail_below=0.9))

    assert shown.findings == ()
    assert exit_status(shown, Severity.INFO) == 0
    assert [finding.kind for finding in demanded.findings] == ["below-reference"]
    assert "throughput of 2 MiB reaches 50%" in demanded.findings[0].summary
    assert exit_status(demanded, Severity.ERROR) == 1


def test_a_saved_run_of_another_number_of_ranks_is_inconclusive():
    four = cpus(sweep({MIB: 1.0}, ranks=4), ranks=4)
    baseline = Baseline(name="m.json", results=four.results, members=four.members, settings=four.settings)

    report = build_report(cpus(sweep({MIB: 1.0})), BenchReportOptions(baseline=baseline, fail_below=0.9))

    assert checks(report)["DD405"] is Outcome.INCONCLUSIVE
    assert exit_status(report, Severity.ERROR) == 4


def test_an_interrupted_bench_keeps_what_it_has():
    made = replace(bench(FULL[:5]), stop=Stop(ending=Ending.INTERRUPTED, phase="measure", signal="SIGINT"))

    report = build_report(made, BenchReportOptions(expect_gb_s=400.0))

    assert report.job is not None
    assert report.job.status is JobStatus.INTERRUPTED
    assert len(report.data["results"]) == 5
    assert report.data["stop"]["signal"] == "SIGINT"
    assert exit_status(report, Severity.ERROR) == 130


def test_where_each_rank_was_when_the_bench_stopped():
    positions = (
        position(0, states={"0": "S", "1": "T", "2": "", "3": "S"}),
        position(4, inside=False, stack=("bench.py:3 main",)),
        position(5, error="RuntimeError: no route to host", inside=False),
    )
    made = replace(cpus(ranks=6), stop=Stop(ending=Ending.HUNG, phase="measure", positions=positions))

    report = build_report(made, BenchReportOptions())

    assert [one.state for one in report.ranks] == [
        "in all_reduce",
        "stopped",
        "gone",
        "did not answer",
        "between calls, in phase measure",
        "raised RuntimeError: no route to host",
    ]
    assert report.ranks[4].stack == ("bench.py:3 main",)
    assert report.job is not None
    assert report.job.status is JobStatus.HUNG
    assert report.verdict is not None
    assert report.verdict.code.startswith("DD6")
    assert exit_status(report, Severity.ERROR) == 1


def test_a_bench_that_did_not_end_is_no_success_whatever_is_found():
    made = replace(bench(FULL), stop=Stop(ending=Ending.FAILED, phase="measure"))

    assert exit_status(build_report(made, BenchReportOptions()), None) == 4


def test_a_part_that_raises_is_a_crashed_check_and_the_rest_stays():
    # A row of which the count is nothing, as no bench measures it, but a damaged file may hold.
    made = cpus([replace(row(MIB, 1.0), count=0), row(2 * MIB, 1.0)])

    report = build_report(made, BenchReportOptions(model_size=1000))

    assert len(report.data["results"]) == 2
    assert [check.id for check in report.checks if check.outcome is Outcome.CRASHED] == ["advice"]
    assert "ZeroDivisionError" in next(check.reason for check in report.checks if check.id == "advice")
    assert exit_status(report, Severity.ERROR) == 3


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data.update(verb="check-env"), "is not a report of allreduce-bench"),
        (lambda data: data.update(results=[]), "has no measurements"),
        (lambda data: data.update(results="x"), "cannot be read: a list was expected"),
        (lambda data: data["results"][0].pop("p50_us"), "cannot be read: p50_us: it is missing"),
        (lambda data: data["results"][0].update(p50_us=0), "has an invalid time"),
        (lambda data: data["results"][0].update(p50_low_us="nan"), "has an invalid time"),
        (lambda data: data.pop("members"), "cannot be read"),
    ],
)
def test_a_damaged_baseline_says_what_is_wrong_with_it(spoil, says):
    plain = json.loads(render_json(build_report(cpus(sweep({MIB: 1.0})), BenchReportOptions())))
    spoil(plain["data"])

    with pytest.raises(UserError) as raised:
        read_baseline(parse_report(json.dumps(plain)), "monday.json")

    assert says in raised.value.message
    assert raised.value.status == 2


def test_checks_of_a_report_are_those_of_the_rules():
    report = build_report(bench(FULL), BenchReportOptions())

    assert report.checks[0] == Check(
        id="wrong-data", code="DD401", group="bandwidth", outcome=Outcome.PASSED,
        seen="the results of 16 measured cases are correct",
    )  # fmt: skip


def test_hosts_are_in_the_order_of_their_ranks():
    report = build_report(replace(bench(FULL), members=tuple(reversed(members(8, 2)))), BenchReportOptions())

    assert report.data["hosts"] == ["node1", "node0"]
    assert report.job is not None
    assert report.job.nnodes == 2


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


def sources(*nodes, **asked):
    return [reason.source for reason in find_reasons(bench_of(*nodes, **asked), Fleet(nodes=nodes))]


def pair(machine, *, healthy=None, **state):
    """Return two hosts, of which the first is in a state."""
    return node_of(machine, **state), node_of(healthy or machine, host="host1", ranks=range(8, 16))


# Healthy machines


@pytest.mark.parametrize("machine", ["nvlink8", "roce8"])
def test_a_healthy_machine_has_no_reasons(machine):
    node = node_of(machine)
    logs = [log(rank, nvls=True, P2P_CUMEM=48) for rank in range(8)]
    assert sources(node, logs=logs) == []


@pytest.mark.parametrize("machine", ["nvlink8", "roce8"])
def test_two_healthy_machines_have_no_reasons(machine):
    nodes = pair(machine)
    logs = [log(rank, nvls=True, P2P_CUMEM=48, NET_IB_GDRDMA=4) for rank in range(16)]
    assert sources(*nodes, logs=logs) == []


def test_a_desktop_whose_cards_have_no_peer_access():
    node = node_of("workstation2", ranks=range(2))
    logs = [log(rank, "Socket", ("enp10s0",), SHM=4) for rank in range(2)]
    assert sources(node, logs=logs) == ["DD323 p2p", "NCCL's log"]


def test_gloo_on_one_host_is_named_as_what_it_is():
    node = node_of("container-nogpu", ranks=range(2))
    (reason,) = find_reasons(bench_of(node, backend="gloo"), Fleet(nodes=(node,)))
    assert "not a network" in reason.text


def test_gloo_asks_nothing_of_gpus_and_rdma():
    node = node_of("nvlink8", states=("ib-down", "pcie-narrow", "acs"), nvml=("nvlink-down", "hw-slowdown"))
    assert sources(node, backend="gloo") == ["GLOO_SOCKET_IFNAME, the host name's address"]


def test_gloo_between_hosts_takes_the_host_names_interface_though_there_are_faster_ones():
    (reason,) = [
        reason
        for reason in find_reasons(bench_of(*pair("nvlink8"), backend="gloo"), Fleet(nodes=pair("nvlink8")))
        if reason.source == "/sys/class/net/*/speed"
    ]
    assert reason.text == ("Gloo uses eno1, 10 Gbit/s: a host can send at most 1.25 GB/s; ib0 has 400 Gbit/s")
    assert (reason.hosts, reason.fix) == (("host0", "host1"), "export GLOO_SOCKET_IFNAME=ib0 on all hosts")


def test_without_machines_there_is_nothing_to_say():
    assert find_reasons(bench_of(node_of("nvlink8")), None) == ()


# Faults


@pytest.mark.parametrize(
    ("state", "source"),
    [
        ("ib-down", "DD331 ib-state"),
        ("ib-one-lane", "DD332 ib-rate"),
        ("ib-flapped", "DD333 ib-flap"),
        ("no-peermem", "DD336 peermem"),
        ("uverbs-denied", "DD338 uverbs"),
        ("pcie-narrow", "DD320 pcie"),
        ("pcie-old-speed", "DD320 pcie"),
        ("acs", "DD324 acs-iommu"),
        ("iommu", "DD324 acs-iommu"),
        ("numa-lost", "DD325 numa"),
    ],
)
def test_a_fault_between_hosts_and_not_inside_one(state, source):
    assert sources(*pair("nvlink8", states=(state,))) == [source]
    assert sources(node_of("nvlink8", states=(state,))) == []


@pytest.mark.parametrize(
    ("nvml", "source"),
    [
        ("nvlink-down", "DD321 nvlink"),
        ("p2p-off", "DD323 p2p"),
        ("hw-slowdown", "DD312 throttle"),
        ("leftover", "DD318 other-procs"),
        ("app-clocks", "DD314 app-clocks"),
    ],
)
def test_a_fault_of_gpus(nvml, source):
    assert sources(node_of("nvlink8", nvml=(nvml,))) == [source]


@pytest.mark.parametrize("nvml", ["power-cap", "ecc-off", "power-limit", "persistence-off", "remapped"])
def test_what_a_collective_does_not_feel(nvml):
    assert sources(node_of("nvlink8", nvml=(nvml,))) == []


def test_a_link_between_gpus_is_nothing_to_hosts_with_one_rank_each():
    nodes = (node_of("nvlink8", ranks=range(1), nvml=("nvlink-down",)), node_of("nvlink8", host="b", ranks=range(1, 2)))
    assert sources(*nodes) == []


def test_pcie_counts_inside_a_host_where_nvlink_is_not_used():
    narrow = node_of("nvlink8", states=("pcie-narrow",))
    assert sources(narrow, logs=[log(0, SHM=4)]) == ["NCCL's log", "DD320 pcie"]


@pytest.mark.parametrize(
    ("variables", "hosts", "source"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, 1, "DD114 env-danger"),
        ({"NCCL_IB_DISABLE": "1"}, 2, "DD339 ib-disabled"),
        ({"NCCL_NET": "Socket"}, 2, "DD339 ib-disabled"),
        ({"NCCL_IB_HCA": "mlx4"}, 2, "DD335 ib-hca-env"),
    ],
)
def test_a_variable_left_set(variables, hosts, source):
    nodes = pair("nvlink8", **variables)[:hosts]
    assert sources(*nodes) == [source]


def test_a_variable_that_bears_on_other_hosts_only():
    assert sources(node_of("nvlink8", NCCL_IB_DISABLE="1")) == []


def test_what_explains_most_comes_first():
    node = node_of("nvlink8", nvml=("leftover", "p2p-off"), NCCL_MAX_NCHANNELS="2")
    assert sources(node, logs=[log(0, SHM=2)]) == ["NCCL's log", "DD323 p2p", "DD114 env-danger", "DD318 other-procs"]


def test_too_few_processors_and_others_on_them():
    node = node_of("container-nogpu", ranks=range(2))
    processes = tuple(replace(process, cpus=(0,)) for process in node.processes)
    node = replace(node, processes=processes, load=load({0: 0.9}))
    assert sources(node, backend="gloo") == [
        "sched_getaffinity",
        "/proc/stat, while the ranks were idle",
        "GLOO_SOCKET_IFNAME, the host name's address",
    ]


def test_a_reason_says_what_was_seen_and_what_to_do():
    (reason,) = find_reasons(
        bench_of(node_of("nvlink8", nvml=("nvlink-down",))), Fleet(nodes=(node_of("nvlink8", nvml=("nvlink-down",)),))
    )
    assert "down" in reason.text
    assert "nvidia-smi nvlink -s" in reason.fix
    assert reason.hosts == ("host0",)


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


def seen_member(rank, host="node0"):
    fields = {"device": "cpu", "device_name": "", "cores": 1, "version": "", "torch": ""}
    return Member(rank=rank, local_rank=rank, host=host, pid=1000 + rank, **fields)


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
    members = tuple(seen_member(rank, host) for rank, host in enumerate(hosts))
    phase = next((one.phase for one in positions), "measure")
    stop = Stop(ending=ending, phase=phase, positions=positions, signal=signal)
    return Bench(settings=BenchSettings(hang_timeout_s=LIMIT_S, backend=backend), members=members, stop=stop)


HUNG = {
    "a wrapper of the call holds a rank up": (
        (reached(0), reached(1, stack=(OURS, PLUGIN)), reached(2)),
        ("stuck", (1,), [12], "high"),
    ),
    "a wrapper that waits in a library of Python": (
        (reached(0), reached(1, stack=(OURS, PLUGIN, "/usr/lib/python3.12/threading.py:359 wait")), reached(2)),
        ("stuck", (1,), [12], "high"),
    ),
    "a rank is between calls": (
        (reached(0), between(1), reached(2)),
        ("stuck", (1,), [49], "high"),
    ),
    "a rank came to a pause of the others a little later": (
        (reached(0, stale_s=70), between(1, stale_s=45), reached(2, stale_s=70)),
        ("stuck", (1,), [49], "high"),
    ),
    "a rank is stopped": (
        (reached(0, states={"1": "T", "2": "S"}), reached(2, states={"0": "S", "1": "T"})),
        ("stopped", (1,), [], "high"),
    ),
    "the rank that served the store is stopped, and a third could not be asked": (
        (reached(1, states={"0": "T", "2": "S"}),),
        ("stopped", (0,), [], "high"),
    ),
    "a rank sleeps in the kernel": (
        (reached(0, states={"1": "D"}), reached(2, states={"1": "D"})),
        ("stopped", (1,), [], "medium"),
    ),
    "a rank does not answer though it runs": (
        (reached(0, states={"1": "R"}), reached(2)),
        ("stuck", (1,), [], "low"),
    ),
    "all are in the call": (
        (reached(0), reached(1), reached(2)),
        ("transport", (0, 1, 2), [49, 49, 49], "low"),
    ),
    "all are in the call, and one waits in a line of ours": (
        (reached(0), reached(1, stack=(OURS,)), reached(2)),
        ("transport", (0, 1, 2), [49, 49, 49], "low"),
    ),
    "the root of a broadcast is done with it": (
        (reached(0, op="barrier", calls=8), reached(1, op="broadcast"), reached(2, op="broadcast")),
        ("transport", (0, 1, 2), [49, 49, 49], "low"),
    ),
    "a pair does not get through, and the third waits for it": (
        (in_pair(0, 0, 1), in_pair(1, 0, 1), reached(2, op="barrier", calls=40, phase="pairs", what="")),
        ("transport", (0, 1), [49, 49], "low"),
    ),
    "one of a pair does not come, and the third waits for both": (
        (in_pair(0, 0, 1), between(1, group=(0, 1), calls=2), reached(2, op="barrier", calls=40)),
        ("stuck", (1,), [49], "high"),
    ),
    "a rank is held up before it connects": (
        (connecting(0), starting(1), connecting(2)),
        ("stuck", (1,), [12], "high"),
    ),
    "nobody gets further while they connect": (
        (connecting(0), connecting(1), reached(2, phase="connect", inside=False, calls=0, op="", group=())),
        ("stuck", (2,), [49], "high"),
    ),
    "a rank that came to its end is waited for": (
        (reached(0), between(1, phase="end"), reached(2)),
        ("early-exit", (1,), [49], "high"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUNG)
def test_hang(name):
    positions, (kind, ranks, lines, confidence) = HUNG[name]
    (finding,) = stop_findings(stopped(*positions))
    assert (finding.kind, finding.ranks, finding.confidence.value) == (kind, ranks, confidence)
    assert [place.line for place in finding.where] == lines
    assert finding.fix
    assert not [text for text in (finding.summary, *finding.evidence, finding.fix) if "not known" in text]


PEER = "RuntimeError: Connection closed by peer [127.0.0.1]:5549"
FAILED = {
    "killed, and the others lost their connection": (
        (reached(0, error=PEER, ends={"1": "SIGKILL"}, states={"1": "Z"}), reached(2, error=PEER)),
        ("killed", (1,), "rank 1 was killed by SIGKILL"),
    ),
    "gone, and nobody saw how": (
        (reached(0, error=PEER, states={"1": ""}), reached(2, states={"1": ""})),
        ("killed", (1,), "rank 1 ended for an unknown reason"),
    ),
    "left with a status": (
        (reached(0, ends={"1": "exit status 3"}, states={"1": "Z"}), reached(2)),
        ("crash", (1,), "rank 1 exited with status 3"),
    ),
    "raised by a wrapper, whatever its type": (
        (reached(0), reached(1, error="RuntimeError: no", stack=(OURS, PLUGIN)), reached(2, error=PEER)),
        ("crash", (1,), "rank 1 raised RuntimeError in all_reduce (plugin.py:12): no"),
    ),
    "raised by a call of torch's": (
        (reached(0), reached(1, error="RuntimeError: CUDA error: out of memory"), reached(2)),
        ("crash", (1,), "rank 1 raised RuntimeError at collectives.py:49: CUDA error: out of memory"),
    ),
    "gave up to connect to one that did not come": (
        (connecting(0, error="StoreError: no message came from rank 1 within 60 s"), starting(1), connecting(2)),
        ("stuck", (1,), None),
    ),
    "cannot connect though all have come": (
        (connecting(0), connecting(1, error="StoreError: 10.0.0.1:4000 refuses", stack=(OURS,)), connecting(2)),
        ("crash", (1,), None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_failure(name):
    positions, (kind, ranks, summary) = FAILED[name]
    (finding,) = stop_findings(stopped(*positions, ending=Ending.FAILED))
    assert (finding.kind, finding.ranks) == (kind, ranks)
    assert summary in {None, finding.summary}


def test_a_bench_that_finished_has_nobody_to_blame():
    assert stop_findings(Bench(settings=BenchSettings(), members=(seen_member(0),))) == ()


@pytest.mark.parametrize("error", [None, PEER])
def test_a_bench_that_a_user_ended_has_nobody_to_blame(error):
    positions = (reached(0, stale_s=5, error=error), between(1, stale_s=5), reached(2, stale_s=5))
    assert stop_findings(stopped(*positions, ending=Ending.INTERRUPTED, signal="SIGINT")) == ()


def test_a_user_who_ends_a_bench_that_hangs_gets_the_reason():
    positions = (reached(0), between(1), reached(2))
    (finding,) = stop_findings(stopped(*positions, ending=Ending.INTERRUPTED, signal="SIGINT"))
    assert (finding.kind, finding.ranks) == ("stuck", (1,))


def test_transport_says_which_call_among_whom_and_what_to_look_at():
    far = stopped(*map(reached, EVERYBODY), hosts=("a", "b", "b"))
    (finding,) = stop_findings(far)
    assert finding.summary == "ranks 0-2 are in all_reduce float32 1 MiB, but it does not complete"
    assert finding.hosts == ("a", "b")
    assert "ddpdoctor check-env" in finding.fix
    (near,) = stop_findings(stopped(*map(reached, EVERYBODY), backend="nccl"))
    assert "NCCL_DEBUG" in near.fix


def test_pairs_that_fail_together_are_one_finding():
    members = tuple(seen_member(rank) for rank in range(4))
    positions = (in_pair(0, 0, 1), in_pair(1, 0, 1), in_pair(2, 2, 3), in_pair(3, 2, 3))
    stop = Stop(ending=Ending.HUNG, phase="pairs", positions=positions)
    (finding,) = stop_findings(Bench(settings=BenchSettings(), members=members, stop=stop))
    assert (finding.kind, finding.ranks) == ("transport", (0, 1, 2, 3))
    assert finding.summary == (
        "ranks 0 and 1 are in all_reduce float32 8 MiB, ranks 2 and 3 are in all_reduce float32 8 MiB, "
        "but none of these completes"
    )


def test_a_host_that_is_silent_is_not_said_to_be_stuck_at_a_line():
    (finding,) = stop_findings(stopped(reached(0, states={}), hosts=("a", "b", "b")))
    assert (finding.ranks, finding.hosts, finding.where) == ((1, 2), ("b",), ())
    assert finding.summary == "ranks 1 and 2 do not respond anymore; rank 0 is waiting for them in all_reduce"
    assert finding.evidence == (
        "rank 0: in all_reduce", 'the bench was in its phase "measure", at all_reduce float32 1 MiB',
    )  # fmt: skip
    assert "network" in finding.fix


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (reached(1), "in all_reduce"),
        (reached(1, stack=(OURS, PLUGIN)), "on its way into all_reduce"),
        (between(1), "between calls, in phase measure"),
        (between(1, phase="end"), "finished"),
        (reached(1, error=PEER), f"raised {PEER}"),
        (reached(0, states={"1": "T"}), "stopped"),
        (reached(0, states={"1": ""}), "gone"),
        (reached(0, states={"1": "Z"}, ends={"1": "SIGKILL"}), "killed by SIGKILL"),
        (reached(0, states={"1": "Z"}, ends={"1": "exit status 3"}), "exit status 3"),
        (reached(0, states={"1": "R"}), "did not answer"),
    ],
)
def test_a_rank_in_one_phrase(one, words):
    assert describe_rank(1, Stop(ending=Ending.HUNG, phase="measure", positions=(one,))) == words
