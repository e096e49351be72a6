"""Open files, processes, the listen queue and disks: tables of facts and what is said of them."""

import pytest

from ddpdoctor.collect.system import ReadingPlan, read_node
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import Clock, Launcher, Limit
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.rules.registry import rules_of
from tests.machines import load_machine
from tests.rules.environment.build import (
    GIB,
    MIB,
    ask,
    failed,
    fleet,
    gpus,
    judge_fleet,
    limits,
    node,
    process,
    shm,
    software,
    torch,
    volume,
)

PASSED, FAILED, SKIPPED, UNKNOWN = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED, Outcome.INCONCLUSIVE
ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def job(local=1, world=None, **variables):
    names = {"LOCAL_WORLD_SIZE": str(local), "WORLD_SIZE": str(world or local), **variables}
    return [process(0, cpus=range(64), **names)]


@pytest.mark.parametrize(
    "kind", ["nofile", "nproc-pids", "disk", "cpu-quota", "mem-limit", "omp", "numa-balancing", "shm"]
)
@pytest.mark.parametrize(
    ("unread", "outcome"),
    [
        (Unread(why=Why.ABSENT, reason="there are no such limits here"), SKIPPED),
        (Unread(why=Why.TIMEOUT, reason="limits did not answer within 10 s"), UNKNOWN),
    ],
)
def test_limits_that_were_not_read(kind, unread, outcome):
    check, findings = ask(kind, node(limits=unread))
    assert (check.outcome, check.reason, findings) == (outcome, unread.reason, ())


@pytest.mark.parametrize(
    ("soft", "hard", "container", "world", "severity", "says", "fix"),
    [
        (1048576, 1048576, None, None, None, "", ""),
        (65536, 65536, None, 1024, None, "", ""),
        (None, None, "docker", 4096, None, "", ""),
        (1024, 1048576, None, None, WARNING, "only 1024", "ulimit -n 65536"),
        (1024, None, None, 2, WARNING, "only 1024", "ulimit -n 65536"),
        (256, None, None, 2, WARNING, "only 256", "ulimit -n 65536"),
        (1024, 4096, None, None, WARNING, "only 1024", 'ulimit -n 4096, and echo "* - nofile 65536" | sudo tee'),
        (4096, 4096, "docker", None, WARNING, "only 4096", "docker run --ulimit nofile=65536:65536"),
        (4096, 4096, "kubernetes", 8, WARNING, "only 4096", "LimitNOFILE=65536"),
        (8191, 8191, "docker", None, WARNING, "only 8191", "docker run --ulimit nofile=65536:65536"),
        (8192, 8192, "docker", None, INFO, "only 8192", "docker run --ulimit nofile=65536:65536"),
        (20000, 20000, None, 8192, ERROR, "a job of 8192 ranks needs 32896", "limits.conf"),
        (1024, 1048576, None, 224, WARNING, "loader workers", "ulimit -n 65536"),
        (1024, 1048576, None, 1024, ERROR, "a job of 1024 ranks needs 4224 on rank 0", "ulimit -n 65536"),
    ],
)
def test_nofile(soft, hard, container, world, severity, says, fix):  # noqa: PLR0917 - the columns of a table
    processes = job(world=world) if world else [process()]
    facts = node(
        processes=processes, limits=limits(nofile=Limit(soft=soft, hard=hard)), software=software(container=container)
    )
    check, findings = ask("nofile", facts)
    if severity is None:
        assert (check.outcome, findings) == (PASSED, ())
        return
    (finding,) = findings
    assert finding.severity is severity
    assert says in finding.summary
    assert finding.fix.startswith(fix) or fix in finding.fix
    assert check.seen == f"soft limit {soft}, hard limit {hard or 'unlimited'}"


def test_nofile_where_there_is_no_such_limit():
    check, _ = ask("nofile", node(limits=limits(nofile=None)))
    assert check.outcome is SKIPPED


@pytest.mark.parametrize(
    ("changes", "ranks", "fixes"),
    [
        ({}, 8, []),
        ({"nproc": None, "user_processes": None}, 8, []),
        ({"nproc": Limit(soft=None, hard=None)}, 8, []),
        ({"nproc": Limit(soft=800, hard=4096)}, 8, ["ulimit -u 4096"]),
        ({"nproc": Limit(soft=800, hard=None)}, 8, ["ulimit -u unlimited"]),
        ({"nproc": Limit(soft=800, hard=800)}, 8, ["raise nproc in /etc/security/limits.conf"]),
        ({"nproc": Limit(soft=800, hard=800)}, 4, []),
        ({"nproc": Limit(soft=200, hard=200), "nproc_applies": False}, 8, []),
        ({"pids_max": 1024, "pids_current": 20}, 8, []),
        ({"pids_max": 100, "pids_current": 90}, 1, ["raise pids.max"]),
        ({"pids_max": 256, "pids_current": 20, "nproc": Limit(soft=310, hard=310)}, 8, ["raise nproc", "raise pids"]),
    ],
)
def test_nproc_pids(changes, ranks, fixes):
    check, findings = ask("nproc-pids", node(processes=job(ranks), limits=limits(**changes)))
    assert check.outcome is (failed(*(one.severity for one in findings)) if fixes else PASSED)
    assert all(finding.severity is WARNING for finding in findings)
    assert all(any(finding.fix.startswith(fix) for finding in findings) for fix in fixes)
    assert len(findings) == len(fixes)


def test_nproc_counts_the_threads_of_openmp():
    facts = limits(pids_max=1200, pids_current=200)
    assert ask("nproc-pids", node(processes=job(8), limits=facts))[0].outcome is PASSED
    check, (finding,) = ask("nproc-pids", node(processes=job(8, OMP_NUM_THREADS="64"), limits=facts))
    assert finding.summary == "The limit of processes and threads is almost reached: pids.max of the cgroup is 1200"
    assert finding.evidence == ("1000 are left, and 8 ranks may want 1024",)
    assert "1000 of 1200 left (pids.max of the cgroup)" in check.seen


@pytest.mark.parametrize(
    ("queue", "world", "rank", "outcome"),
    [
        (4096, "512", 0, PASSED),
        (128, "128", 0, PASSED),
        (128, "256", 0, FAILED),
        (128, "256", 8, SKIPPED),
        (128, None, None, SKIPPED),
        (128, "many", 0, SKIPPED),
        (None, "256", 0, SKIPPED),
    ],
)
def test_somaxconn(queue, world, rank, outcome):
    variables = {"WORLD_SIZE": world} if world else {}
    facts = node(processes=[process(rank, **variables)], limits=limits(somaxconn=queue))
    check, findings = ask("somaxconn", facts)
    assert check.outcome is outcome
    if findings:
        assert findings[0].summary == "net.core.somaxconn is 128, but 256 ranks connect to rank 0 at once"
        assert findings[0].fix == "sudo sysctl -w net.core.somaxconn=4096"


@pytest.mark.parametrize(
    ("changes", "severity", "says"),
    [
        ({}, None, ""),
        ({"free_bytes": GIB}, None, ""),
        ({"free_bytes": GIB - 1, "total_bytes": 20 * GIB}, WARNING, "nearly full: less than 1 GiB left"),
        ({"free_bytes": 0, "total_bytes": 20 * GIB}, WARNING, "nearly full: less than 1 GiB"),
        ({"writable": False}, WARNING, "/tmp (temporary files, cache, working directory) is not writable"),
        ({"writable": False, "purpose": "working directory", "temporary": False}, None, ""),
        ({"writable": False, "purpose": "cache", "temporary": False, "free_bytes": 0}, None, ""),
        (
            {"error": "did not answer within 2 s", "timed_out": True, "total_bytes": 0, "free_bytes": 0},
            WARNING, "/tmp (temporary files, cache, working directory) cannot be used: it did not answer within 2 s",
        ),
        ({"error": "the server gave no answer"}, WARNING, "working directory): the server gave no answer"),
        ({"writable": False, "purpose": "working directory /tmp/job", "temporary": False}, None, ""),
        ({"write_mb_s": 900.0}, None, ""),
        ({"write_mb_s": 4.2}, INFO, "slow: less than 20 MB/s"),
    ],
)  # fmt: skip
def test_disk(changes, severity, says):
    check, findings = ask(
        "disk", node(limits=limits(volumes=(volume(**changes), volume("/home", "cache", temporary=False))))
    )
    assert check.outcome is (failed(severity) if severity else PASSED)
    assert "/home: 200 GiB left" in check.seen
    if severity:
        (finding,) = findings
        assert finding.severity is severity
        assert says in finding.summary
        assert finding.fix


def test_equal_problems_of_two_nodes_are_one():
    small = [limits(volumes=(volume(free_bytes=left * MIB),)) for left in (100, 200)]
    _, (finding,) = ask(
        "disk", fleet(node("a", limits=small[0]), node("b", limits=small[1]), node("c", limits=limits()))
    )
    assert finding.hosts == ("a", "b")
    assert finding.fix == "export TMPDIR=/path/on/another/disk"


# Recorded machines as the collectors read them: a healthy one is reported nothing that its owner would call false.


FILES = ("versions", "torch_versions", "drivers", "limits", "memory", "shm", "processors", "clock")
PLAN = ReadingPlan(sections=frozenset({"software", "torch", "limits", "clock"}))


def reported(machine, **variables):
    """Return the kinds and severities of what the rules of versions, limits and clocks find on a recorded machine."""
    ranks = [process(variables and 0, cpus=machine.calls.cpus(), **variables)]
    node = read_node(machine, PLAN, tuple(ranks))
    rules = [
        rule
        for rule in rules_of("environment")
        if next(iter(rule.checks.values())).__module__.rpartition(".")[2] in FILES
    ]
    judged = judge_fleet(fleet(node), rules)
    assert not [check for check in judged.checks if check.outcome.value in {"crashed", "inconclusive"}]
    return {finding.kind: finding.severity.value for finding in judged.findings}


@pytest.mark.parametrize(
    ("name", "states", "findings"),
    [
        ("nvlink8", (), {}),
        ("roce8", (), {}),
        ("workstation2", (), {"nofile": "warning"}),
        ("container-nogpu", (), {"shm": "warning"}),
        ("container-nogpu", ("limited",), dict.fromkeys(["shm", "cpu-quota", "mem-limit", "nproc-pids"], "warning")),
        ("container-nogpu", ("small",), {**dict.fromkeys(["nofile", "nproc-pids", "disk"], "warning"), "shm": "error"}),
        ("nvlink8", ("driver-mismatch",), {"driver-lib-mismatch": "error"}),
    ],
)  # fmt: skip
def test_what_is_said_of_a_machine(name, states, findings, tmp_path):
    assert reported(load_machine(name, tmp_path, *states)) == findings


def test_a_large_job_on_a_small_container(tmp_path):
    job = {"RANK": "0", "WORLD_SIZE": "1024", "LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"}
    findings = reported(load_machine("container-nogpu", tmp_path, "small"), **job)
    assert (findings["nofile"], findings["somaxconn"]) == ("error", "warning")


# Shared memory, memory limits, NUMA balancing, CPUs and threads.


STALE = {"stale": ("/dev/shm/nccl-aB3dE6", "/dev/shm/torch_77_1_2")}


@pytest.mark.parametrize(
    ("shared", "container", "severity", "says", "fix"),
    [
        (shm(), None, None, "", ""),
        (shm(512 * MIB), "docker", None, "", ""),
        (shm(64 * MIB), "docker", WARNING, "/dev/shm has 64 MiB, Docker's default", "docker run --shm-size=16g"),
        (shm(64 * MIB, free=10 * MIB), "podman", WARNING, "Docker's default", "podman run --shm-size=16g"),
        (shm(64 * MIB, workers=4), "docker", ERROR, "Docker's default", "docker run --shm-size=16g"),
        (shm(64 * MIB), "kubernetes", WARNING, "Docker's default", "mount a volume emptyDir {medium: Memory"),
        (shm(64 * MIB - 1), "docker", ERROR, "less than the container default", "docker run"),
        (shm(16 * MIB), None, ERROR, "/dev/shm has 16 MiB", "sudo mount -o remount,size=16G /dev/shm"),
        (shm(65 * MIB), None, WARNING, "need 512 MiB", "sudo mount"),
        (shm(512 * MIB - 1), None, WARNING, "need 512 MiB", "sudo mount"),
        (shm(1 * GIB, workers=2), "docker", WARNING, "need 2 GiB", "docker run"),
        (shm(2 * GIB, workers=2), "docker", None, "", ""),
        (
            shm(32 * GIB, free=63 * MIB),
            None,
            WARNING,
            "full: less than 64 MiB of 32 GiB is left",
            "run `ls -lS /dev/shm",
        ),
        (shm(writable=False), None, ERROR, "is not writable", "sudo chmod 1777 /dev/shm"),
        (shm(**STALE, stale_bytes=4 * GIB), None, WARNING, "has leftover files of dead processes", "rm /dev/shm/nccl-"),
        (
            shm(**STALE, stale_bytes=5 * MIB),
            None,
            INFO,
            "files of dead processes",
            "rm /dev/shm/nccl-aB3dE6 /dev/shm/torch_77_1_2",
        ),
        (None, None, ERROR, "There is no /dev/shm", "sudo mount -t tmpfs"),
    ],
)
def test_shm(shared, container, severity, says, fix):
    check, findings = ask("shm", node(limits=limits(shm=shared), software=software(container=container)))
    assert check.outcome is (failed(severity) if severity else PASSED)
    if severity:
        (finding,) = findings
        assert finding.severity is severity
        assert says in finding.summary
        assert finding.fix.startswith(fix)


def test_shm_elsewhere_and_where_it_does_not_answer():
    assert ask("shm", node(limits=limits(shm=None), software=software(platform="darwin")))[0].outcome is SKIPPED
    check, _ = ask("shm", node(limits=limits(shm=shm(error="did not answer within 2 s")), software=software()))
    assert (check.outcome, check.reason) == (UNKNOWN, "/dev/shm could not be read: did not answer within 2 s")


def test_a_small_shm_with_leftovers_is_two_findings():
    facts = limits(shm=shm(64 * MIB, **STALE, stale_bytes=32 * MIB))
    _, findings = ask("shm", node(limits=facts, software=software(container="docker")))
    assert [finding.severity for finding in findings] == [WARNING, WARNING]


LIMITED = {"memory_limit_bytes": 32 * GIB, "memory_used_bytes": 4 * GIB}


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({}, 8, []),
        ({**LIMITED, "oom_kills": 0}, 8, []),
        (
            {"memory_limit_bytes": 16 * GIB, "memory_used_bytes": 1 * GIB},
            8,
            ["Less than 2 GiB of memory per rank is left under the cgroup's limit"],
        ),
        ({"memory_limit_bytes": 16 * GIB, "memory_used_bytes": 17 * GIB}, 1, ["Less than 2 GiB"]),
        ({"memory_available_bytes": 3 * GIB}, 1, []),
        ({"memory_available_bytes": 3 * GIB}, 2, ["per rank is left on the machine"]),
        ({**LIMITED, "oom_kills": 1}, 1, ["The OOM killer was active before"]),
        ({**LIMITED, "oom_kills": 7}, 1, ["under the current memory limit"]),
        ({"oom_kills": None}, 1, []),
    ],
)
def test_mem_limit(changes, ranks, says):
    facts = node(processes=[process(0, LOCAL_WORLD_SIZE=str(ranks))], limits=limits(**changes))
    check, findings = ask("mem-limit", facts)
    assert check.outcome is (failed(*(one.severity for one in findings)) if says else PASSED)
    assert len(findings) == len(says)
    for finding, words in zip(findings, says, strict=True):
        assert finding.severity is WARNING
        assert words in finding.summary


def test_kills_are_counted():
    _, (finding,) = ask("mem-limit", node(limits=limits(**LIMITED, oom_kills=7)))
    assert finding.evidence[0] == "it killed 7 times since the cgroup was created"


def test_mem_limit_where_nothing_is_known():
    check, _ = ask("mem-limit", node(limits=limits(memory_available_bytes=None)))
    assert check.outcome is SKIPPED


@pytest.mark.parametrize(
    ("balancing", "nodes", "gpu_count", "severity"),
    [(0, 2, 8, None), (1, 1, 1, None), (1, 2, 8, WARNING), (2, 4, 8, WARNING), (1, 2, 0, INFO)],
)
def test_numa_balancing(balancing, nodes, gpu_count, severity):
    facts = node(limits=limits(numa_nodes=nodes, numa_balancing=balancing), software=software(), gpus=gpus(gpu_count))
    check, findings = ask("numa-balancing", facts)
    assert check.outcome is (failed(severity) if severity else PASSED)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    if severity:
        assert findings[0].fix == "sudo sysctl -w kernel.numa_balancing=0"


def test_numa_balancing_without_it():
    assert ask("numa-balancing", node(limits=limits(numa_balancing=None)))[0].outcome is SKIPPED


def ranks(count, cpus=range(64), **variables):
    names = {"LOCAL_WORLD_SIZE": str(count), **variables}
    return [process(n, cpus=cpus, **names) for n in range(count)]


@pytest.mark.parametrize(
    ("processes", "quota", "says", "fix"),
    [
        ([process(cpus=range(64))], None, None, None),
        ([process(cpus=range(8))], 8.0, None, None),
        (ranks(8, OMP_NUM_THREADS="8"), None, None, None),
        (ranks(8, OMP_NUM_THREADS="9"), None, "8 ranks with 9 threads each share 64 CPUs", "export OMP_NUM_THREADS=8"),
        (ranks(8, OMP_NUM_THREADS="4"), 16.0, "8 ranks with 4 threads", "export OMP_NUM_THREADS=2"),
        (ranks(8, OMP_NUM_THREADS="1"), 4.0, "a quota of 4 of 64 CPUs for 8 ranks", "give the ranks"),
        (ranks(8, cpus=[0]), None, "Fewer CPUs than ranks: 1 CPU for 8 ranks", "give the ranks"),
        ([process(cpus=range(64))], 0.5, "a quota of 0.5 of 64 CPUs for 1 rank", "give the ranks"),
        ([process(cpus=range(64))], 2.0, "64 threads per rank on a quota of 2 CPUs", "export OMP_NUM_THREADS=2"),
        ([process(cpus=range(64))], 33.0, None, None),
        ([process(cpus=range(64), OMP_NUM_THREADS="2")], 2.0, None, None),
        ([process(cpus=range(64), OMP_NUM_THREADS="2,4")], 40.0, None, None),
    ],
)
def test_cpu_quota(processes, quota, says, fix):
    check, findings = ask("cpu-quota", node(processes=processes, limits=limits(cpu_quota=quota)))
    assert check.outcome is (failed(*(one.severity for one in findings)) if says else PASSED)
    if says:
        (finding,) = findings
        assert finding.severity is WARNING
        assert says in finding.summary
        assert finding.fix.startswith(fix)


def test_ranks_that_are_bound_apart_have_the_cpus_of_all():
    bound = [process(n, cpus=range(8 * n, 8 * n + 8), LOCAL_WORLD_SIZE="8", OMP_NUM_THREADS="8") for n in range(8)]
    check, _ = ask("cpu-quota", node(processes=bound, limits=limits(cpus_allowed=tuple(range(8)))))
    assert (check.outcome, check.seen) == (PASSED, "64 CPUs for 8 ranks, OMP_NUM_THREADS=8")


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("processes", "outcome", "severity", "fix"),
    [
        ([process(cpus=range(64))], SKIPPED, None, ""),
        (ranks(8), FAILED, WARNING, "export OMP_NUM_THREADS=8"),
        (ranks(8, OMP_NUM_THREADS="8"), PASSED, None, ""),
        (ranks(8, OMP_NUM_THREADS="1"), PASSED, None, ""),
        (ranks(8, OMP_NUM_THREADS="1", **TORCHRUN), PASSED, INFO, "export OMP_NUM_THREADS=8"),
        (ranks(8, cpus=range(15), OMP_NUM_THREADS="1", **TORCHRUN), PASSED, None, ""),
        ([process(n, cpus=range(8 * n, 8 * n + 8), LOCAL_WORLD_SIZE="8") for n in range(8)], PASSED, None, ""),
        ([process(0, cpus=range(64), LOCAL_WORLD_SIZE="8")], FAILED, WARNING, "export OMP_NUM_THREADS=8"),
    ],
)
def test_omp(processes, outcome, severity, fix):
    check, findings = ask("omp", node(processes=processes, limits=limits()))
    assert check.outcome is outcome
    assert [(finding.severity, finding.fix) for finding in findings] == ([(severity, fix)] if severity else [])


# Clocks over nodes, and whether nodes look alike.


PASSED_CLOCK, FAILED_CLOCK, SKIPPED_CLOCK = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED


def clocks(*offsets, loose=(), nnodes=None):
    nodes = [
        node(f"node{n}", index=n, processes=[process(n)], clock=Clock(synchronized=n not in loose, offset_s=offset))
        for n, offset in enumerate(offsets)
    ]
    return fleet(*nodes, launcher=Launcher.TORCHRUN, nnodes=nnodes or len(nodes))


@pytest.mark.parametrize(
    ("facts", "severity", "hosts", "confidence", "says"),
    [
        (clocks(None), None, (), None, ""),
        (clocks(None, loose=[0]), None, (), None, ""),
        (clocks(None, 0.2, -0.3), None, (), None, ""),
        (clocks(None, 1.0), None, (), None, ""),
        (
            clocks(None, 0.1, 2.5),
            WARNING,
            ("node2",),
            Confidence.HIGH,
            "The clock of node2 is 2.4 s ahead of the others",
        ),
        (
            clocks(None, 0.1, -20.0),
            ERROR,
            ("node2",),
            Confidence.HIGH,
            "The clock of node2 is 20.0 s behind the others",
        ),
        (
            clocks(None, 30.0, 30.1),
            ERROR,
            ("node0",),
            Confidence.HIGH,
            "The clock of node0 is 30.0 s behind the others",
        ),
        (
            clocks(None, 14.9),
            WARNING,
            ("node0", "node1"),
            Confidence.LOW,
            "of node1 is 14.9 s ahead of the clock of node0",
        ),
        (clocks(None, 15.0), ERROR, ("node0", "node1"), Confidence.LOW, "treats live nodes as dead"),
        (clocks(None, -40.0, loose=[1]), ERROR, ("node1",), Confidence.MEDIUM, "node1 is 40.0 s behind the others"),
        (clocks(None, -40.0, loose=[0]), ERROR, ("node0",), Confidence.MEDIUM, "node0 is 40.0 s ahead of the others"),
        (
            clocks(None, 0, 20, -20, 0),
            ERROR,
            ("node2", "node3"),
            Confidence.HIGH,
            "clocks of node2 and node3 are up to",
        ),
        (clocks(None, 0.01, loose=[1]), INFO, ("node1",), Confidence.HIGH, "they currently agree within 0.01 s"),
        (clocks(None, None, loose=[0, 1]), WARNING, ("node0", "node1"), Confidence.HIGH, "could not be compared"),
        (clocks(None, loose=[0], nnodes=2), WARNING, ("node0",), Confidence.HIGH, "could not be compared"),
        (clocks(None, None), None, (), None, ""),
    ],
)
def test_clock(facts, severity, hosts, confidence, says):
    check, findings = ask("clock", facts)
    assert check.outcome is (failed(severity) if severity else PASSED_CLOCK), check
    if severity:
        (finding,) = findings
        assert (finding.severity, finding.hosts, finding.confidence) == (severity, hosts, confidence)
        assert says in finding.summary
        assert finding.fix.startswith("sudo ")


def test_some_far_off_and_some_a_little():
    _, findings = ask("clock", clocks(None, 0, 0, 0, 3, 100))
    assert [(finding.severity, finding.hosts) for finding in findings] == [(ERROR, ("node5",)), (WARNING, ("node4",))]


def test_two_containers_of_one_name_are_two_clocks():
    pair = [
        node("box", index=n, clock=Clock(synchronized=None, offset_s=offset)) for n, offset in enumerate((None, 20))
    ]
    check, (finding,) = ask("clock", fleet(*pair, launcher=Launcher.TORCHRUN))
    assert (finding.severity, finding.hosts) == (ERROR, ("box",))
    assert check.seen == "2 clocks within 20.00 s"


def test_of_two_nodes_of_one_name_the_one_without_time_keeping_is_off():
    pair = [
        node("box", index=n, clock=Clock(synchronized=n == 0, offset_s=offset)) for n, offset in enumerate((None, 20))
    ]
    _, (finding,) = ask("clock", fleet(*pair, launcher=Launcher.TORCHRUN))
    assert (finding.confidence, finding.summary.partition(":")[0]) == (
        Confidence.MEDIUM, "The clock of box is 20.0 s ahead of the others",
    )  # fmt: skip


def test_a_clock_that_was_not_read():
    unread = Unread(why=Why.TIMEOUT, reason="clock did not answer within 2 s")
    assert ask("clock", node(clock=unread))[0].outcome is Outcome.INCONCLUSIVE
    check, _ = ask("clock", node(clock=Clock(synchronized=None, offset_s=None)))
    assert check.seen == "only one node; its kernel reports clock synchronization: not known"


def alike(count, **changed):
    sections = {"software": software(hosts_lines=("a1",)), "torch": torch()}
    return [node(f"node{n}", **{**sections, **changed.get(f"node{n}", {})}) for n in range(count)]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"torch": Unread(why=Why.NOT_ASKED, reason="x")}, None),
        ({"software": software(hosts_lines=None)}, None),
        (
            {"software": software(executable="/usr/bin/python3", hosts_lines=("a1",))},
            "Python /usr/bin/python3 on node2, /venv",
        ),
        (
            {"software": software(os_name="Debian 12", hosts_lines=("a1",))},
            "system Debian 12 on node2, Ubuntu 24.04 LTS on 3 o",
        ),
        ({"software": software(hosts_lines=("a1", "b2"))}, "/etc/hosts (digest) "),
        ({"torch": torch(path="/opt/torch/__init__.py")}, "torch /opt/torch/__init__.py on node2, "),
    ],
)
def test_rootfs_same(changed, says):
    check, findings = ask("rootfs-same", fleet(*alike(4, node2=changed)))
    assert check.outcome is (failed(*(one.severity for one in findings)) if says else PASSED_CLOCK)
    if says:
        (finding,) = findings
        assert (finding.severity, finding.hosts) == (INFO, ("node2",))
        assert finding.summary.startswith(says)


def test_host_files_that_name_their_own_node_only_are_alike():
    nodes = [
        node(f"node{n}", software=software(hosts_lines=("a1", f"own{n}"), hosts_own=(f"own{n}",))) for n in range(3)
    ]
    whole = node("node3", software=software(hosts_lines=("a1", "own0", "own1", "own2")))
    assert ask("rootfs-same", fleet(*nodes, whole))[0].outcome is PASSED_CLOCK


def test_rootfs_of_one_node():
    assert ask("rootfs-same", fleet(*alike(1)))[0].outcome is SKIPPED_CLOCK
