"""Becomes a command of Python's, and takes the cores from its ranks for a time, once it has reported a hang.

python crowd.py FOLDER WORD...

From the report on, all threads of the ranks share one core with processes that have precedence. The kernel books how
long a thread has waited when it gets the core, so that much is booked at once. FOLDER/waited says how much it was.
"""

import json
import os
import sys
import time
from pathlib import Path

BUSY = 8
CROWDED_S = 20.0


def main() -> None:
    """Leave a child beside the command, which ends with it."""
    folder, job = Path(sys.argv[1]), os.getpid()
    if os.fork():
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    report = folder / "run" / "report.json"
    while not report.exists() and os.getppid() == job:
        time.sleep(0.1)
    ranks = [row["pid"] for row in json.loads(report.read_text())["ranks"]]
    core = max(os.sched_getaffinity(0))
    before = read_delays(ranks)
    for thread in before:
        os.sched_setaffinity(thread, {core})
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    own = os.getpid()
    for _ in range(BUSY):
        if not os.fork():
            os.sched_setaffinity(0, {core})
            while os.getppid() == own:
                pass
            os._exit(0)
    limit = time.monotonic() + CROWDED_S
    while os.getppid() == job and time.monotonic() < limit:
        time.sleep(0.2)
    waited = [delay - before[thread] for thread, delay in read_delays(ranks).items() if thread in before]
    (folder / "waited").write_text(json.dumps(waited))
    os._exit(0)


def read_delays(ranks: list[int]) -> dict[int, float]:
    """Return the seconds for which each thread of the ranks has waited for a core."""
    found = {}
    for task in (path for rank in ranks for path in Path(f"/proc/{rank}/task").glob("*/schedstat")):
        found[int(task.parent.name)] = int(task.read_text().split()[1]) / 1e9
    return found


if __name__ == "__main__":
    main()
