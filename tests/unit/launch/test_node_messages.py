"""What members tell each other with their beats fits in, and comes back as it was; what is no message is none."""

import pytest

from ddpdoctor.exchange.store import MAX_NOTICE_BYTES, MAX_SAID_BYTES
from ddpdoctor.launch.nodes.node_messages import LAST, Board, Pulse, read_board, read_pulse, write_board, write_pulse
from ddpdoctor.launch.watching.suspicion import NodeProgress

LARGE = Pulse(
    progress=NodeProgress(
        alive=99_999, starting=True, never=True, begun=True, waits_s=1234567.8, stuck_s=1234567.8, still=99_999,
        idle=True, ended_s=1234567.8, lives_on=True,
    ),
    answered=LAST, moved=True, heard=LAST, status=-9, ranks=(100_000, 199_999),
)  # fmt: skip


@pytest.mark.parametrize("pulse", [Pulse(progress=NodeProgress()), LARGE])
def test_a_pulse_comes_back(pulse):
    said = write_pulse(pulse)
    assert read_pulse(said) == pulse
    assert len(said) <= MAX_SAID_BYTES


@pytest.mark.parametrize(
    "said", [b"", b"{}", b"[]", b"[[],0,0,0,0,0]", b"\xff", b'[["x",0,0,0,0,0,0,0,0,0],0,0,0,0,0]']
)
def test_a_beat_that_says_anything_else_is_no_pulse(said):
    assert read_pulse(said) is None


@pytest.mark.parametrize("board", [Board(), Board(request=LAST, verdict=LAST, roster=LAST, ends=True, left=True)])
def test_a_board_comes_back(board):
    notice = write_board(board)
    assert read_board(notice) == board
    assert len(notice) <= MAX_NOTICE_BYTES


@pytest.mark.parametrize("notice", [b"", b"[1,2]", b"{}", b'["a",0,0,0,0]', b"null"])
def test_a_notice_of_anything_else_is_no_board(notice):
    assert read_board(notice) is None
