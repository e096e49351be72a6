"""What runs and saves the GPU tests, which CI has no GPU for: limits, signals, and a time that is over."""

import ast
import importlib.util
import json
import signal
import tarfile
import time

import pytest

from tests.gpu.catalog import JOBS, ONLY_A_DEVICE
from tests.gpu.running import GRACE_S, ROOT, Job, Runner
from tests.gpu.running import JOBS as SCRIPTS
from tests.gpu.saving import Results
from tests.scenarios.running import pids_with

SLEEP = "import time; time.sleep(60)"
HOLD = """
import os, pathlib, time
pathlib.Path("new").write_text(str(os.getpid()))
pathlib.Path("new").rename("held")
time.sleep(60)
"""


def run(folder, *jobs, limit_s=60.0, **more):
    results = Results(folder / "results", {"machine": "this"})
    runner = Runner(jobs, folder / "jobs", width=2, limit_s=limit_s, ended=results.job_ended, dry=True, **more)
    return results, [runner(job.name) for job in jobs]


def test_what_a_job_leaves_is_read_and_saved_at_once(tmp_path):
    script = "import json, sys; print('said'); json.dump(dict(backend=sys.argv[1]), open(sys.argv[2], 'w'))"
    job = Job(name="one", command=("-c", script, "{backend}", "{folder}/result.json"))
    results, (done,) = run(tmp_path, job)
    assert (done.status, done.problem, done.stdout, done.result) == (0, "", "said\n", {"backend": "gloo"})
    (entry,) = json.loads((results.folder / "index.json").read_text())["jobs"]
    assert (entry["name"], entry["status"], entry["result"]) == ("one", 0, {"backend": "gloo"})
    assert "| one | 0 |" in (results.folder / "summary.md").read_text()


def test_each_job_appends_an_archive_that_unpacks_with_the_others(tmp_path):
    results, _ = run(tmp_path, *(Job(name=name, command=("-c", f"print({name!r})")) for name in ("one", "two")))
    with tarfile.open(results.folder / "runs-1.tar.gz", ignore_zeros=True) as archive:
        assert {"one/stdout", "two/stdout"} <= set(archive.getnames())


def test_a_job_past_its_limit_is_stopped_and_the_rest_of_it_killed(tmp_path):
    script = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True).wait()"
    )
    _, (done,) = run(tmp_path, Job(name="long", command=("-c", script), limit_s=1.0))
    assert (done.status, done.problem) == (None, "stopped at its limit of 1 s")
    assert pids_with(f"GPU_TESTS_JOB={done.folder}") == []


def test_a_held_rank_is_sent_its_signal(tmp_path):
    _, (done,) = run(tmp_path, Job(name="held", command=("-c", HOLD), sends=signal.SIGKILL))
    assert done.status == -signal.SIGKILL


def test_a_job_for_which_no_time_is_left_is_not_begun(tmp_path):
    _, (done,) = run(tmp_path, Job(name="late", command=("-c", SLEEP)), limit_s=5.0)
    assert (done.status, done.problem) == (None, "not reached")


def test_a_job_that_the_end_of_all_time_stops_is_no_failure_of_its_own(tmp_path):
    _, (done,) = run(tmp_path, Job(name="last", command=("-c", SLEEP)), limit_s=GRACE_S + 1, least_s=0.0)
    assert (done.status, done.problem) == (None, "cut off")


def test_a_job_that_measures_time_runs_by_itself(tmp_path):
    script = "import time; time.sleep(1)"
    alone = Job(name="alone", command=("-c", "pass"), alone=True)
    _, (last, *others) = run(tmp_path, alone, *(Job(name=name, command=("-c", script)) for name in ("one", "two")))
    assert all(last.began_s >= other.began_s + other.took_s - 0.1 for other in others)


def test_a_runner_that_is_closed_begins_nothing_more(tmp_path):
    jobs = [Job(name=str(number), command=("-c", SLEEP)) for number in range(3)]
    ended = []
    runner = Runner(jobs, tmp_path, width=1, limit_s=300, ended=ended.append, dry=True)
    runner._begin()
    while not runner._running:
        time.sleep(0.01)
    runner.close()
    assert [runner(job.name).problem for job in jobs[1:]] == ["not reached"] * 2


def test_each_script_of_a_job_is_there():
    named = {word for job in JOBS.values() for word in job.command if word.endswith(".py")}
    assert named == {str(path) for path in SCRIPTS.glob("*.py") if path.name != "place.py"}


def looked_at(package):
    """Return the jobs that the tests of a package look at."""
    files = (ROOT / "tests" / package).glob("test_*.py")
    found = [one for path in files for one in vars(importlib.import_module(f"tests.{package}.{path.stem}")).values()]
    marks = [mark for test in found for mark in getattr(test, "pytestmark", ()) if hasattr(mark, "args")]
    rows = [row for mark in marks if mark.name == "parametrize" for row in mark.args[1]]
    marks += [mark for row in rows for mark in getattr(row, "marks", ())]
    return {name for mark in marks if mark.name == "gpu_job" for name in mark.args}


def test_each_job_is_looked_at_by_a_test():
    assert JOBS.keys() - looked_at("gpu") == set()


def test_what_only_a_device_shows_is_what_the_stand_in_cannot_run(tmp_path):
    only = {name for names in ONLY_A_DEVICE.values() for name in names}
    assert JOBS.keys() - looked_at("standin") == only
    Results(tmp_path, {})
    assert "- CUDA graphs: capture_async_allreduce, " in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_imports_of_ours_is_there(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and "ddpdoctor" in node.module:
            source = node.module.replace("_ddpdoctor_recorder", "ddpdoctor.recorder")
            assert [alias.name for alias in node.names if not _is_there(source, alias.name)] == []


def _is_there(module, name):
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None
