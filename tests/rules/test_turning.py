"""The line that made a rank differ is named, and the place where it showed is reported."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.collect.run_files import read_control_flow
from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import ControlFlow, Job, Rank
from ddpdoctor.model.findings import Finding, Severity
from ddpdoctor.model.stacks import Frame
from ddpdoctor.rules.progress.branches import NO_LINE, Route, find_detours
from tests.rules.build import AUTOGRAD, C10D, LONG_AGO, ended, group, job, line, phase, sample, stack
from tests.rules.test_disagreement import Script

FUNCTION = "backward"
SOURCE = """\
class Reduced(Function):
    def backward(ctx, g):
        if ctx.skip:
            return g
        all_reduce(g)


def main():
    for batch in loader:
        loss = model(batch)
        if not isfinite(loss):
            continue
        loss.backward()
        if metric:
            log(loss)
    barrier()
    if rank == 0:
        barrier()


if __name__ == "__main__":
    main()
"""
SKIPS, LEAVES_LOOP, AUTOGRAD_SKIPS = [11, 12], [16, 9], [3, 4]
FORWARD, BACKWARD, LOG, BARRIER, INNER = 10, 13, 15, 16, 5


@pytest.fixture
def flow(tmp_path: Path) -> ControlFlow:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    found = read_control_flow(path, float("inf"))
    assert found is not None
    return ControlFlow(file=line(1).file, statements=found.statements)


def steps(script: Script, count: int) -> Script:
    for _ in range(count):
        script.phase("ddp_forward", FORWARD, 0).phase("backward", BACKWARD, 1)
    return script


def at_barrier(script: Script) -> Rank:
    return script.collective(BARRIER, "barrier", dtype=None, shape=None).waits()


def in_step(script: Script) -> Rank:
    return steps(script, 1).waits()


def judged(*ranks: Rank, flow: ControlFlow | None = None) -> Finding:
    facts: Job = job(*ranks, control_flow=(flow,) if flow is not None else ())
    (found,) = (one for one in judge(facts).findings if one.severity is Severity.ERROR)
    return found


def started(world: int) -> list[Script]:
    return [steps(Script(n, world).build(8), 4) for n in range(world)]


@pytest.mark.parametrize("world", [2, 3])
def test_a_call_once_more_is_told_with_the_loop_around_it(flow: ControlFlow, world: int) -> None:
    found = started(world)
    for script in found:
        for _ in range(4):
            steps(script, 1).collective(LOG, shape=()).collective(LOG, shape=())
    found[1].collective(LOG, shape=())
    ranks = [script.waits() if script.number == 1 else in_step(script) for script in found]
    finding = judged(*ranks, flow=flow)
    assert (finding.kind, finding.ranks, [place.line for place in finding.where]) == ("mismatch", (1,), [LOG])
    assert "rank 1 called all_reduce (train.py:15) once more than the others" in " ".join(finding.evidence)
    assert finding.fix.startswith("let all ranks go through the loop at line 9 equally often")
    assert "loop at line" not in judged(*ranks).fix


TRAINER = """\
def step():
    model(x).backward()


def train():
    for batch in loader:
        step()
        if stops():
            return


def evaluate():
    for batch in loader:
        log(batch)


def main():
    for epoch in epochs:
        train()
        evaluate()
"""


@pytest.mark.parametrize("last", [2, 14])
def test_a_loop_in_a_function_that_returned_is_named_if_the_rank_had_been_there(tmp_path: Path, last: int) -> None:
    """Rank 1 evaluates while rank 0 trains: it left the loop early, or it evaluates once more than rank 0."""
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER)
    read = read_control_flow(path, float("inf"))
    assert read is not None
    outer, inner, logs = line(18, "main"), line(7, "train"), line(14, "evaluate")
    found = [Script(n, 2).build(line(1, "<module>")) for n in range(2)]
    for script in found:
        for _ in range(4):
            for _ in range(3):
                script.phase("ddp_forward", line(2, "step"), 0).phase("backward", line(2, "step"), 1)
            script.collective(logs, shape=())
        if last == 2:
            script.phase("ddp_forward", line(2, "step"), 0).phase("backward", line(2, "step"), 1)
    found[1].collective(logs, shape=())
    due = found[0].phase("ddp_forward", line(2, "step"), 0).phase("backward", line(2, "step"), 1)
    trains = due.waits(samples=(sample(stack(outer, inner, line(2, "step"), AUTOGRAD)),))
    evaluates = found[1].waits(samples=(sample(stack(line(19, "main"), logs, C10D)),))
    finding = judged(trains, evaluates, flow=ControlFlow(file=line(1).file, statements=read.statements))
    lines = [place.line for place in finding.where if place.rank == 1]
    assert lines == ([14, 8] if last == 2 else [14]), finding


def skipping(world: int) -> list[Rank]:
    """Return ranks of which the last left out the backward of its fifth step, and is at the barrier."""
    found = started(world)
    found[-1].phase("ddp_forward", FORWARD, 0)
    for script in found[:-1]:
        steps(script, 4)
    return [*[in_step(script) for script in found[:-1]], at_barrier(steps(found[-1], 4))]


@pytest.mark.parametrize("world", [2, 3])
def test_a_backward_that_was_skipped_is_named_with_the_line_that_skips_it(world: int, flow: ControlFlow) -> None:
    found = judged(*skipping(world), flow=flow)
    assert (found.kind, found.ranks, [place.line for place in found.where]) == ("mismatch", (world - 1,), SKIPS)
    assert f"skipped backward (train.py:{BACKWARD}) and is in barrier (train.py:{BARRIER})" in found.summary
    assert "on all ranks or on none" in found.fix


def test_without_the_source_the_last_line_before_it_is_named() -> None:
    found = judged(*skipping(3))
    assert [place.line for place in found.where] == [FORWARD, BARRIER]


def test_a_loop_that_ended_sooner_is_named_behind_the_call_at_which_it_showed(flow: ControlFlow) -> None:
    found = started(3)
    report = judged(in_step(found[0]), in_step(found[1]), at_barrier(found[2]), flow=flow)
    assert (report.ranks, [place.line for place in report.where]) == ((2,), LEAVES_LOOP)
    assert "left the loop (train.py:9) before the others" in report.summary
    assert "DistributedSampler" in report.fix


def test_a_call_too_many_inside_the_loop_is_no_loop_of_another_length(flow: ControlFlow) -> None:
    found = started(2)
    ranks = found[0].collective(LOG, "reduce").waits(steps=4, batches=4), in_step(found[1])
    report = judged(ranks[0], replace(ranks[1], steps=4, batches=5), flow=flow)
    assert (report.ranks, [place.line for place in report.where]) == ((0,), [LOG - 1, LOG])
    assert "DistributedSampler" not in report.fix
    unread = judged(ranks[0], replace(ranks[1], steps=4, batches=5))
    assert unread.fix.index("condition") < unread.fix.index("DistributedSampler")


def test_a_collective_left_out_inside_backward_is_named_in_its_own_function(flow: ControlFlow) -> None:
    found = started(3)
    for script in found:
        script.phase("backward", BACKWARD, 0)
    inside = [script.collective(line(INNER, FUNCTION)).waits() for script in found[:2]]
    found[2].begun += 1
    samples = (sample(stack(line(BACKWARD), AUTOGRAD)),)
    report = judged(*inside, found[2].waits(samples=samples), flow=flow)
    assert (report.ranks, [place.line for place in report.where]) == ((2,), AUTOGRAD_SKIPS)
    assert {place.function for place in report.where} == {FUNCTION}


def test_a_backward_that_reduced_nothing_is_named() -> None:
    found = started(3)
    for script in found:
        script.phase("ddp_forward", FORWARD, 0).phase("backward", BACKWARD, 0 if script.number == 2 else 1)
        steps(script, 3)
    report = judged(in_step(found[0]), in_step(found[1]), at_barrier(steps(found[2], 1)))
    assert (report.ranks, [place.line for place in report.where]) == ((2,), [BACKWARD, BARRIER])
    assert "did not reduce in backward" in report.summary


def test_evaluations_without_gradients_are_no_parting(flow: ControlFlow) -> None:
    found = started(3)
    for script in found:
        for _ in range(3 if script.number == 2 else 1):
            script.phase("ddp_forward_no_grad", FORWARD, 0)
        steps(script, 3)
    report = judged(in_step(found[0]), in_step(found[1]), at_barrier(found[2]), flow=flow)
    assert [place.line for place in report.where] == LEAVES_LOOP


def test_how_a_rank_came_to_leave_early_is_reported(flow: ControlFlow) -> None:
    found = started(3)
    gone = steps(found[2].phase("ddp_forward", FORWARD, 0), 2)
    site = line(18)
    calls = (*gone.calls, phase("destroy_process_group", site, index=99, open_=False, begun=gone.begun))
    left = ended(2, recent_calls=calls, groups=(group(gone.begun, 3),), main_ended_ns=LONG_AGO)
    report = judged(in_step(steps(found[0], 2)), in_step(steps(found[1], 2)), left, flow=flow)
    assert (report.kind, report.ranks, [place.line for place in report.where]) == ("early-exit", (2,), SKIPS)


def test_of_two_ranks_the_one_under_a_condition_is_blamed(flow: ControlFlow) -> None:
    found = started(2)
    alone = _waiting(found[0].collective(18, "all_gather"), line(18))
    other = _waiting(found[1].collective(BARRIER, "barrier"), line(BARRIER))
    report = judged(alone, other, flow=flow)
    assert (report.ranks, [place.line for place in report.where]) == ((0,), [17, 18])
    assert "the condition at line 17" in report.evidence[0]


def test_a_condition_around_a_call_that_the_rank_is_still_in_decides_nothing(flow: ControlFlow) -> None:
    scripts = [Script(n, 3) for n in range(3)]
    for script in scripts:
        for _ in range(4):
            script.collective(BARRIER)
    within = stack(line(22, "<module>"), line(BARRIER), C10D)
    ranks = [
        script.collective(BARRIER, op).waits(samples=(sample(within),))
        for script, op in zip(scripts, ("all_reduce", "all_reduce", "broadcast"), strict=True)
    ]
    assert [place.line for place in judged(*ranks, flow=flow).where] == [BARRIER]


DECIDED = {
    "the condition of its return": ("if rank:\n        return True\n    return False", "if ask():", (3,)),
    "a return of what is no constant": ("late = clock()\n    return late", "if not ask():", (4,)),
    "several, so none is told": ("if a:\n        return 1\n    if b:\n        return 2", "if ask():", (3, 5)),
    "a constant decides nothing": ("return True", "if ask():", ()),
    "of the nested function is another's": ("def g():\n        return x\n    return 1", "if ask():", ()),
    "by way of a name": ("return x", "stop = ask()\n        if stop:", (3,)),
    "a name of another function": ("stop = ask()\n    return 1", "if stop:", ()),
    "of a method": ("return x", "if self.stopper.ask():", (3,)),
    "another function": ("return x", "if other():", ()),
}


@pytest.mark.parametrize("case", DECIDED)
def test_a_condition_that_asks_a_function_is_told_with_the_line_that_decides_in_it(tmp_path: Path, case: str) -> None:
    body, asks, decided = DECIDED[case]
    source = f"\ndef ask():\n    {body}\n\ndef main():\n    for batch in loader:\n        {asks}\n            break\n"
    source += "        loss.backward()\n    barrier()\n"
    (tmp_path / "train.py").write_text(source)
    read = read_control_flow(tmp_path / "train.py", float("inf"))
    assert read is not None
    lines = source.splitlines()
    loop, broke = (next(n for n, text in enumerate(lines, 1) if word in text) for word in ("for ", "break"))
    route = Route(left_out=broke + 1, before=None, failed=False, after=broke + 2)
    found = find_detours(ControlFlow(file="train.py", statements=read.statements), route)
    assert [(one.condition, one.decided_at) for one in found] == [(broke - 1, decided), (loop, ())]


def test_a_loop_goes_by_what_is_assigned_in_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def ask():\n    return x\n\nstop = False\nwhile not stop:\n    stop = ask()\n")
    read = read_control_flow(path, float("inf"))
    assert read is not None
    assert [one.decided_at for one in read.statements if one.kind == "while"] == [(2,)]


def test_the_deciding_line_in_the_function_that_was_asked_is_a_place(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        SOURCE.replace("if not isfinite(loss)", "if bad(loss)") + "def bad(loss):\n    return rank == loss\n"
    )
    read = read_control_flow(path, float("inf"))
    assert read is not None
    report = judged(*skipping(2), flow=ControlFlow(file=line(1).file, statements=read.statements))
    last = len(path.read_text().splitlines())
    assert [place.line for place in report.where] == [SKIPS[0], last]
    assert f"the condition at line {SKIPS[0]} (jump at line {SKIPS[1]}), decided at line {last}" in str(report.evidence)


def _waiting(script: Script, at: Frame) -> Rank:
    return script.waits(samples=(sample(stack(at, C10D)),))


HELPERS = """\
def reduce_all(values):
    for value in values:
        all_reduce(value)


def average(parameters):
    for parameter in parameters:
        if parameter.grad is None:
            continue
        all_reduce(parameter.grad)


def log(meter):
    if not meter.count:
        return
    all_reduce(meter.total)


def resume(path):
    if exists(path):
        broadcast(load(path))


def vocabulary(cache):
    if cache:
        return cache
    broadcast(words)


if __name__ == "__main__":
    resume("last.pt")
    vocabulary(cache)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        reduce_all(losses)
        average(parameters)
        log(meter)
"""
MODULE = "<module>"
LOSS, BACKWARD_AT, REDUCES, AVERAGES, LOGS = 34, 35, 36, 37, 38
IN_REDUCE, IN_AVERAGE, IN_LOG, IN_RESUME, IN_VOCABULARY = 3, 10, 16, 21, 27


@pytest.fixture
def helpers(tmp_path: Path) -> ControlFlow:
    path = tmp_path / "train.py"
    path.write_text(HELPERS)
    found = read_control_flow(path, float("inf"))
    assert found is not None
    return ControlFlow(file=line(1).file, statements=found.statements)


def helped(script: Script, rounds: dict[str, int]) -> Script:
    """Do a step whose forward is in a function of its own, and whose helpers reduce so many values."""
    script.phase("ddp_forward", line(LOSS, "loss_of"), 0).phase("backward", line(BACKWARD_AT, MODULE), 1)
    for number, function in ((IN_REDUCE, "reduce_all"), (IN_AVERAGE, "average"), (IN_LOG, "log")):
        for _ in range(rounds.get(function, 0)):
            script.collective(line(number, function))
    return script


def inside(script: Script, *frames: Frame) -> Rank:
    return script.waits(samples=(sample(stack(*frames, C10D)),))


FULL = {"reduce_all": 3, "average": 2, "log": 1}
RETURNED = {
    "a loop in it that ended sooner": (
        {"reduce_all": 2},
        {"reduce_all": 3},
        (REDUCES, IN_REDUCE, "reduce_all"),
        2,
        "left the loop (train.py:2) before the others",
    ),
    "a continue in its loop": (
        {"reduce_all": 3, "average": 1},
        {"reduce_all": 3, "average": 2},
        (AVERAGES, IN_AVERAGE, "average"),
        8,
        "the condition at line 8 (jump at line 9)",
    ),
    "a return in it": (
        {"reduce_all": 3, "average": 2},
        {"reduce_all": 3, "average": 2, "log": 1},
        (LOGS, IN_LOG, "log"),
        14,
        "the condition at line 14 (jump at line 15)",
    ),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_decided_in_a_function_that_returned_is_named(name: str, helpers: ControlFlow) -> None:
    mine, others, (outer, inner, function), decided, words = RETURNED[name]
    found = [Script(n, 3).build(24) for n in range(3)]
    for script in found:
        for _ in range(3):
            helped(script, FULL)
        helped(script, mine if script.number == 2 else others)
    waiting = [inside(script, line(outer, MODULE), line(inner, function)) for script in found[:2]]
    found[2].phase("ddp_forward", line(LOSS, "loss_of"), 0).phase("backward", line(BACKWARD_AT, MODULE), 1)
    gone = found[2].waits(samples=(sample(stack(line(BACKWARD_AT, MODULE), AUTOGRAD)),))
    report = judged(*waiting, gone, flow=helpers)
    assert (report.kind, report.ranks) == ("mismatch", (2,))
    assert decided in {place.line for place in report.where}
    assert words in " ".join((report.summary, *report.evidence))
    unseen = judged(replace(waiting[0], samples=()), waiting[1], gone, flow=helpers)
    assert unseen.where == report.where
    assert 30 not in {place.line for place in report.where}


def test_the_condition_around_a_call_that_happens_once_is_named(helpers: ControlFlow) -> None:
    found = [Script(n, 3).build(24) for n in range(3)]
    loads = found[0].collective(line(IN_RESUME, "resume"), "broadcast", peer=0)
    others = [inside(script.collective(line(IN_REDUCE, "reduce_all")), line(REDUCES, MODULE)) for script in found[1:]]
    report = judged(inside(loads, line(31, MODULE), line(IN_RESUME, "resume")), *others, flow=helpers)
    assert (report.ranks, [place.line for place in report.where]) == ((0,), [20, IN_RESUME])
    assert "let all ranks take the same branch at train.py:20" in report.fix
    assert "under the condition at train.py:20, and the other ranks never made that call" in " ".join(report.evidence)


EPOCH = """\
def loss_of(model):
    return model(batch)


def epoch(model):
    for step in range(20):
        if should_stop():
            break
        loss_of(model).backward()


def save():
    barrier()


epoch(model)
save()
"""


def test_a_loop_in_a_method_that_was_left_is_named_where_forward_is_in_a_function_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(EPOCH)
    read = read_control_flow(path, float("inf"))
    assert read is not None
    flow = ControlFlow(file=line(1).file, statements=read.statements)
    found = [Script(n, 3).build(16) for n in range(3)]
    for script in found:
        for _ in range(6 if script.number else 5):
            script.phase("ddp_forward", line(2, "loss_of"), 0).phase("backward", line(9, "epoch"), 1)
    inner = (line(16, MODULE), line(9, "epoch"), AUTOGRAD)
    others = [script.waits(samples=(sample(stack(*inner)),)) for script in found[1:]]
    left = found[0].collective(line(13, "save"), "barrier", dtype=None, shape=None)
    report = judged(inside(left, line(17, MODULE), line(13, "save")), *others, flow=flow)
    assert (report.ranks, [place.line for place in report.where][:2]) == ((0,), [7, 8])


def test_the_return_around_a_call_that_happens_once_is_named(helpers: ControlFlow) -> None:
    found = [Script(n, 3) for n in range(3)]
    ahead = inside(found[0].phase("ddp_init", line(33, MODULE), 1), line(33, MODULE))
    call = line(IN_VOCABULARY, "vocabulary")
    others = [inside(script.collective(call, "broadcast", peer=0), line(32, MODULE), call) for script in found[1:]]
    report = judged(ahead, *others, flow=helpers)
    assert (report.ranks, [place.line for place in report.where]) == ((0,), [25, 26])
    assert "skipped broadcast (train.py:27)" in report.summary
    behind = inside(Script(0, 3).phase("ddp_init", line(31, MODULE), 1), line(31, MODULE))
    assert [place.line for place in judged(behind, *others, flow=helpers).where] == [31]


@pytest.mark.parametrize(("other", "named"), [(REDUCES, False), (AVERAGES, False)])
def test_a_condition_that_all_ranks_passed_is_no_reason(helpers: ControlFlow, other: int, named: bool) -> None:  # noqa: FBT001 - a row
    found = [Script(n, 2).build(24) for n in range(2)]
    one = inside(found[0].collective(line(LOGS, MODULE), "all_gather"), line(LOGS, MODULE))
    two = inside(found[1].collective(line(other, MODULE), "broadcast", peer=0), line(other, MODULE))
    report = judged(one, two, flow=helpers)
    assert report.ranks == (0, 1)
    assert ("condition at" in " ".join((*report.evidence, report.summary))) is named


def test_of_two_branches_each_rank_passed_its_own(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("if first:\n    all_gather(x)\nelse:\n    broadcast(x)\n")
    found = read_control_flow(path, float("inf"))
    assert found is not None
    (branch,) = found.statements
    assert (branch.holds_both(1, 2), branch.holds_both(2, 4), branch.holds_both(4, 4)) == (True, False, True)


# Which lines decide whether a call is reached, by the source: conditions, jumps, handlers, the loop's end.


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
