"""Notes about gradients become records, also where they are damaged."""

import base64
import json
import zlib
from typing import Any

from ddpdoctor.collect.rank.gradient_times import read_gradient_times
from ddpdoctor.model.gradient_times import GradientTimes

COLUMNS = {"sizes": [400, 40], "ready": [2500, -1], "buckets": [440]}


def note(columns: Any = COLUMNS, **more: Any) -> dict[str, Any]:
    packed = base64.b64encode(zlib.compress(json.dumps(columns).encode())).decode()
    fields = {"group": "0", "readings": 3, "reductions": 20, "compute_us": 3000, "exposed_us": 1500}
    return {"k": "gradient_times", "n": 1, "columns": packed, **fields, **more}


def test_times_and_settings_of_a_model_are_read() -> None:
    assert read_gradient_times([note(cap=1024, finds_unused=1, static=0, same_unused=1, unused_bytes=40)]) == (
        GradientTimes(
            number=1, group="0", sizes_bytes=(400, 40), ready_ms=(2.5, None), bucket_bytes=(440,), compute_end_ms=3.0,
            exposed_ms=1.5, readings=3, reductions=20, cap_bytes=1024, finds_unused=True, static_graph=False,
            unused_bytes=40, same_unused=True,
        ),
    )  # fmt: skip


def test_the_last_note_of_each_model_counts() -> None:
    read = read_gradient_times([note(), note(n=2), {"k": "ddp"}, note(readings=12)])
    assert [(times.number, times.readings) for times in read] == [(1, 12), (2, 3)]


def test_a_damaged_note_is_left_out() -> None:
    damaged = [note(n=1, columns="???"), note({"sizes": [1, 2], "ready": [1]}, n=2), note([], n=3), note({}, n=4)]
    assert read_gradient_times([*damaged, note(n=5)])[0].number == 5
