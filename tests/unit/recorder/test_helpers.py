"""What works for the main thread and is not on its stack: asyncio tasks, and calls in pools."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from ddpdoctor.recorder.stacks import helpers
from tests.scenarios.harmless.alone import make_folder, run_recorded

HERE = Path(__file__).name


async def takes(queue):
    return await queue.get()


async def sleeps(seconds):
    await asyncio.sleep(seconds)


async def through_task(queue):
    await asyncio.create_task(takes(queue))


async def gathers(queue):
    await asyncio.gather(sleeps(0), takes(queue), return_exceptions=True)


async def with_limit(queue):
    await asyncio.wait_for(takes(queue), 600)


async def first_of(queue):
    await asyncio.wait([asyncio.ensure_future(takes(queue))])


async def comprehends(queue):
    return [await queue.get() for _ in range(2)]


WAITS = [
    (takes, ["takes"]),
    (through_task, ["through_task", "takes"]),
    (gathers, ["gathers", "takes"]),
    (with_limit, ["with_limit", "takes"]),
    (first_of, ["first_of", "takes"]),
    (comprehends, ["comprehends"]),
]


@pytest.mark.parametrize(("wait", "expected"), WAITS)
@pytest.mark.parametrize("way", ["run", "until", "forever"])
def test_the_awaited_lines_of_the_task_that_a_thread_runs_are_found(wait, expected, way):
    own, found = threading.get_ident(), []

    async def main():
        queue = asyncio.Queue()

        def look():
            while not found:
                seen = [frame["n"] for frame in helpers.awaited(own) if frame["f"].endswith(HERE)]
                if [name for name in seen if name not in {"main", "<listcomp>"}] == expected:
                    found.append(seen)
            for _ in range(2):
                loop.call_soon_threadsafe(queue.put_nowait, 1)

        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=look)
        thread.start()
        await wait(queue)
        thread.join()

    if way == "run":
        asyncio.run(main())
    else:
        loop = asyncio.new_event_loop()
        task = loop.create_task(main())
        if way == "until":
            loop.run_until_complete(task)
        else:
            task.add_done_callback(lambda _: loop.stop())
            loop.run_forever()
    assert found[0][0] == "main"


def test_a_thread_that_runs_no_loop_awaits_nothing():
    assert helpers.awaited(threading.get_ident()) == []


async def fails(text):
    raise LookupError(text)


def test_the_error_of_a_held_task_counts_until_it_is_read(monkeypatch):
    monkeypatch.setattr(helpers, "_kept", helpers.deque())

    async def main():
        tasks = [asyncio.create_task(fails("read")), asyncio.create_task(fails("unread"), name="rollout")]
        await asyncio.wait(tasks)
        with pytest.raises(LookupError):
            await tasks[0]
        lost = helpers.lost()
        assert [(one["who"], one["name"], one["text"]) for one in lost] == [("task", "rollout", "unread")]
        assert lost[0]["frames"][-1]["n"] == "fails"
        assert helpers.lost()[0]["text"] == "unread"  # it was only looked at
        tasks[1].exception()
        assert helpers.lost() == []

    asyncio.run(main())


POOLS = """
import asyncio, gc, json, threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from _ddpdoctor_recorder.stacks import helpers

def fails(text):
    raise LookupError(text)

async def drops():
    async def task():
        fails("dropped task")
    asyncio.ensure_future(task())
    await asyncio.sleep(0.01)
    gc.collect()

with ThreadPoolExecutor(1) as pool:
    dropped = [pool.submit(fails, "dropped call")]
    asked, looked = pool.submit(fails, "asked"), pool.submit(fails, "looked at")
    fine = pool.submit(int, "3")
    assert fine.result() == 3 and looked.exception() is not None
    try:
        asked.result()
    except LookupError as error:
        names = []
        step = error.__traceback__
        while step is not None:
            names.append(step.tb_frame.f_code.co_filename)
            step = step.tb_next
        assert not any("_ddpdoctor" in name or "importlib._bootstrap" in name for name in names), names
with ThreadPool(1) as pool:
    left, got = pool.apply_async(fails, ("left in a pool",)), pool.apply_async(fails, ("got",))
    left.wait()
    try:
        got.get()
    except LookupError:
        pass
loop = asyncio.new_event_loop()
loop.set_exception_handler(lambda *unused: None)
loop.run_until_complete(drops())
print(json.dumps([(one["who"], one["text"], one["frames"][-1]["n"]) for one in helpers.lost()]))
"""


def test_errors_of_calls_in_pools_and_of_tasks_that_are_gone_count_until_they_are_read(tmp_path):
    ran = run_recorded(make_folder(tmp_path / "run"), "-c", POOLS)
    assert json.loads(ran.stdout.splitlines()[-1]) == [
        ["call", "dropped call", "fails"], ["call", "left in a pool", "fails"], ["task", "dropped task", "fails"],
    ]  # fmt: skip
