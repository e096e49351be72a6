"""What ``ddpdoctor.watch`` refuses, and what importing it costs."""

import json
import os
import subprocess
import sys

import pytest

import ddpdoctor


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"hang_timeout": 0}, "hang_timeout is 0"),
        ({"hang_timeout": float("nan")}, "hang_timeout is nan"),
        ({"on_hang": "auto"}, "on_hang is 'auto'; it must be one of report, kill"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_before_anything_starts(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ddpdoctor.watch(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "statement", ["import ddpdoctor; ddpdoctor.watch()", "import ddpdoctor.integrations.pytest_plugin"]
)
def test_nothing_heavy_is_imported_before_it_starts(statement: str) -> None:
    code = f"import json, sys; old = set(sys.modules); {statement}; print(json.dumps([*set(sys.modules) - old]))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    heavy = {"torch", "rich", "psutil", "numpy", "pytest", "ddpdoctor.launch", "ddpdoctor.recorder"}

    assert heavy.isdisjoint(json.loads(done.stdout))


def test_a_watch_that_has_not_started_has_no_report_and_may_be_stopped() -> None:
    watch = ddpdoctor.watch()
    watch.stop()

    assert watch.report() == ""
