"""One row a rank: what it did until a job that hung was stopped, not what it raised then."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.pictures import rank_row
from tests.rules.build import NOW, S, call, crashed, error, in_backward, phase, rank

FAILED_LATER = replace(in_backward(0), raised=(error("RuntimeError", at=NOW + S),))

RECEIVE = call("irecv", index=98, peer=1, is_async=True)
WAITS = rank(0, open_calls=(RECEIVE, phase("work_wait", 22, index=99, awaits=98)))


@pytest.mark.parametrize(
    ("seen", "stopped_ns", "state"),
    [
        (FAILED_LATER, NOW, "in backward"),
        (FAILED_LATER, None, "raised RuntimeError"),
        (FAILED_LATER, NOW + 2 * S, "raised RuntimeError"),
        (crashed(0, error(at=NOW + S)), NOW, "raised ValueError"),
        (crashed(0, error("RuntimeError", in_call="work_wait")), None, "raised RuntimeError in a wait"),
        (WAITS, None, "in irecv"),
    ],
)
def test_state(seen, stopped_ns, state):
    assert rank_row(seen, stopped_ns).state == state
