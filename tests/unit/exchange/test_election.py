"""Where the first member never comes, the lowest of those that are there serves the meeting in a shared folder."""

import threading

import pytest

from ddpdoctor.exchange.mailbox import FOLDER
from ddpdoctor.exchange.meeting import SETTLE_S, HostedMeeting, ServerCandidate, find_deputy
from ddpdoctor.exchange.store import StoreError

TOKEN = b"token"


class Waiting:
    """Members that wait in one folder, by a clock of the test's own."""

    def __init__(self, path, *numbers):
        self.now_s = 100.0
        self.members = {number: ServerCandidate(path, number, lambda: self.now_s) for number in numbers}

    def pass_time(self, seconds, without=()):
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            for number, member in self.members.items():
                if number not in without:
                    member.update()

    @property
    def lowest(self):
        return [number for number, member in self.members.items() if member.is_lowest]


def test_nobody_serves_before_the_others_could_be_seen(tmp_path):
    waiting = Waiting(tmp_path, 3, 1, 2)
    waiting.pass_time(SETTLE_S - 0.5)
    assert waiting.lowest == []
    waiting.pass_time(1)
    assert waiting.lowest == [1]


def test_who_has_no_number_comes_after_all_that_have_one(tmp_path):
    waiting = Waiting(tmp_path, None, 7)
    waiting.pass_time(SETTLE_S + 1)
    assert waiting.lowest == [7]


def test_of_two_with_the_same_number_one_serves(tmp_path):
    """So it is with a node rank that was given twice."""
    waiting = Waiting(tmp_path, 1)
    waiting.members["again"] = ServerCandidate(tmp_path, 1, lambda: waiting.now_s)
    waiting.pass_time(SETTLE_S + 1)
    assert len(waiting.lowest) == 1


def test_one_that_was_killed_is_not_waited_for(tmp_path):
    waiting = Waiting(tmp_path, 1, 2)
    waiting.pass_time(SETTLE_S - 1)
    assert not waiting.members[2].is_lowest
    waiting.pass_time(SETTLE_S + 1, without=(1,))
    assert waiting.members[2].is_lowest


def test_what_a_former_run_left_is_nobody(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"here-00000000-{'0' * 16}").write_bytes(b"7")
    waiting = Waiting(tmp_path, 2)
    waiting.pass_time(SETTLE_S + 1)
    assert waiting.lowest == [2]


def test_one_that_leaves_takes_its_file_away(tmp_path):
    waiting = Waiting(tmp_path, 1)
    waiting.pass_time(1)
    waiting.members[1].close()
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_one_serves_and_the_others_find_it(tmp_path):
    """It is the lowest, unless that one stands still for so long that it counts as gone, as on a very busy machine."""
    results = {}

    def wait(number):
        client = find_deputy(tmp_path, TOKEN, number, 100)
        results[number] = "serves" if client is None else client.add("guests", 1)
        if client is None:
            hosted.serve_folder(tmp_path)

    with HostedMeeting(None, TOKEN) as hosted:
        threads = [threading.Thread(target=wait, args=(number,)) for number in (3, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(str, results.values())) == ["1", "serves"]


def test_a_lower_one_that_serves_nothing_is_waited_for_until_the_limit(tmp_path):
    lower, ended = ServerCandidate(tmp_path, 0), threading.Event()

    def keep():
        while not ended.wait(0.1):
            lower.update()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        with pytest.raises(StoreError, match="a node with a lower number has joined"):
            find_deputy(tmp_path, TOKEN, 1, SETTLE_S + 0.3)
    finally:
        ended.set()
        thread.join()
