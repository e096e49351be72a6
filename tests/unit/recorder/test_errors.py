"""What the recorder can say of an error while the script still has it in hand."""

import threading

from ddpdoctor.recorder.stacks import errors
from ddpdoctor.recorder.state import here


def asked_from_another_thread() -> object:
    answers = []
    asker = threading.Thread(target=lambda: answers.append(errors.handled_now()))
    asker.start()
    asker.join()
    return answers[0]


def read_shard() -> None:
    raise ValueError("bad shard")


def test_the_error_that_the_main_thread_handles_is_told(monkeypatch) -> None:
    monkeypatch.setattr(here, "main_thread", threading.get_ident())
    assert asked_from_another_thread() is None
    try:
        read_shard()
    except ValueError:
        told = asked_from_another_thread()
    assert (told["type"], told["text"]) == ("ValueError", "bad shard")
    assert told["frames"][-1]["n"] == "read_shard"
    assert asked_from_another_thread() is None
