"""The checks on PCI and RDMA, on this machine as it is: one without RDMA must not be reported that it is ill."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.running import clean_environment

RDMA_CHECKS = (
    "ib-state", "ib-rate", "ib-flap", "roce-gid", "ib-hca-env", "peermem", "memlock", "uverbs", "ib-disabled",
)  # fmt: skip
PCI_CHECKS = ("pcie", "acs-iommu", "numa")
LEFTOVERS = {"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_DISABLE": "1", "NCCL_IB_GID_INDEX": "3"}


def check_env(*checks, before=None, **variables):
    command = [sys.executable, "-m", "ddpdoctor", "check-env", *checks, "--format", "json", "--no-torch"]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env=clean_environment() | variables,
        preexec_fn=before,
    )
    assert done.stdout.startswith("{"), done.stderr
    return json.loads(done.stdout)


def lower_memlock():
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="this machine may have RDMA devices")
@pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists(), reason="NCCL_IB_HCA without a device is an error beside a GPU"
)
def test_a_machine_without_rdma_is_well_whatever_its_limits_and_variables_say():
    report = check_env(*RDMA_CHECKS, before=lower_memlock, **LEFTOVERS)
    assert report["findings"] == []
    assert {check["id"]: check["reason"] for check in report["checks"]} == dict.fromkeys(
        RDMA_CHECKS, "there is no RDMA device"
    )


def test_pci_of_this_machine_is_reported():
    report = check_env(*PCI_CHECKS)
    assert {check["id"] for check in report["checks"]} == set(PCI_CHECKS)
    assert all(check["outcome"] in {"passed", "skipped", "failed"} for check in report["checks"])
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"]
