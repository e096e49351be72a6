"""One row a rank: what it did until a job that hung was stopped, not what it raised then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.rows import rank_row
from tests.rules.build import NOW, S, crashed, error, in_backward

FAILED_LATER = replace(in_backward(0), raised=(error("RuntimeError", at=NOW + S),))


@pytest.mark.parametrize(
    ("rank", "stopped_ns", "state"),
    [
        (FAILED_LATER, NOW, "in backward"),
        (FAILED_LATER, None, "raised RuntimeError"),
        (FAILED_LATER, NOW + 2 * S, "raised RuntimeError"),
        (crashed(0, error(at=NOW + S)), NOW, "raised ValueError"),
    ],
)
def test_state(rank, stopped_ns, state):
    assert rank_row(rank, stopped_ns).state == state
