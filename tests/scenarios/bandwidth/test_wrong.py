"""One element of one size that is wrong in one rank is found, and the rank is named."""

from pathlib import Path

import pytest

from tests.scenarios.bandwidth.running import QUICK, bench

pytestmark = pytest.mark.usefixtures("preloaded_python")

WRONG = Path(__file__).parent / "wrong"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_altered_element_is_named_with_rank_index_expected_and_found(dtype):
    ran = bench(*QUICK, "--dtype", dtype, "--format", "json", PYTHONPATH=str(WRONG), WRONG_RANK="1")
    report = ran.report
    verdict = report["verdict"]
    (wrong,) = report["data"]["wrong"]

    assert (ran.status, verdict["code"], verdict["kind"], verdict["ranks"]) == (1, "DD401", "wrong-data", [1])
    assert (wrong["rank"], wrong["size_bytes"], wrong["index"], wrong["count"]) == (1, 2048, 137, 1)
    assert wrong["found"] == wrong["expected"] + 1
    assert {row["wrong"] for row in report["data"]["results"] if row["size_bytes"] == 2048} == {1}
    assert {row["wrong"] for row in report["data"]["results"] if row["size_bytes"] != 2048} == {0}
    reported = " ".join([verdict["summary"], *verdict["evidence"]])
    assert all(word in reported for word in ("137", "2 KiB", dtype))


def test_right_data_are_no_finding():
    report = bench(*QUICK, "--format", "json", PYTHONPATH=str(WRONG)).report

    assert report["verdict"] is None
    assert report["data"]["wrong"] == []
    assert {row["wrong"] for row in report["data"]["results"]} == {0}
