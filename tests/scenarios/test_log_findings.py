"""Findings of real jobs in the TensorBoard logs that their scripts wrote."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import metrics
from tests.scenarios.running import PATIENT, run
from tests.web import Receiver

pytestmark = [
    pytest.mark.usefixtures("preloaded_python"),
    pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning"),
]


def test_the_report_is_a_text_beside_the_scripts_own_events(tmp_path: Path) -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    logs = tmp_path / "logs"
    ran = run("logs_and_fails", tmp_path / "run", *PATIENT, "--log-findings", ranks=2, args=(str(logs),))
    assert ran.report["verdict"]["code"] == "DD604"
    assert "--log-findings" not in ran.stderr
    (ours,) = logs.glob("*.ddpdoctor")
    seen = EventAccumulator(str(logs))
    seen.Reload()
    assert [event.step for event in seen.Scalars("loss")] == [0, 1, 2]
    assert seen.Tags()["tensors"] == ["ddpdoctor/report/text_summary"] or seen.Tags()["tensors"] == ["ddpdoctor/report"]
    (event,) = seen.Tensors(seen.Tags()["tensors"][0])
    text = event.tensor_proto.string_val[0].decode()
    assert "DD604 crash, rank 1" in text
    page = markdown_to_safe_html(text)
    assert "example.org) sample" in page
    assert "<b>" not in page
    assert 'href="https://example.org' not in page
    assert ours.stat().st_size < 100_000


def test_without_the_options_nothing_is_added_written_or_sent(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with Receiver(read=metrics.decode) as receiver:
        ran = run(
            "logs_and_fails", tmp_path / "run", *PATIENT, ranks=2, args=(str(logs),),
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.base,
        )  # fmt: skip
    assert ran.report["verdict"]["code"] == "DD604"
    assert len(list(logs.iterdir())) == 1
    assert receiver.received == []
    assert not list(tmp_path.rglob("*.prom"))
