"""Holds one rank up in its first all-reduce of 2 KiB: this folder stands on PYTHONPATH.

HELD_RANK says which rank, and HELD_FILE where it leaves its pid once it stands there. HELD_HOW says what it does then:
"sleep" without end, or "wait" until the file is taken away.
"""

import os
import time
from pathlib import Path

from tests.scenarios.bandwidth.after_import import put_in_rank

SIZE_BYTES = 2048


def hold_up(how):
    file = Path(os.environ["HELD_FILE"])
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    while how == "sleep":
        time.sleep(60)  # HELD
    while file.exists():
        time.sleep(0.01)


def put_in(dist):
    how = os.environ["HELD_HOW"]
    all_reduce = dist.all_reduce

    def held(tensor, *args, **kwargs):
        if tensor.nbytes == SIZE_BYTES:
            hold_up(how)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = held


put_in_rank("HELD_RANK", put_in)
