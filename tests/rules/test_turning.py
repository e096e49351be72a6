"""The line that made a rank differ is named, and the place where it showed is reported."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ddpdoctor.collect.run_files import read_control_flow
from ddpdoctor.diagnose.job import judge_job
from ddpdoctor.model.facts import ControlFlow
from ddpdoctor.rules.progress.branches import NO_LINE, Route, find_detours
from tests.golden import table
from tests.rules import build
from tests.rules.build import job, line, sample, stack
from tests.rules.test_disagreement import Script

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


def read(text, until_s=float("inf")):
    """Return what a file with this text has of loops, conditions and jumps, if it was not changed after that time."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(text)
        return read_control_flow(path, until_s)


def judge(text, *ranks, **more):
    """Judge a job of which these ranks ran such a script."""
    flow = (ControlFlow(file=line(1).file, statements=read(text).statements),) if text else ()
    return judge_job(job(*ranks, control_flow=flow, **more))


class Trains(Script):
    """A rank of SOURCE."""

    def unseen(self):
        """Count a collective of which Python knows nothing."""
        self.begun += 1
        return self

    def forward(self, count=1, kind="ddp_forward"):
        for _ in range(count):
            self.phase(kind, 10, 0)
        return self

    def step(self, count=1, forward=10, backward=13, buckets=1):
        for _ in range(count):
            self.phase("ddp_forward", forward, 0).phase("backward", backward, buckets)
        return self

    def log(self):
        return self.collective(15, shape=())

    def barrier(self):
        return self.collective(16, "barrier", dtype=None, shape=None)

    def helped(self, *rounds):
        """Do a step of HELPERS, whose three functions reduce so many values."""
        self.step(1, line(34, "loss_of"), line(35, "<module>"))
        for number, function, count in zip((3, 10, 16), ("reduce_all", "average", "log"), rounds, strict=False):
            for _ in range(count):
                self.collective(line(number, function))
        return self

    def inside(self, *frames):
        """Return the rank, which waits below these frames."""
        return self.waits(samples=(sample(stack(*frames)),))


def parted(text, departing, usual, world=3, common=lambda s: s.build(8).step(4), odd=-1):
    """Judge a job whose ranks run ``common``, and then ``departing`` on the last and ``usual`` on the others.

    Each of them returns the script, which then waits in its last call, or the rank.
    """
    found = [Trains(number, world) for number in range(world)]
    made = [(departing if script is found[odd] else usual)(common(script)) for script in found]
    return judge(text, *(one.waits() if isinstance(one, Script) else one for one in made))


def decided(body, asks):
    """Return the lines that decide in a function that a condition of a loop asks."""
    text = f"\ndef ask():\n    {body}\n\ndef main():\n    for batch in loader:\n        {asks}\n            break\n"
    text += "        loss.backward()\n    barrier()\n"
    loop, broke = (next(n for n, one in enumerate(text.splitlines(), 1) if word in one) for word in ("for ", "break"))
    route = Route(left_out=broke + 1, before=None, failed=False, after=broke + 2)
    condition, end = find_detours(ControlFlow(file="train.py", statements=read(text).statements), route)
    assert (condition.condition, end.condition, end.decided_at) == (broke - 1, loop, ())
    return condition.decided_at


test_rows = table("turning", vars(build), globals(), head=build.sureness)


def test_a_file_that_was_changed_is_no_python_or_is_gone_is_not_read(tmp_path):
    assert read("if x:\n    y()\n", 0.0) is None
    assert read("if x\n") is None
    assert read_control_flow(tmp_path / "none", float("inf")) is None


def test_of_two_branches_each_rank_passed_its_own():
    (branch,) = read("if first:\n    all_gather(x)\nelse:\n    broadcast(x)\n").statements
    assert (branch.holds_both(1, 2), branch.holds_both(2, 4), branch.holds_both(4, 4)) == (True, False, True)


# Which lines decide whether a call is reached, by the source: conditions, jumps, handlers, ends of loops. Comments
# mark what was left out (call), and where the rank was before and after.

SOURCES = """\
# a continue before it
for step in range(9):
    loss = model(x)  # before
    if not isfinite(loss):  # decides
        continue  # decides
    loss.backward()  # call
# a condition around it
loss = model(x)  # before
if loss.requires_grad:  # decides
    loss.backward()  # call
# a return in a function of autograd
def backward(ctx, g):
    if ctx.skip:  # decides
        return g  # decides
    all_reduce(g)  # call
# a break out of a loop of fixed length
for step in range(9):
    model(x).backward()  # call before
    if wins(step):  # decides
        break  # decides
barrier()  # after
# the end of a loop over data
for batch in loader:  # decides ends
    model(batch).backward()  # call before
barrier()  # after
# a loop by the clock
while time() < limit:  # decides ends
    model(x).backward()  # call before
barrier()  # after
# a round left out of a loop of fixed length
for step in range(9):
    if bad(step):  # decides
        continue  # decides
    model(x).backward()  # call before
barrier()  # after
# a return out of the loop
def main():
    for step in range(9):
        if done(step):  # decides
            return  # decides gone
        model(x).backward()  # call before
# not what jumps inside another loop, function or branch that was passed
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
# an error that was caught leads to its handler
for step in range(9):
    try:
        loss = model(x)  # before failed
        loss.backward()  # call
    except RuntimeError:  # decides
        continue  # decides
# several ways
for batch in loader:  # decides ends
    if done(batch):  # decides
        break  # decides
    model(batch).backward()  # call before
barrier()  # after
"""


def lines_of(text, mark):
    return [number for number, line in enumerate(text.splitlines(), start=1) if mark in line.partition("  # ")[2]]


@pytest.mark.parametrize("text", SOURCES.removeprefix("# ").split("\n# "), ids=lambda text: text.partition("\n")[0])
def test_the_lines_that_decide_are_found(text):
    text = "# " + text
    called, before, after = (next(iter(lines_of(text, mark)), None) for mark in ("call", "before", "after"))
    route = Route(
        left_out=called, before=before, failed=bool(lines_of(text, "failed")),
        after=NO_LINE if lines_of(text, "gone") else after,
    )  # fmt: skip
    found = find_detours(read(text), route)
    assert [one.condition for one in found if one.ends_loop] == lines_of(text, "ends")
    assert sorted(n for one in found for n in (one.condition, one.jump) if n is not None) == lines_of(text, "decides")
