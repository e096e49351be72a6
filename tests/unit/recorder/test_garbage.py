"""The recorder times Python's collections, also the last one, in which no code of the script runs any more."""

import subprocess
import sys

SCRIPT = """
import _thread
from ddpdoctor.recorder.speed import garbage
from ddpdoctor.recorder.state import here

here.main_thread = _thread.get_ident()
garbage.clock.number = 1
garbage.watch_collections()
objects = [[] for _ in range(500_000)]
"""


def test_the_collection_at_exit_prints_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""
