"""A rank that is asked to end leaves its stack, and nothing that a script can see or do is different for it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ddpdoctor.recorder

BOOTSTRAP = Path(ddpdoctor.recorder.__file__).parent / "bootstrap"
WAIT = """
import os, signal, time
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
def wait():
    os.write(1, b'there\\n')
    time.sleep(60)
"""
OWN = """
def own(*_):
    os.write(1, b'own\\n')
    raise SystemExit(4)
assert signal.signal(signal.SIGTERM, own) == signal.SIG_DFL
wait()
"""
LOOP = """
import asyncio
async def main():
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    print('there', flush=True)
    await asked.wait()
    print('asked', flush=True)
asyncio.run(main())
"""
FORK = """
import os
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    os.kill(os.getpid(), 15)
"""
FAULTHANDLER = "import faulthandler\nfaulthandler.register(signal.SIGTERM, file=open('own.txt', 'w'), chain=True)\n"


def end(folder, text, **env):
    """Run a rank until it says that it is there, tell it to end; return its status, its output and its last words."""
    (folder / "train.py").write_text(text)
    for name in ("rings", "evidence"):
        (folder / name).mkdir()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(BOOTSTRAP), "DDPDOCTOR_RUN": str(folder), "RANK": "0"}
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, env={**environment, **env}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if "there" in said:
        process.terminate()
    said += process.communicate(timeout=200)[0]
    words = [path.read_text() for path in (folder / "evidence").glob("*.term")]
    return process.returncode, said.split(), "".join(words)


def test_a_rank_leaves_its_stack_and_dies_of_the_signal(tmp_path):
    status, _, words = end(tmp_path, WAIT + "wait()\n")
    assert status == -signal.SIGTERM
    assert " in wait\n" in words


def test_where_torchruns_agent_pauses_nothing_is_registered(tmp_path):
    status, _, _ = end(tmp_path, WAIT + "wait()\n", DDPDOCTOR_AGENT=str(os.getpid()))
    assert status == -signal.SIGTERM
    assert list((tmp_path / "evidence").glob("*.term")) == []


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [(WAIT + OWN, 4, ["there", "own"]), (WAIT + LOOP, 0, ["there", "asked"])],
)
def test_a_handler_of_the_scripts_own_stays(text, status, said, tmp_path):
    assert end(tmp_path, text) == (status, said, "")


def test_faulthandler_is_the_scripts_own_to_use(tmp_path):
    status, _, words = end(tmp_path, WAIT + FAULTHANDLER + "wait()\n")
    assert (status, words) == (-signal.SIGTERM, "")
    assert "in wait" in (tmp_path / "own.txt").read_text()


def test_a_forked_child_says_nothing_in_its_parents_name(tmp_path):
    assert end(tmp_path, FORK) == (0, [str(-signal.SIGTERM)], "")
