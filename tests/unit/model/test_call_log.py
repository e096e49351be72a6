"""Packed calls are the calls that were packed."""

import pytest

from ddpdoctor.model.call_log import pack_calls
from tests.rules.build import call, phase

CALLS = (
    phase("new_group", 5, index=1, open_=False),
    call("all_reduce", 1, 20, index=2, open_=False),
    phase("backward", 30, index=3, group="0", begun=1, open_=False),
    call("all_reduce", 3, 20, index=4, open_=True),
    call("recv", None, 40, index=5, peer=2, open_=False),
    call("all_reduce", 4, 20, index=6, failed=True, open_=False),
)


def test_each_call_comes_back_as_it_was() -> None:
    log = pack_calls(CALLS)
    assert tuple(log) == CALLS
    assert (log[0], log[-1]) == (CALLS[0], CALLS[-1])
    assert len(log) == len(CALLS)


@pytest.mark.parametrize("part", [slice(2), slice(-2, None), slice(1, 5, 2), slice(9, 12)])
def test_a_slice_is_packed_as_well(part: slice) -> None:
    assert tuple(pack_calls(CALLS)[part]) == CALLS[part]


def test_open_calls_are_distinguished_from_those_that_have_ended() -> None:
    log = pack_calls(CALLS)
    assert log.open() == (CALLS[3],)
    assert tuple(log.ended()) == (*CALLS[:3], *CALLS[4:])
    assert pack_calls(CALLS[:2]).open() == ()


def test_equal_calls_are_one_kind_however_many_there_are() -> None:
    log = pack_calls([call("all_reduce", n, 20, index=n, open_=False) for n in range(1, 2001)])
    assert len(log.kinds) == 1
    assert log.counts == {log.kinds[0]: 2000}
    assert log.last == {log.kinds[0]: 1999}


def test_calls_are_found_by_their_kind() -> None:
    log = pack_calls(CALLS)
    assert log.of_kinds(lambda kind: kind.failed) == (CALLS[5],)
    assert log.of_kinds(lambda kind: kind.op == "send") == ()
    assert log.last_of_kinds(lambda kind: kind.op == "all_reduce") == CALLS[5]
    assert log.last_of_kinds(lambda kind: kind.op == "send") is None


def test_no_calls_at_all() -> None:
    log = pack_calls(())
    assert (tuple(log), log.open(), len(log.ended()), log.last) == ((), (), 0, {})
    assert pack_calls(log) is log
