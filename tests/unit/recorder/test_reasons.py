"""The error behind one that a library of torch's raised on account of it."""

import traceback
from typing import Any

import pytest

from ddpdoctor.recorder.stacks.error_details import reason_of

LIBRARY = "/usr/lib/site-packages/torch/distributed/library.py"
WRAPPING = """
def run(stage):
    try:
        stage()
    except Exception as error:
        raise RuntimeError("stage failed") from error
"""


def library() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(WRAPPING, LIBRARY, "exec"), names)
    return names


def bad_stage() -> None:
    raise ValueError("no such sample")


def bad_collective() -> None:
    names: dict[str, Any] = {}
    exec(compile("def wait():\n    raise RuntimeError('closed by peer')", LIBRARY, "exec"), names)
    names["wait"]()


class CheckpointException(BaseException):
    def __init__(self, failures: dict[int, Any]) -> None:
        super().__init__("failed")
        self.failures = failures


def raised_by(action: Any) -> BaseException:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - that of a checkpoint is no Exception
        return error
    raise AssertionError


def reason(error: BaseException, rank: int = 0, in_calls: tuple[BaseException | None, ...] = ()) -> Any:
    return reason_of(error, rank, in_calls.__contains__)


def test_what_a_library_wraps_is_the_error_of_the_users_line() -> None:
    found = reason(raised_by(lambda: library()["run"](bad_stage)))
    assert (type(found.error).__name__, found.passed_on) == ("ValueError", "RuntimeError")
    assert found.frames[-1]["n"] == "bad_stage"


def test_what_a_script_raises_itself_stays_as_it_is() -> None:
    def run() -> None:
        try:
            bad_stage()
        except ValueError as error:
            raise KeyError("sample") from error

    found = reason(raised_by(run))
    assert (type(found.error).__name__, found.passed_on) == ("KeyError", "")


def test_what_a_library_makes_of_its_own_error_stays_as_it_is() -> None:
    names: dict[str, Any] = library()
    exec(compile("def inner():\n    raise OSError('no route')", LIBRARY, "exec"), names)
    found = reason(raised_by(lambda: names["run"](names["inner"])))
    assert (type(found.error).__name__, found.passed_on) == ("RuntimeError", "")


def test_the_error_of_a_recorded_call_is_found_through_its_wrapping() -> None:
    error = raised_by(lambda: library()["run"](bad_collective))
    assert reason(error, in_calls=(error.__cause__,)).error is error.__cause__


@pytest.mark.parametrize(("rank", "kind", "passed_on"), [(1, "ValueError", "CheckpointException"),
                                                         (0, "CheckpointException", "")])  # fmt: skip
def test_of_errors_of_all_ranks_each_has_its_own(rank: int, kind: str, passed_on: str) -> None:
    own = raised_by(bad_stage)
    gathered = CheckpointException({1: (own, traceback.extract_tb(own.__traceback__))})

    def fail() -> None:
        raise gathered

    found = reason(raised_by(fail), rank)
    assert (type(found.error).__name__, found.passed_on, found.ranks) == (kind, passed_on, [1])
    assert (found.frames[-1]["n"] == "bad_stage") is (rank == 1)


def fail(error: BaseException) -> None:
    raise error


def wrapped(*, cause: bool, own: BaseException) -> BaseException:
    """Return what a script raises in an ``except`` of another error, from it or not."""

    def run() -> None:
        try:
            fail(own)
        except Exception as error:  # noqa: BLE001 - any
            raise KeyError("sample") from (error if cause else None)

    return raised_by(run)


def cleaned_up(own: BaseException) -> BaseException:
    """Return what a call raises in the ``finally`` of another error."""

    def run() -> None:
        try:
            fail(own)
        finally:
            bad_collective()

    return raised_by(run)


OWN = ValueError("no such sample")
IN_GROUP = raised_by(bad_stage)
GROUP = type("BaseExceptionGroup", (Exception,), {"exceptions": (IN_GROUP,)})("unhandled errors in a TaskGroup")


@pytest.mark.parametrize(
    ("error", "noted", "in_call", "expected"),
    [
        (wrapped(cause=True, own=OWN), (), False, ("KeyError", OWN)),
        (wrapped(cause=False, own=ValueError("a default is used")), (), False, ("KeyError", None)),
        (cleaned_up(OWN), (), True, ("RuntimeError", OWN)),
        (cleaned_up(StopIteration()), (), True, ("RuntimeError", None)),
        (cleaned_up(OWN), (), False, ("RuntimeError", None)),
        (raised_by(lambda: fail(GROUP)), (), False, ("BaseExceptionGroup", IN_GROUP)),
    ],
    ids=["cause", "context of its own code", "context of a call that fails now", "end of a loop", "no call", "group"],
)
def test_the_first_error_of_the_script_is_found(
    error: BaseException, noted: tuple[BaseException, ...], *, in_call: bool, expected: tuple[str, Any]
) -> None:
    found = reason_of(error, 0, noted.__contains__, in_call=in_call)
    assert (type(found.error).__name__, found.first) == expected


@pytest.mark.parametrize("cause", [True, False])
def test_what_a_script_makes_of_the_error_of_a_call_is_that_error(*, cause: bool) -> None:
    lost = raised_by(bad_collective)
    error = wrapped(cause=cause, own=lost)
    found = reason(error, in_calls=(lost,))
    assert (found.error, found.passed_on, found.first) == (lost, "KeyError", None)
