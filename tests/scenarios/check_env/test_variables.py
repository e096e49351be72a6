"""What the command sees of variables, launchers, PCI and RDMA here; what torch itself does with wrong values."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.check_env.running import check_env, environment
from tests.scenarios.check_env.test_limits import in_mounts
from tests.scenarios.running import free_port

pytestmark = pytest.mark.usefixtures("preloaded_python")

VARIABLE_CHECKS = ("env-unknown", "env-value", "env-deprecated", "env-danger", "nccl-conf", "proxy-env")
EVERY_CLASS = {
    "NCCL_DEBUG": "WARN", "NCCL_DEBGU": "hunter2", "nccl_algo": "hunter2", "NCCL_QUX": "hunter2",
    "OFI_NCCL_X": "hunter2", "NCCL_BUFFSIZE": "4M", "NCCL_SOCKET_FAMILY": "ipv4",
    "TORCH_DISTRIBUTED_DEBUG": "VERBOSE", "NCCL_MAX_NRINGS": "4", "TORCH_DISTRIBUTED_TIMEOUTS": "60",
    "NCCL_LL_THRESHOLD": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0",
    "CUDA_LAUNCH_BLOCKING": "1", "SLURM_JWT": "hunter2",
}  # fmt: skip


def starts(seen):
    """Return the findings as kind, severity and the variable that they are about."""
    found = [(kind, severity, summary.removeprefix("nothing reads ")) for kind, severity, summary, _ in seen.findings]
    return {(kind, severity, text.split(" ")[0].rstrip(":;,")) for kind, severity, text in found}


def test_variables_of_every_class():
    seen = check_env(*VARIABLE_CHECKS, **EVERY_CLASS)
    assert starts(seen) == {
        ("env-unknown", "warning", "NCCL_DEBGU"),
        ("env-unknown", "warning", "nccl_algo"),
        ("env-unknown", "info", "NCCL_QUX"),
        ("env-value", "warning", "NCCL_BUFFSIZE=4M"),
        ("env-value", "warning", "NCCL_SOCKET_FAMILY=ipv4"),
        ("env-value", "error", "TORCH_DISTRIBUTED_DEBUG=VERBOSE"),
        ("env-deprecated", "warning", "NCCL_MAX_NRINGS"),
        ("env-deprecated", "warning", "TORCH_DISTRIBUTED_TIMEOUTS"),
        ("env-deprecated", "warning", "NCCL_LL_THRESHOLD"),
        ("env-danger", "warning", "NCCL_P2P_DISABLE=1"),
        ("env-danger", "warning", "CUDA_LAUNCH_BLOCKING=1"),
    }
    assert seen.status == 1
    assert "hunter2" not in json.dumps(seen.report)


def test_the_commands_of_the_findings_mend_the_environment():
    seen = check_env(*VARIABLE_CHECKS, **EVERY_CLASS)
    commands = "; ".join(fix for *_, fix in seen.findings)
    again = check_env(*VARIABLE_CHECKS, before=("bash", "-c", f'{commands}; exec "$@"', "bash"), **EVERY_CLASS)
    # What was misspelt or has a new name keeps its value under the right name, and that is judged in turn.
    assert {kind for kind, *_ in again.findings} <= {"env-value", "env-danger"}
    assert all("hunter2" in summary or "NCCL_ALGO" in summary for _, _, summary, _ in again.findings)


def test_the_machines_file_in_a_mount_namespace(tmp_path):
    etc = tmp_path / "etc"
    before = in_mounts(f"cp -a /etc {etc}; echo NCCL_P2P_DISABLE=1 >{etc}/nccl.conf; mount --bind {etc} /etc")
    seen = check_env("nccl-conf", "env-danger", before=before)
    assert [(kind, fix) for kind, _, _, fix in seen.findings] == [("nccl-conf", "sed -i 1d /etc/nccl.conf")]
    assert check_env("nccl-conf", before=before, NCCL_P2P_DISABLE="0").findings == []


def test_what_wrap_sets_for_its_ranks_is_no_danger(tmp_path):
    command = [
        sys.executable, "-m", "ddpdoctor", "wrap", "--report-dir", str(tmp_path / "wrap"), "--nproc-per-node", "1",
        "-m", "ddpdoctor", "check-env", "--no-torch", "--report-dir", str(tmp_path), *VARIABLE_CHECKS,
    ]  # fmt: skip
    subprocess.run(command, check=False, capture_output=True, timeout=200, env=environment())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["findings"] == []
    assert check_env("env-danger", TORCH_DISTRIBUTED_DEBUG="DETAIL").only()[0] == "env-danger"


JOB = """
import torch.distributed as dist, torch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print("done")
"""


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "VERBOSE", "must be OFF, INFO, or DETAIL"),
        ("TORCH_GLOO_LAZY_INIT", "on", "Invalid value for environment variable: TORCH_GLOO_LAZY_INIT"),
        ("GLOO_DEVICE_TRANSPORT", "tcp", "unsupported gloo device"),
        ("TORCH_DIST_INIT_BARRIER", "true", "ValueError"),
    ],
)
def test_torch_itself_stops_at_a_value_that_is_an_error_here(name, value, says):
    (finding,) = check_env("env-value", **{name: value}).findings
    assert finding[1] == "error"
    job = subprocess.run(
        [sys.executable, "-c", JOB], check=False, capture_output=True, text=True, timeout=200,
        env=environment(**{name: value}),
    )  # fmt: skip
    assert job.returncode != 0
    assert says in job.stderr
    assert says.removesuffix("Error") in finding[2]


# Variables that a launcher sets, and those that a plain shell lacks.


LAUNCH_CHECKS = (
    "env-complete", "env-range", "rank-set", "ws-same", "rdzv-id-same", "slurm-shape", "srun-cpus", "gpus-per-task",
    "k8s", "master-numeric", "master-loopback", "rdzv-host", "port-range",
)  # fmt: skip


def test_a_plain_shell_has_nothing_to_check():
    assert check_env(*LAUNCH_CHECKS).outcomes == dict.fromkeys(LAUNCH_CHECKS, "skipped")


def test_torchrun_on_one_host_is_healthy():
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={free_port()}")
    seen = check_env(*LAUNCH_CHECKS, before=(*launcher, "--no-python"))
    assert seen.findings == []
    assert [seen.outcomes[kind] for kind in ("env-complete", "env-range", "rank-set", "ws-same")] == ["passed"] * 4


# A machine without RDMA must not be reported that it is ill.


RDMA_CHECKS = (
    "ib-state", "ib-rate", "ib-flap", "roce-gid", "ib-hca-env", "peermem", "memlock", "uverbs", "ib-disabled",
)  # fmt: skip
LEFTOVERS = {"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_DISABLE": "1", "NCCL_IB_GID_INDEX": "3"}


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="this machine may have RDMA devices")
@pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists(), reason="NCCL_IB_HCA without a device is an error beside a GPU"
)
def test_a_machine_without_rdma_is_well_whatever_its_limits_and_variables_say():
    seen = check_env(*RDMA_CHECKS, before=("prlimit", "--memlock=65536:65536"), **LEFTOVERS)
    assert seen.findings == []
    reasons = {kind: check["reason"] for kind, check in seen.checks.items()}
    assert reasons == dict.fromkeys(RDMA_CHECKS, "no RDMA device found")
