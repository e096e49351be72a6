"""ecc-unc, row-remap, retired-pages, sram-threshold."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, node
from tests.rules.environment.gpu_nodes import all_named, gpu_node, gpus_of, with_gpu

E, W = Severity.ERROR, Severity.WARNING
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
