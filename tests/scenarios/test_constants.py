"""Buffers of models under FSDP and tensor parallelism, which nothing makes equal on all ranks after ``to_empty``."""

from pathlib import Path

import pytest

from tests.scenarios.running import PATIENT, check_finished, run

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("preloaded_python")]


@pytest.mark.parametrize(
    ("kind", "fault", "ranks", "confidence", "words"),
    [
        ("fsdp2", "empty", 2, "high", "nothing was seen to write to blocks.0.inv_freq, blocks.1.inv_freq on rank 1"),
        ("fsdp2", "other", 3, "high", "no wrapper of the model makes blocks.0.inv_freq, blocks.1.inv_freq equal"),
        ("fsdp1", "other", 3, "high", "no wrapper of the model makes blocks.0.inv_freq, blocks.1.inv_freq equal"),
        ("tensor", "other", 3, "high", "no wrapper of the model makes blocks.0.inv_freq, blocks.1.inv_freq equal"),
    ],
)
def test_a_buffer_without_the_common_value_is_found(
    kind: str, fault: str, ranks: int, confidence: str, words: str, tmp_path: Path
) -> None:
    args = ("--debug-level", "OFF", *PATIENT)
    ran = run("constants", tmp_path / "run", *args, ranks=ranks, args=(kind, fault))
    verdict = next((one for one in ran.report["findings"] if one["code"] == "DD502"), None)
    assert verdict is not None, ran.stderr
    assert kind == "tensor" or ran.report["verdict"] == verdict, ran.report["verdict"]  # there the gradients differ too
    assert (verdict["ranks"], verdict["tensor"]) == ([ranks - 1], "blocks.0.inv_freq"), verdict
    assert verdict["confidence"] == confidence, verdict
    assert words in verdict["summary"], verdict
    assert "after to_empty()" in verdict["fix"], verdict


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "tensor"])
def test_what_ranks_have_for_themselves_is_no_difference(kind: str, tmp_path: Path) -> None:
    ran = run("constants", tmp_path / "run", "--debug-level", "OFF", *PATIENT, ranks=3, args=(kind, "none"))
    assert ran.report["verdict"] is None, ran.report["verdict"]
    check_finished(ran)
    streams = [stream for stream in ran.report["data"]["consistency"]["streams"] if stream["model"] == 2]
    assert [stream["compared"] for stream in streams] == [1], streams
    assert {one["code"] for one in ran.report["findings"]}.isdisjoint({"DD502", "DD901"}), ran.report["findings"]
