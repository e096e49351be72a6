import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.limits import Limit
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, node, process
from tests.rules.environment.link_facts import hca, rdma, roce
from tests.rules.environment.machine_facts import GIB, MIB, gpus, limits

NO_DRIVER = Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")
EVERYDAY = rdma(roce(0, rate=25.0), uverbs=(), peermem=False, dmabuf=False)


@pytest.mark.parametrize("kind", ["peermem", "memlock", "uverbs"])
def test_nobody_uses_rdma_without_a_gpu(kind):
    section = rdma(peermem=False, dmabuf=False, uverbs=())
    little = limits(memlock=Limit(soft=65536, hard=65536))
    check, _ = ask(kind, node(rdma=section, gpus=NO_DRIVER, limits=little))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, NO_DRIVER.reason)
    check, _ = ask(kind, node(rdma=section, gpus=gpus(0), limits=little))
    assert check.outcome is Outcome.SKIPPED


@pytest.mark.parametrize("kind", ["peermem", "memlock", "uverbs"])
def test_the_everyday_card_of_a_machine_is_no_rdma_network(kind):
    little = limits(memlock=Limit(soft=65536, hard=65536))
    check, _ = ask(kind, node(rdma=EVERYDAY, gpus=gpus(8), limits=little))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, "no RDMA network is up here")


@pytest.mark.parametrize(
    ("peermem", "dmabuf", "outcome"),
    [
        (True, False, Outcome.PASSED),
        (False, True, Outcome.PASSED),
        (False, None, Outcome.INCONCLUSIVE),
        (False, False, Outcome.FAILED),
    ],
)
def test_peermem_or_dmabuf_is_needed(peermem, dmabuf, outcome):
    check, findings = ask("peermem", node(rdma=rdma(peermem=peermem, dmabuf=dmabuf), gpus=gpus(8)))
    assert check.outcome is outcome
    if findings:
        assert findings[0].severity is Severity.WARNING
        assert findings[0].fix == "modprobe nvidia-peermem (on the host)"


def test_geforce_cannot_do_it():
    section = rdma(peermem=False, dmabuf=False)
    check, _ = ask("peermem", node(rdma=section, gpus=gpus(2, name="NVIDIA GeForce RTX 4090")))
    assert check.outcome is Outcome.SKIPPED


def ask_memlock(soft, hard, section=None, **variables):
    facts = node(
        rdma=section or rdma(),
        gpus=gpus(8),
        limits=limits(memlock=Limit(soft=soft, hard=hard)),
        processes=[process(**variables)],
    )
    return ask("memlock", facts)


@pytest.mark.parametrize(
    ("soft", "severity", "words"),
    [
        (65536, Severity.ERROR, "64 KiB"),
        (8 * MIB, Severity.ERROR, "8 MiB"),
        (GIB - 1, Severity.ERROR, "1023 MiB"),
        (GIB, Severity.WARNING, "1 GiB"),
        (64 * GIB - 1, Severity.WARNING, "64 GiB"),
    ],
)
def test_a_limit_on_locked_memory(soft, severity, words):
    _, (finding,) = ask_memlock(soft, soft)
    assert finding.severity is severity
    assert finding.summary == f"RDMA can lock only {words} of memory: NCCL fails if it registers more"
    assert "--ulimit memlock=-1" in finding.fix
    assert "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf" in finding.fix


@pytest.mark.parametrize("soft", [None, 64 * GIB])
def test_enough_locked_memory_passes(soft):
    assert ask_memlock(soft, soft)[0].outcome is Outcome.PASSED


def test_a_capability_makes_the_limit_void():
    check, _ = ask_memlock(8 * MIB, 8 * MIB, rdma(ipc_lock=True))
    assert (check.outcome, "CAP_IPC_LOCK" in check.seen) == (Outcome.PASSED, True)


def test_the_shell_mends_a_soft_limit():
    _, (finding,) = ask_memlock(8 * MIB, None)
    assert finding.fix == "ulimit -l unlimited"


def test_slurm_hands_limits_on():
    _, (finding,) = ask_memlock(8 * MIB, 8 * MIB, SLURM_JOB_ID="7")
    assert "PropagateResourceLimitsExcept=MEMLOCK" in finding.fix


def test_efa_locks_memory_too():
    efa = rdma(hca(0, name="rdmap16s27", link_layer="Unspecified"))
    assert ask_memlock(8 * MIB, 8 * MIB, efa)[0].outcome is Outcome.FAILED


def test_devices_that_cannot_be_opened_come_first():
    check, _ = ask_memlock(8 * MIB, 8 * MIB, rdma(uverbs=()))
    assert check.outcome is Outcome.SKIPPED


def test_a_limit_that_is_not_known_is_no_answer():
    facts = node(rdma=rdma(), gpus=gpus(8), limits=limits(memlock=None))
    assert ask("memlock", facts)[0].outcome is Outcome.INCONCLUSIVE


def ask_uverbs(section, **variables):
    return ask("uverbs", node(rdma=section, gpus=gpus(8), processes=[process(0, **variables)]))


def test_device_files_that_open_pass():
    check, _ = ask_uverbs(rdma())
    assert (check.outcome, check.seen) == (Outcome.PASSED, "4 of 4 devices can be opened")


@pytest.mark.parametrize(
    ("variables", "severity"),
    [
        ({}, Severity.WARNING),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, Severity.WARNING),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}, Severity.ERROR),
        ({"NCCL_IB_HCA": "mlx5"}, Severity.ERROR),
        ({"NCCL_NET": "IB"}, Severity.ERROR),
    ],
)
def test_files_that_are_missing(variables, severity):
    _, (finding,) = ask_uverbs(rdma(uverbs=()), **variables)
    assert finding.severity is severity
    assert finding.summary.startswith("This process cannot use RDMA: /dev/infiniband/uverbs0")
    assert "are missing" in finding.summary
    assert finding.fix.startswith("docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1")


def test_files_that_may_not_be_opened():
    files = tuple(f"uverbs{n}" for n in range(4))
    _, (finding,) = ask_uverbs(rdma(uverbs=(), uverbs_denied=files))
    assert "cannot be opened" in finding.summary
    assert finding.fix.startswith("ls -l /dev/infiniband")


def test_a_module_that_is_not_loaded():
    _, (finding,) = ask_uverbs(rdma(hca(0, uverbs=None), uverbs=()))
    assert finding.fix == "modprobe ib_uverbs (on the host)"


def test_a_pod_with_some_of_the_devices_passes():
    check, _ = ask_uverbs(rdma(uverbs=("uverbs2",)))
    assert (check.outcome, check.seen) == (Outcome.PASSED, "1 of 4 devices can be opened")


def test_a_device_that_is_asked_for_and_not_given():
    _, (finding,) = ask_uverbs(rdma(uverbs=("uverbs2",)), NCCL_IB_HCA="=mlx5_1,mlx5_2")
    assert (finding.severity, "uverbs1 is missing" in finding.summary) == (Severity.ERROR, True)
