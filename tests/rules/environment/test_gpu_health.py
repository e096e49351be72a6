"""Health, settings, load and memory of GPUs, who else uses them, and what hangs on them."""

from dataclasses import replace

import pytest

from ddpdoctor.collect.kernel import read_kernel_log
from ddpdoctor.collect.system import ReadingPlan
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import GpuProcess, GpuTrial, GpuWork, KernelView, Launcher, StuckProcess, Xid
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.rules.environment.gpus import XIDS
from tests.machines import load_machine
from tests.rules.environment.build import all_named, ask, failed, fleet, gpu_node, gpus_of, node, process, with_gpu

GIB, MIB = 2**30, 2**20

E, W, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def holding(size_bytes, *, pid=31337, ours=False, graphics=False, files=()):
    one = GpuProcess(pid=pid, name="python", used_bytes=size_bytes, ours=ours, graphics=graphics)
    used = (size_bytes or 0) + 4 * MIB
    return node(gpus=with_gpu(gpus_of(files=files), 4, processes=(one,), memory_used_bytes=used))


def test_a_leftover():
    _, (finding,) = ask("other-procs", gpu_node("leftover", ranks=8))
    assert finding.severity is W
    assert finding.summary == "GPU 4 has 21.0 GiB of 79.6 GiB used by other processes"
    assert finding.evidence == ("GPU 4 (NVIDIA H100 80GB HBM3, 0000:9d:00.0): pid 31337 (python) 21.0 GiB",)
    assert finding.fix == "ps -fp 31337; end leftover processes"
    assert finding.ranks == (4,)


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (holding(500 * MIB), None),
        (holding(501 * MIB), W),
        (holding(39 * GIB), W),
        (holding(41 * GIB), E),
        (holding(41 * GIB, ours=True), None),
        (holding(41 * GIB, graphics=True), None),
        (holding(41 * GIB, pid=100), None),
        (holding(None), None),
        (gpu_node("our-process"), None),
        (gpu_node(), None),
        (gpu_node(machine="workstation2"), None),
    ],
    ids=["a-context", "more", "much", "most", "ours", "screen", "a-rank", "not-reported", "child", "idle", "desktop"],
)
def test_how_much(facts, severity):
    check, findings = ask("other-procs", facts)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert check.outcome is (failed(severity) if severity else Outcome.PASSED)


def unseen(used, name="NVIDIA H100 80GB HBM3", **more):
    gpus = all_named(gpus_of(files=("pod",)), name)
    return node(gpus=with_gpu(gpus, 4, memory_used_bytes=used), **more)


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (unseen(GIB), None),
        (unseen(GIB + 1), W),
        (unseen(50 * GIB), E),
        (unseen(3 * GIB, "NVIDIA GeForce RTX 4090"), None),
        (unseen(50 * GIB, "NVIDIA GeForce RTX 4090"), W),
        (unseen(3 * GIB, gpu_trial=GpuTrial(work=(), copies=())), None),
        (unseen(50 * GIB, gpu_trial=GpuTrial(work=(), copies=())), E),
    ],
    ids=["idle", "more", "most", "desktop", "desktop-most", "our-trial", "beside-our-trial"],
)
def test_in_a_container_the_memory_speaks(facts, severity):
    check, findings = ask("other-procs", facts)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert all(finding.confidence is Confidence.MEDIUM for finding in findings)
    assert "are not visible" in check.seen


def test_memory_that_the_kernel_uses_says_nothing():
    assert ask("other-procs", unseen(50 * GIB, "NVIDIA GH200 480GB"))[0].outcome is Outcome.SKIPPED


def test_memory_of_nobody():
    _, (finding,) = ask("zombie-ctx", gpu_node("zombie"))
    assert finding.severity is W
    assert finding.summary.startswith("GPU 4 has memory in use but no process")
    assert finding.evidence[0].endswith("30.0 GiB in use, no process listed")


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (gpu_node(), Outcome.PASSED),
        (gpu_node("leftover"), Outcome.PASSED),
        (gpu_node(machine="workstation2"), Outcome.PASSED),
        (gpu_node("zombie", files=("pod",)), Outcome.SKIPPED),
        (gpu_node("zombie", "mig"), Outcome.SKIPPED),
        (node(gpus=all_named(gpus_of("zombie"), "NVIDIA GH200 480GB")), Outcome.SKIPPED),
        (node(gpus=with_gpu(gpus_of(), 4, memory_used_bytes=GIB)), Outcome.PASSED),
    ],
    ids=["idle", "somebody", "desktop", "container", "mig", "coherent", "near-miss"],
)
def test_no_zombie(facts, outcome):
    check, findings = ask("zombie-ctx", facts)
    assert (check.outcome, findings) == (outcome, ())


def test_what_is_not_reported():
    gpus = gpus_of()
    for index in range(8):
        gpus = with_gpu(gpus, index, processes=None, memory_used_bytes=None)
    for kind in ("other-procs", "zombie-ctx"):
        assert ask(kind, node(gpus=gpus))[0].outcome is Outcome.SKIPPED


# app-clocks, persistence, mig, compute-mode.


def test_clocks_as_they_should_be():
    check, findings = ask("app-clocks", fleet(gpu_node(host="a"), gpu_node(host="b")))
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, "highest clocks of 16 GPUs: 1980 MHz", ())


def test_a_lowered_application_clock():
    _, (finding,) = ask("app-clocks", fleet(gpu_node(host="a"), gpu_node("app-clocks", host="b", ranks=8)))
    assert (finding.severity, finding.summary) == (W, "GPU 5 has a lowered application clock")
    assert (finding.hosts, finding.ranks, finding.fix) == (("b",), (5,), "sudo nvidia-smi -rac -i 5")


def test_a_raised_application_clock_is_no_fault():
    assert ask("app-clocks", node(gpus=with_gpu(gpus_of(), 0, app_clock_sm_mhz=2000)))[1] == ()


def test_who_has_another_highest_clock():
    other = with_gpu(gpus_of(), 3, max_clock_sm_mhz=1755)
    nodes = [gpu_node(host="a"), gpu_node(host="b"), replace(gpu_node(host="c"), gpus=other)]
    _, (finding,) = ask("app-clocks", fleet(*nodes, launcher=Launcher.SLURM))
    assert finding.summary.startswith("the highest clock of NVIDIA H100 80GB HBM3 is 1755 MHz on c, 1980 MHz on ")
    assert (finding.hosts, finding.confidence) == (("c",), Confidence.HIGH)


def test_models_are_compared_among_themselves():
    nodes = [gpu_node(host="a"), gpu_node(machine="workstation2", host="b")]
    assert ask("app-clocks", fleet(*nodes))[1] == ()


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (gpu_node("persistence-off", files=("pod",)), W),
        (gpu_node(machine="workstation2"), INFO),
        (gpu_node("persistence-off"), None),
        (gpu_node(), None),
    ],
    ids=["server", "workstation", "the-daemon-runs", "on"],
)
def test_persistence(facts, severity):
    check, findings = ask("persistence", facts)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert check.outcome is (failed(severity) if severity else Outcome.PASSED)


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (gpu_node("mig", ranks=4), E),
        (gpu_node("mig"), W),
        (gpu_node("mig", ranks=4, variables={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}), W),
        (gpu_node(ranks=4), None),
    ],
    ids=["ranks", "alone", "meant", "off"],
)
def test_mig(facts, severity):
    _, findings = ask("mig", facts)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert all("in MIG mode" in finding.summary for finding in findings)


def test_cards_without_mig():
    assert ask("mig", gpu_node(machine="workstation2"))[0].outcome is Outcome.SKIPPED


def test_prohibited():
    _, (finding,) = ask("compute-mode", gpu_node("prohibited", ranks=8))
    assert (finding.severity, finding.ranks) == (E, (1,))
    assert finding.summary == "GPU 1 cannot run work: the compute mode is prohibited"
    assert finding.fix == "sudo nvidia-smi -c 0 -i 1"


@pytest.mark.parametrize(
    ("one", "fails"),
    [
        (GpuProcess(pid=31337, name="python", used_bytes=1, ours=False), True),
        (GpuProcess(pid=31337, name="python", used_bytes=1, ours=True), False),
        (GpuProcess(pid=31337, name="Xorg", used_bytes=1, ours=False, graphics=True), False),
        (GpuProcess(pid=4300, name="python", used_bytes=1, ours=False), False),
    ],
    ids=["a-stranger", "ours", "a-screen", "a-rank"],
)
def test_exclusive_with_somebody_on_it(one, fails):
    facts = replace(gpu_node("exclusive", ranks=8), gpus=with_gpu(gpus_of("exclusive"), 4, processes=(one,)))
    check, findings = ask("compute-mode", facts)
    assert check.outcome is (Outcome.FAILED if fails else Outcome.PASSED)
    assert all("allows only one process" in finding.summary for finding in findings)


def test_exclusive_gpus_are_named_together():
    stranger = GpuProcess(pid=31337, name="python", used_bytes=1, ours=False)
    gpus = with_gpu(with_gpu(gpus_of("exclusive"), 4, processes=(stranger,)), 5, processes=(stranger,))
    _, (finding,) = ask("compute-mode", node(gpus=gpus))
    assert finding.summary == "GPUs 4 and 5 allow only one process, and another job's process uses them"


def test_exclusive_with_several_ranks():
    processes = tuple(process(n, CUDA_VISIBLE_DEVICES="0") for n in range(2))
    _, (finding,) = ask("compute-mode", node(processes=processes, gpus=gpus_of("exclusive")))
    assert finding.summary == "GPU 0 allows only one process, but several ranks use it"
    assert finding.ranks == (0, 1)


# ecc-unc, row-remap, retired-pages, sram-threshold.


KINDS = ["ecc-unc", "row-remap", "retired-pages", "sram-threshold"]


@pytest.mark.parametrize(
    ("kind", "state", "severity", "summary", "evidence"),
    [
        ("ecc-unc", "ecc-uncorrected", E, "GPU 2 had memory errors that ECC could not correct", "3 uncorrected errors"),
        ("ecc-unc", "ecc-corrected", W, "GPU 2 corrects very many memory errors", "60,000,000 corrected"),
        ("ecc-unc", "ecc-off", W, "GPUs 0-7 run without ECC", "ECC is off"),
        ("row-remap", "remap-failed", E, "GPU 2 has bad memory rows and no spare rows left", "failed: yes"),
        ("row-remap", "remap-pending", E, "GPU 2 has a bad memory row that stays in use until a reset", "pending: yes"),
        ("row-remap", "remapped", W, "GPU 2 remapped memory rows after uncorrected errors", "uncorrectable ones 1"),
        ("retired-pages", "retired-pending", E, "GPU 2 has a bad memory page that stays in use", "1 pages retired"),
        ("retired-pages", "retired-many", W, "GPU 2 retired 60 memory pages or more", "62 pages retired"),
        ("sram-threshold", "sram", E, "GPU 2 had more uncorrected cache errors", "threshold exceeded"),
    ],
)
def test_failing(kind, state, severity, summary, evidence):
    check, (finding,) = ask(kind, gpu_node(state, ranks=8))
    assert check.outcome is Outcome.FAILED
    assert finding.severity is severity
    assert finding.summary.startswith(summary)
    assert evidence in finding.evidence[0]
    assert finding.ranks == (tuple(range(8)) if "0-7" in summary else (2,))
    assert "{" not in finding.fix


@pytest.mark.parametrize("kind", ["ecc-unc", "row-remap", "sram-threshold"])
def test_healthy(kind):
    check, findings = ask(kind, gpu_node())
    assert (check.outcome, findings) == (Outcome.PASSED, ())


@pytest.mark.parametrize("kind", KINDS)
def test_consumer_cards_are_not_judged(kind):
    check, findings = ask(kind, gpu_node(machine="workstation2"))
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_driver(kind):
    unread = Unread(why=Why.TIMEOUT, reason="NVML did not answer within 40 s")
    check, _ = ask(kind, node(gpus=unread))
    assert (check.outcome, check.reason) == (Outcome.INCONCLUSIVE, unread.reason)


def test_near_misses():
    gpus = with_gpu(gpus_of(), 2, ecc_corrected_volatile=50_000_000, ecc_uncorrected_aggregate=4)
    check, findings = ask("ecc-unc", node(gpus=gpus))
    assert (findings, check.seen) == ((), "0 uncorrected errors now, 4 in total")
    pages = with_gpu(gpus_of(), 2, retired_pages=59, retired_pending=False)
    assert ask("retired-pages", node(gpus=pages))[0].outcome is Outcome.PASSED


def test_near_hits():
    one_more = with_gpu(gpus_of(), 2, ecc_corrected_volatile=50_000_001)
    assert ask("ecc-unc", node(gpus=one_more))[0].outcome is Outcome.FAILED
    pages = with_gpu(gpus_of(), 2, retired_pages=60, retired_pending=False)
    assert ask("retired-pages", node(gpus=pages))[0].outcome is Outcome.FAILED


def test_gpus_that_the_job_does_not_see_are_not_its_business():
    facts = gpu_node("ecc-uncorrected", variables={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert ask("ecc-unc", facts)[0].outcome is Outcome.PASSED


def test_where_all_are_hidden_on_purpose_nothing_depends_on_them():
    check, _ = ask("ecc-unc", gpu_node("ecc-uncorrected", variables={"CUDA_VISIBLE_DEVICES": ""}))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, "CUDA_VISIBLE_DEVICES hides all GPUs")


def test_numbers_that_cuda_may_order_otherwise_choose_nothing():
    gpus = with_gpu(gpus_of("ecc-uncorrected"), 7, name="NVIDIA A100-SXM4-80GB")
    facts = replace(gpu_node(variables={"CUDA_VISIBLE_DEVICES": "0,1"}), gpus=gpus)
    assert ask("ecc-unc", facts)[0].outcome is Outcome.FAILED
    ordered = {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert ask("ecc-unc", replace(gpu_node(variables=ordered), gpus=gpus))[0].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("name", "judged"),
    [
        ("NVIDIA A100-SXM4-80GB", True),
        ("Tesla V100-SXM2-16GB", True),
        ("Tesla T4", True),
        ("NVIDIA A10G", True),
        ("NVIDIA L40S", True),
        ("NVIDIA H100 PCIe", True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("NVIDIA RTX A6000", False),
        ("NVIDIA GeForce RTX 3090", False),
        ("Quadro P4000", False),
        ("NVIDIA RTX 4000 Ada Generation Laptop GPU", False),
    ],
)
def test_ecc_off_is_judged_on_data_centre_parts_only(name, judged):
    check, _ = ask("ecc-unc", node(gpus=all_named(gpus_of("ecc-off"), name)))
    assert check.outcome is (Outcome.FAILED if judged else Outcome.SKIPPED)


# throttle, temp-power.


LAPTOP = "NVIDIA GeForce RTX 4070 Laptop GPU"


@pytest.mark.parametrize(
    ("state", "severity", "summary"),
    [
        ("hw-slowdown", E, "GPU 5 is throttled by its hardware: hardware slowdown, hardware thermal slowdown"),
        ("power-brake", E, "GPUs 0-7 are throttled by their hardware: hardware slowdown, power brake"),
        ("sw-thermal", W, "GPU 5 is throttled by the driver because of heat"),
        ("power-cap", INFO, "GPUs 0-7 run at the power limit, as under full load: a process is using them now"),
    ],
)
def test_slowed_down(state, severity, summary):
    _, (finding,) = ask("throttle", gpu_node(state, ranks=8))
    assert (finding.severity, finding.summary) == (severity, summary)
    assert "clocks event reasons 0x" in finding.evidence[0]
    assert finding.ranks == ((5,) if "GPU 5" in summary else tuple(range(8)))


def test_an_idle_gpu_is_not_slow():
    check, findings = ask("throttle", gpu_node())
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, "reasons 0x1; 8 of 8 idle", ())


def test_a_laptop_on_battery_is_a_warning():
    _, (finding,) = ask("throttle", node(gpus=all_named(gpus_of("power-brake"), LAPTOP)))
    assert finding.severity is W


@pytest.mark.parametrize("reasons", [0x0, 0x2, 0x10, 0x100])
def test_reasons_that_are_settings(reasons):
    assert ask("throttle", node(gpus=with_gpu(gpus_of(), 0, clock_event_reasons=reasons)))[1] == ()


def test_nothing_is_reported():
    gpus = gpus_of()
    for index in range(8):
        gpus = with_gpu(gpus, index, clock_event_reasons=None, temperature_c=None, power_limit_mw=None)
    assert ask("throttle", node(gpus=gpus))[0].outcome is Outcome.SKIPPED
    assert ask("temp-power", node(gpus=gpus))[0].outcome is Outcome.SKIPPED


@pytest.mark.parametrize(
    ("state", "summary", "fix"),
    [
        (
            "hot",
            "GPU 5 is within 5 °C of thermal throttling",
            "nvidia-smi -q -d TEMPERATURE -i 5; then check the cooling",
        ),
        ("power-limit", "GPU 5 has a lowered power limit, and will be slow under load", "sudo nvidia-smi -i 5 -pl 700"),
    ],
)
def test_hot_or_limited(state, summary, fix):
    _, (finding,) = ask("temp-power", gpu_node(state))
    assert (finding.severity, finding.summary, finding.fix) == (W, summary, fix)


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"temperature_c": 82}, Outcome.FAILED),
        ({"temperature_c": 81}, Outcome.PASSED),
        ({"temperature_c": 200, "slowdown_temperature_c": None}, Outcome.PASSED),
        ({"power_limit_mw": 699_000}, Outcome.PASSED),
        ({"power_limit_mw": 698_999}, Outcome.FAILED),
        ({"power_limit_mw": 750_000}, Outcome.PASSED),
        ({"power_limit_mw": 100, "default_power_limit_mw": None}, Outcome.PASSED),
    ],
)
def test_limits(fields, outcome):
    assert ask("temp-power", node(gpus=with_gpu(gpus_of(), 0, **fields)))[0].outcome is outcome


def test_a_laptops_limit_moves_by_itself():
    gpus = with_gpu(all_named(gpus_of(), LAPTOP), 0, power_limit_mw=60_000)
    assert ask("temp-power", node(gpus=gpus))[1][0].severity is INFO


@pytest.mark.parametrize("kind", ["throttle", "temp-power"])
def test_two_consumer_cards_are_well(kind):
    assert ask(kind, gpu_node(machine="workstation2"))[0].outcome is Outcome.PASSED


# gpu-alloc, dstate.


def work(index, error=None, *, timed_out=False):
    return GpuWork(index=index, ok=error is None, error=error, timed_out=timed_out, seconds=4.0)


def tried(*results):
    return node(gpu_trial=GpuTrial(work=results, copies=()))


def test_all_worked():
    check, findings = ask("gpu-alloc", tried(work(0), work(1)))
    assert (check.outcome, check.seen) == (Outcome.PASSED, "2 GPUs tested, the slowest took 4.0 s")
    assert findings == ()


def test_one_hangs_and_others_compute_wrongly():
    wrong = "a matrix product in bfloat16 is wrong in 3 of 67108864 places"
    late = work(2, "no result within 60 s", timed_out=True)
    _, (hang, error) = ask("gpu-alloc", tried(work(0), work(1, wrong), late, work(3, "CUDA error: unknown error")))
    assert hang.summary == "GPU 2 does not finish a few matrix products"
    assert error.summary == "GPUs 1 and 3 fail under load, or compute wrong results"
    assert error.evidence[0] == f"GPU 1 as torch counts: {wrong}"
    assert {hang.severity, error.severity} == {Severity.ERROR}


def test_not_asked_for():
    unread = Unread(why=Why.NOT_ASKED, reason="GPUs are tested only with --deep")
    check, _ = ask("gpu-alloc", node(gpu_trial=unread))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, unread.reason)


def stuck(seconds, wchan="os_acquire_mutex"):
    return StuckProcess(pid=777, name="nvidia-smi", wchan=wchan, seconds=seconds)


@pytest.mark.parametrize(
    ("seconds", "severity", "confidence"),
    [
        (245.0, Severity.ERROR, Confidence.HIGH),
        (60.0, Severity.ERROR, Confidence.HIGH),
        (59.0, Severity.WARNING, Confidence.MEDIUM),
        (1.0, Severity.WARNING, Confidence.MEDIUM),
        (None, Severity.WARNING, Confidence.MEDIUM),
    ],
)
def test_how_long(seconds, severity, confidence):
    _, (finding,) = ask("dstate", node(stuck_processes=(stuck(seconds),)))
    assert (finding.severity, finding.confidence) == (severity, confidence)
    assert finding.summary.startswith("nvidia-smi hangs inside the NVIDIA driver")
    assert "pid 777 (nvidia-smi) in os_acquire_mutex" in finding.evidence[0]


def test_nobody_hangs():
    check, findings = ask("dstate", node(stuck_processes=()))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_a_place_that_is_hidden():
    _, (finding,) = ask("dstate", node(stuck_processes=(stuck(100.0, wchan=""),)))
    assert "in an unknown function" in finding.evidence[0]


def test_nothing_is_stuck_without_a_driver():
    check, _ = ask("dstate", node(stuck_processes=Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")))
    assert check.outcome is Outcome.SKIPPED


# xid.


def logged(code, bus_id="0000:43:00.0", age_s=90.0):
    return KernelView(xids=(Xid(bus_id=bus_id, code=code, text="pid=1, words", age_s=age_s),))


@pytest.mark.parametrize(
    ("codes", "severity"),
    [((48, 64, 74, 79, 95, 119, 120, 140), E), ((63, 92, 94), W), ((13, 31, 43, 45, 8, 154), INFO)],
)
def test_how_bad_each_is(codes, severity):
    for code in codes:
        _, (finding,) = ask("xid", gpu_node(ranks=8, kernel_log=logged(code)))
        assert finding.severity is severity
        assert finding.summary.startswith(f"GPU 1 had Xid {code}: ")
        assert finding.evidence == ("0000:43:00.0 90 s ago: pid=1, words",)
        assert finding.ranks == (() if severity is INFO else (1,))
        assert "{" not in finding.fix
    assert severity is INFO or {code for code in XIDS if XIDS[code][0] is severity} == set(codes)


def test_a_recorded_log(tmp_path):
    view = read_kernel_log(load_machine("nvlink8", tmp_path, "xid"), ReadingPlan(sections=frozenset()))
    check, findings = ask("xid", gpu_node(kernel_log=view))
    assert (check.outcome, check.seen) == (Outcome.FAILED, "4 Xid errors since boot")
    assert [(finding.severity, finding.summary.split(":")[0]) for finding in findings] == [
        (E, "GPU 1 had Xid 79"),
        (W, "GPU 2 had Xid 63"),
        (INFO, "GPU 3 had Xid 31"),
    ]
    assert "2 times" in findings[2].evidence[0]


def test_a_gpu_of_somebody_else_is_left_out():
    check, findings = ask("xid", gpu_node(kernel_log=logged(79, "0000:aa:00.0")))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_a_gpu_that_no_longer_reports_its_place_is_not_left_out():
    _, (finding,) = ask("xid", gpu_node("lost", kernel_log=logged(79, "0000:61:00.0")))
    assert finding.summary == "The GPU at 0000:61:00.0 had Xid 79: it fell off the bus"


def test_without_nvml_all_are_reported():
    unread = Unread(why=Why.TIMEOUT, reason="NVML did not answer")
    _, (finding,) = ask("xid", node(gpus=unread, kernel_log=logged(79)))
    assert finding.summary.startswith("The GPU at 0000:43:00.0")


def test_a_log_of_a_machine_whose_gpus_are_not_here():
    absent = Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")
    check, findings = ask("xid", node(gpus=absent, kernel_log=logged(79)))
    assert (check.outcome, check.reason, findings) == (Outcome.SKIPPED, absent.reason, ())


def test_a_log_that_may_not_be_read():
    denied = Unread(why=Why.DENIED, reason="the kernel's log may not be read")
    check, _ = ask("xid", node(gpus=gpus_of(), kernel_log=denied))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, denied.reason)
