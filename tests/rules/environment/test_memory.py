"""Shared memory, memory limits, NUMA balancing, CPUs and threads."""

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from tests.rules.environment.build import ask, failed, node, process
from tests.rules.environment.machine_facts import GIB, MIB, gpus, limits, shm, software

PASSED, FAILED, SKIPPED, UNKNOWN = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED, Outcome.INCONCLUSIVE
ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
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
        (
            shm(**STALE, stale_bytes=4 * GIB),
            None,
            WARNING,
            "has leftover files of dead processes",
            "rm /dev/shm/nccl-",
        ),
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
        (
            [process(cpus=range(64))],
            2.0,
            "64 threads per rank on a quota of 2 CPUs",
            "export OMP_NUM_THREADS=2",
        ),
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
