"""``attach --kubectl``, without a cluster: ``kubectl.py`` stands in for kubectl, and its pods have their own pids."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.collect.proc import descendants, read_processes
from tests.scenarios.attach.running import ROOT, SCRIPT, marked
from tests.scenarios.hosts import require
from tests.scenarios.running import clean_environment, doctor, free_port, wait_for

SELECTOR = "job-name=train"
STARTS = 'mount -t proc proc /proc && hostname "$0" && exec "$@"'


def item(name: str, phase: str = "Running", state: Any = None, containers: tuple[str, ...] = ("trainer",)) -> Any:
    """Return what the API has of a pod, as far as it is read."""
    states = [{"name": one, "ready": True, "state": state or {"running": {}}} for one in containers]
    return {"metadata": {"name": name}, "status": {"phase": phase, "containerStatuses": states}}


class Cluster:
    """A folder with a kubectl in it, and its pods."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pods, self.processes = folder, list[Any](), list[Any]()
        folder.mkdir()
        program = folder / "kubectl"
        program.write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("kubectl.py").read_text())
        program.chmod(0o755)
        self.save()

    def save(self) -> None:
        (self.folder / "pods.json").write_text(json.dumps(self.pods))

    def add(self, entry: Any, namespace: str = "default", **more: Any) -> None:
        self.pods.append({"namespace": namespace, "labels": [SELECTOR], "item": entry, **more})
        self.save()

    def run_pod(self, name: str, *command: str, namespace: str = "default", **env: str) -> None:
        """Start a pod with a command."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**clean_environment(PYTHONPATH=str(ROOT)), "PATH": path, **env}
        apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--propagation", "private", "--")
        process = subprocess.Popen([*apart, "sh", "-c", STARTS, name, *command], env=env, start_new_session=True)
        self.processes.append(process)
        assert wait_for(lambda: descendants(process.pid, read_processes()))
        first = descendants(process.pid, read_processes())[0]
        self.add(item(name), namespace, pid=first.pid, env=env)

    def attach(self, *options: str, selector: str = SELECTOR, path: str | None = None) -> Any:
        here = {"PYTHONPATH": str(ROOT), "PATH": path or f"{self.folder}:{os.environ['PATH']}"}
        return doctor("attach", "--kubectl", selector, *options, cwd=self.folder, **here)

    def down(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    try:
        yield made
    finally:
        made.down()


def start_job(cluster: Cluster, folder: Path, namespace: str = "default") -> None:
    """Start a rank in each of two pods. Rank 1 is at fault."""
    require("unshare", "nsenter")
    folder.mkdir()
    os.mkfifo(folder / "release")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(2):
        words = (sys.executable, str(SCRIPT), "plain", str(folder))
        cluster.run_pod(f"train-{rank}", *words, namespace=namespace, RANK=str(rank), **shared)
    assert wait_for(lambda: all((folder / f"at_{rank}").exists() for rank in range(2)))


def test_all_pods_are_judged_together_and_the_job_goes_on(cluster, tmp_path):
    start_job(cluster, tmp_path / "job", namespace="team")
    done = cluster.attach("--namespace", "team", "--container", "trainer", "--format", "json")
    with (tmp_path / "job" / "release").open("w"):
        pass
    ends = [process.wait(200) for process in cluster.processes]

    report = json.loads(done.stdout)
    verdict = report["verdict"]
    assert (done.returncode, verdict["code"], verdict["ranks"], verdict["hosts"]) == (1, "DD601", [1], ["train-1"])
    assert f"attached.py:{marked('FAULT')}" in verdict["summary"]
    assert [(rank["rank"], rank["host"]) for rank in report["ranks"]] == [(0, "train-0"), (1, "train-1")]
    assert report["data"]["evidence"]["notes"] == []
    assert ends == [0, 0]


def test_pods_that_do_not_run_or_lack_ddpdoctor_are_named_with_what_to_do(cluster, tmp_path):
    start_job(cluster, tmp_path / "job")
    cluster.run_pod("train-2", "sleep", "1000", PATH="/usr/sbin:/usr/bin:/bin", PYTHONPATH="")
    cluster.pods[2]["env"]["PATH"] = "/nowhere"
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    cluster.add(item("train-3", "Failed", killed))
    cluster.add(item("train-4", "Pending", {"waiting": {"reason": "ImagePullBackOff"}}))
    cluster.pods[1]["item"]["status"]["containerStatuses"][0]["state"] = killed
    cluster.save()
    done = cluster.attach("--format", "json")

    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (4, None)
    notes = dict(note.split(": ", 1) for note in report["data"]["evidence"]["notes"])
    assert set(notes) == {"train-1", "train-2", "train-3", "train-4"}
    assert "executable file not found in $PATH" in notes["train-2"]
    assert "`kubectl exec train-2 -- python -m pip install 'ddpdoctor[attach]'`" in notes["train-2"]
    assert notes["train-3"].startswith("the pod is Failed: trainer ended, OOMKilled, exit code 137; see `kubectl")
    assert notes["train-4"].startswith("the pod is Pending: trainer waits, ImagePullBackOff; see `kubectl describe")
    assert notes["train-1"].startswith("the pod is Running: trainer ended, OOMKilled, exit code 137")


def test_what_kubectl_does_not_give_is_said(cluster):
    for options, words in (((), "in this namespace has"), (("--namespace", "team"), "in the namespace team has")):
        done = cluster.attach(*options)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"ddpdoctor: error: no pod {words} the labels job-name=train" in done.stderr
    missing = cluster.attach(path="/nowhere")
    (cluster.folder / "forbidden").touch()
    forbidden = cluster.attach()
    assert "error: kubectl is not on PATH here" in missing.stderr
    assert "error: kubectl cannot list the pods: Error from server (Forbidden): pods is forbidden" in forbidden.stderr
    assert (missing.returncode, forbidden.returncode) == (2, 2)
    assert not list(cluster.folder.glob("ddpdoctor-attach-*"))
