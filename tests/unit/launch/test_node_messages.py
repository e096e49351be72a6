"""What members tell each other with their beats fits in, and comes back as it was; what is no message is none."""

import pytest

from ddpdoctor.exchange.store import MAX_NOTICE_BYTES, MAX_SAID_BYTES
from ddpdoctor.launch.nodes.node_messages import LAST, Board, Pulse, read_board, read_pulse, write_board, write_pulse
from ddpdoctor.launch.watching.suspicion import NodeProgress

LARGE = Pulse(
    progress=NodeProgress(
        alive=99_999, starting=True, never=True, begun=True, waits_s=1234567.8, stuck_s=1234567.8, still=99_999,
        stood=99_999, idle=True, ended_s=1234567.8, lives_on=True,
    ),
    answered=LAST, moved=True, heard=LAST, status=-9, ranks=(199_000, 199_999),
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


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ("[4,7]", (4, 5, 6, 7)),
        ("[4,4]", (4,)),
        ("[0,9000000000000000000]", ()),
        ("[0,2000]", ()),
        ("[-5,7]", ()),
        ("[7,4]", ()),
        ("[9000000000000000000,9000000000000000001]", ()),
    ],
)
def test_only_ranks_that_a_node_can_have_are_made_from_the_first_and_the_last(said, ranks):
    """60 bytes can ask for any number of them."""
    pulse = read_pulse(b"[[2,0,0,1,null,0.0,null,0,0,0,null,0],0,0,0,null,%s]" % said.encode())
    assert (pulse.progress.alive, pulse.all_ranks) == (2, ranks)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 30])
@pytest.mark.parametrize("place", range(14))
def test_a_number_that_is_none_makes_no_pulse(number, place):
    values = ["2", "0", "0", "1", "null", "0.0", "null", "0", "0", "0", "null", "0", "0", "0"]
    said = ",".join([*values[:place], number, *values[place + 1 :]])
    progress, rest = said.split(",")[:12], said.split(",")[12:]
    assert read_pulse(f"[[{','.join(progress)}],{','.join(rest)},0,null,null]".encode()) is None


@pytest.mark.parametrize("board", [Board(), Board(request=LAST, verdict=LAST, roster=LAST, ends=True, left=True)])
def test_a_board_comes_back(board):
    notice = write_board(board)
    assert read_board(notice) == board
    assert len(notice) <= MAX_NOTICE_BYTES


@pytest.mark.parametrize(
    "notice", [b"", b"[1,2]", b"{}", b'["a",0,0,0,0]', b"null", b"[1,2,Infinity,0,0]", b"[1,1e999,0,0,0]", b"[" * 256]
)
def test_a_notice_of_anything_else_is_no_board(notice):
    assert read_board(notice) is None
