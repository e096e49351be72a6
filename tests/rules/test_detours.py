"""Which lines decide whether a call is reached, by the source: conditions, jumps, handlers, the loop's end."""

import textwrap
from pathlib import Path

import pytest

from ddpdoctor.collect.run.control_flow import read_control_flow
from ddpdoctor.rules.progress.branches import NO_LINE, Route, find_detours

FOREVER_S = float("inf")
"""Later than any change of a file. Comments mark what was left out (call), and where the rank was before and after."""

SOURCES = {
    "a continue before it": (
        """
        for step in range(9):
            loss = model(x)  # before
            if not isfinite(loss):  # decides
                continue  # decides
            loss.backward()  # call
        """
    ),
    "a condition around it": (
        """
        loss = model(x)  # before
        if loss.requires_grad:  # decides
            loss.backward()  # call
        """
    ),
    "a return in a function of autograd": (
        """
        def backward(ctx, g):
            if ctx.skip:  # decides
                return g  # decides
            all_reduce(g)  # call
        """
    ),
    "a break out of a loop of fixed length": (
        """
        for step in range(9):
            model(x).backward()  # call before
            if wins(step):  # decides
                break  # decides
        barrier()  # after
        """
    ),
    "the end of a loop over data": (
        """
        for batch in loader:  # decides
            model(batch).backward()  # call before
        barrier()  # after
        """
    ),
    "a loop by the clock": (
        """
        while time() < limit:  # decides
            model(x).backward()  # call before
        barrier()  # after
        """
    ),
    "a round left out of a loop of fixed length": (
        """
        for step in range(9):
            if bad(step):  # decides
                continue  # decides
            model(x).backward()  # call before
        barrier()  # after
        """
    ),
    "a return out of the loop": (
        """
        def main():
            for step in range(9):
                if done(step):  # decides
                    return  # decides gone
                model(x).backward()  # call before
        """
    ),
    "not what jumps inside another loop, function or branch that was passed": (
        """
        def main():
            for step in range(9):
                for name in names:
                    if name:
                        continue
                def check(x):
                    if x:
                        return 1
                    return 2
                loss = model(x)  # before
                if check(loss):  # decides
                    continue  # decides
                loss.backward()  # call
        """
    ),
}


def lines_of(text: str, mark: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), start=1) if mark in line.partition("#")[2]]


def route_of(text: str, *, failed: bool = False) -> Route:
    marked = {mark: next(iter(lines_of(text, mark)), None) for mark in ("call", "before", "after")}
    called = marked["call"]
    assert called is not None
    after = NO_LINE if lines_of(text, "gone") else marked["after"]
    return Route(left_out=called, before=marked["before"], failed=failed, after=after)


def detours_of(tmp_path: Path, text: str, *, failed: bool = False):
    path = tmp_path / "train.py"
    path.write_text(text)
    flow = read_control_flow(path, FOREVER_S)
    assert flow is not None
    return find_detours(flow, route_of(text, failed=failed))


@pytest.mark.parametrize("name", SOURCES)
def test_the_lines_that_decide_are_found(name: str, tmp_path: Path) -> None:
    text = textwrap.dedent(SOURCES[name])
    (found,) = detours_of(tmp_path, text)
    assert [line for line in (found.condition, found.jump) if line is not None] == lines_of(text, "decides")


def test_an_error_that_was_caught_leads_to_its_handler(tmp_path: Path) -> None:
    text = textwrap.dedent(
        """
        for step in range(9):
            try:
                loss = model(x)  # before
                loss.backward()  # call
            except RuntimeError:  # decides
                continue  # decides
        """
    )
    (found,) = detours_of(tmp_path, text, failed=True)
    assert [found.condition, found.jump] == lines_of(text, "decides")


def test_several_ways_are_all_reported(tmp_path: Path) -> None:
    text = textwrap.dedent(
        """
        for batch in loader:
            if done(batch):
                break
            model(batch).backward()  # call before
        barrier()  # after
        """
    )
    assert [(one.condition, one.jump, one.ends_loop) for one in detours_of(tmp_path, text)] == [
        (3, 4, False),
        (2, None, True),
    ]


def test_a_file_that_was_changed_is_no_python_or_is_gone_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    assert read_control_flow(path, FOREVER_S) is None
    path.write_text("if x:\n    y()\n")
    assert read_control_flow(path, 0.0) is None
    path.write_text("if x\n")
    assert read_control_flow(path, FOREVER_S) is None
