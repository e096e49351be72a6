"""``pytest --ddpdoctor``: real tests that start ranks, of which some hang."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_pages import DOCS
from tests.scenarios.running import clean_environment

pytestmark = pytest.mark.usefixtures("preloaded_python")
TESTS = """
import os, socket, subprocess, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp


def work(rank, port, fault):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for step in range(3):
        if step == 2 and rank == 1 and fault == "hang":
            time.sleep(100)  # FAULT
        if step == 2 and rank == 1 and fault == "crash":
            raise KeyError("sample 7")
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def start(fault):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, (port, fault), nprocs=2)


def test_hangs():
    start("hang")


def test_fails():
    start("crash")


def test_has_its_own_environment():
    assert "DDPDOCTOR_RUN" in os.environ


def teardown_module():
    assert "DDPDOCTOR_RUN" not in os.environ
"""
PLAIN = """
import os, sys


def test_nothing_is_there():
    assert "DDPDOCTOR_RUN" not in os.environ
    assert {name for name in sys.modules if name.startswith("ddpdoctor")} <= {
        "ddpdoctor", "ddpdoctor.integrations", "ddpdoctor.integrations.pytest_plugin",
    }
"""


WITHOUT_A_RECORD = """
import os, shutil, tempfile

def test_takes_it_away():
    shutil.rmtree(os.environ["DDPDOCTOR_RUN"])

def test_leaves_no_place_for_one():
    tempfile.tempdir = "/nowhere"

def test_has_none():
    tempfile.tempdir = None
    assert "DDPDOCTOR_RUN" not in os.environ
"""


def run_pytest(folder: Path, tests: str, *options: str) -> tuple[int, str]:
    file = folder / "test_job.py"
    file.write_text(tests)
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *options, file.name]
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(TMPDIR=str(temporary), PYTEST_ADDOPTS=""), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200,
    )  # fmt: skip
    print(done.stdout)
    return done.returncode, done.stdout


def test_a_hung_test_and_one_that_raises_fail_with_the_rank_and_the_line_and_the_others_go_on(tmp_path: Path) -> None:
    _, text = run_pytest(tmp_path, TESTS, "--ddpdoctor", "--ddpdoctor-timeout", "6")

    line = 1 + TESTS.splitlines().index("            time.sleep(100)  # FAULT")
    assert "2 failed, 1 passed" in text
    raised = text[text.index("ProcessRaisedException") :]
    assert raised[raised.index("Captured ddpdoctor call") :].count("explain DD604") == 1
    assert f"DD601 stuck: rank 1 is stuck in work (test_job.py:{line})" in text
    assert "if it is just slow, raise --ddpdoctor-timeout" in " ".join(text.split())
    (on_page,) = re.findall(r"^FAILED .* - Failed: (.*) \.\.\.$", (DOCS / "in-code.md").read_text(), re.MULTILINE)
    assert re.sub(r"py:\d+", f"py:{line}", on_page) in text
    assert len(list((tmp_path / "tmp").glob("ddpdoctor-test-*"))) == 2  # the folders of those that failed


def test_without_the_option_nothing_is_loaded(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, PLAIN)[0] == 0


def test_a_timeout_that_makes_no_sense_is_wrong_use(tmp_path: Path) -> None:
    status, text = run_pytest(tmp_path, PLAIN, "--ddpdoctor", "--ddpdoctor-timeout", "0")
    assert (status, "it must be a number of seconds above 0" in text) == (4, True)


def test_a_test_that_passes_does_so_without_its_record_too(tmp_path: Path) -> None:
    status, text = run_pytest(tmp_path, WITHOUT_A_RECORD, "--ddpdoctor")
    assert (status, "3 passed" in text) == (0, True)
