"""The manifests of docs/examples: what their pods run, with the variables that they are given, makes one job."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ddpdoctor.launch.command_line import split_command
from ddpdoctor.launch.placement import place
from tests.scenarios.running import JOBS, SCHEMA, clean_environment, free_port, kill_job

pytestmark = pytest.mark.usefixtures("preloaded_python")

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
MANIFESTS = ("kubernetes-pytorchjob.yaml", "kubernetes-jobset.yaml")
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
OWN = {"--report-dir": True, "--exit-status-of-verdict": False}
LIMIT_S = 250


@dataclass(frozen=True)
class Pod:
    """What one pod runs, and what its container sees."""

    command: list[str]
    variables: dict[str, str]
    ports: list[int]


def read_pods(name: str) -> list[Pod]:
    manifest = yaml.safe_load((EXAMPLES / name).read_text())
    return (_pods_of_pytorchjob if manifest["kind"] == "PyTorchJob" else _pods_of_jobset)(manifest)


def _pods_of_pytorchjob(manifest: dict[str, Any]) -> list[Pod]:
    """Number and tell the pods as setPodEnv of the training operator does (pkg/controller.v1/pytorch/envvar.go)."""
    spec = manifest["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    count = sum(one["replicas"] for one in replicas.values())
    host = f"{manifest['metadata']['name']}-master-0"
    templates = [replicas["Master"]["template"], *[replicas["Worker"]["template"]] * replicas["Worker"]["replicas"]]
    pods = []
    for rank, template in enumerate(templates):
        (container,) = template["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator looks for the container by this name"
        (port,) = [one["containerPort"] for one in container["ports"] if one["name"] == "pytorchjob-port"]
        nproc = spec["nprocPerNode"]
        operators = {
            "MASTER_ADDR": host, "MASTER_PORT": str(port), "PET_MASTER_ADDR": host, "PET_MASTER_PORT": str(port),
            "WORLD_SIZE": str(count * int(nproc)), "RANK": str(rank), "PET_NNODES": str(count),
            "PET_NPROC_PER_NODE": nproc, "PET_NODE_RANK": str(rank), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        pods.append(_pod(container, rank, operators))
    return pods


def _pods_of_jobset(manifest: dict[str, Any]) -> list[Pod]:
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completions"] == spec["parallelism"], "all pods must run at the same time"
    (container,) = spec["template"]["spec"]["containers"]
    pods = [_pod(container, index, {}) for index in range(spec["completions"])]
    name = f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['metadata']['name']}"
    assert {pod.variables["PET_MASTER_ADDR"] for pod in pods} == {name}
    return pods


def _pod(container: dict[str, Any], index: int, operators: dict[str, str]) -> Pod:
    own = {one["name"]: _value(one, index) for one in container["env"]}
    return Pod(container["command"], {**own, **operators}, [one["containerPort"] for one in container["ports"]])


def _value(variable: dict[str, Any], index: int) -> str:
    if "value" in variable:
        return str(variable["value"])
    if "fieldRef" in variable["valueFrom"]:
        assert variable["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
        return str(index)
    return "a secret"


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_pod_is_a_node_and_the_port_where_they_meet_is_declared(name):
    pods = read_pods(name)
    placed = [place(split_command(pod.command[2:], OWN), pod.variables) for pod in pods]
    assert [one.number for one in placed] == list(range(len(pods)))
    assert {one.expected for one in placed} == {len(pods)}
    assert len({(one.hosts, one.port, one.token) for one in placed}) == 1
    assert all([one.store[1], one.port] == pod.ports for one, pod in zip(placed, pods, strict=True))
    assert placed[0].token is not None


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pods_commands_run_as_one_job(name, tmp_path):
    statuses, said = run_pods(name, tmp_path / "reports", "nothing")
    assert statuses == [0, 0], said
    report = json.loads((tmp_path / "reports" / "report.json").read_text())
    jsonschema.validate(report, SCHEMA)
    assert (report["job"]["status"], report["job"]["nnodes"], report["job"]["world_size"]) == ("finished", 2, 2)
    assert len(report["ranks"]) == 2
    assert (tmp_path / "reports" / "node-1.json").exists()


@pytest.mark.parametrize(("fault", "action"), [("crash", "FailJobSet"), ("killed", "RestartJobSet")])
def test_a_jobset_starts_again_unless_the_script_is_at_fault(fault, action, tmp_path):
    """Whichever pod Kubernetes looks at first: all have the same status."""
    statuses, said = run_pods("kubernetes-jobset.yaml", tmp_path / "reports", fault)
    assert [action_of_jobset(status) for status in statuses] == [action, action], said


def action_of_jobset(status):
    """Return what the JobSet's controller does if a pod ends with a status that is not 0.

    After keps/262-ConfigurableFailurePolicy of JobSet, and the Pod failure policy of Kubernetes' Jobs.
    """
    spec = yaml.safe_load((EXAMPLES / "kubernetes-jobset.yaml").read_text())["spec"]
    (job,) = spec["replicatedJobs"]
    job_spec = job["template"]["spec"]
    assert job_spec["template"]["spec"]["restartPolicy"] == "Never", "a Pod failure policy needs it"
    assert job_spec["backoffLimit"] == 0, "else one pod alone would start again"
    names = {one["name"] for one in job_spec["template"]["spec"]["containers"]}
    reason = "BackoffLimitExceeded"
    for rule in job_spec["podFailurePolicy"]["rules"]:
        codes = rule["onExitCodes"]
        assert (codes["containerName"] in names, codes["operator"], rule["action"]) == (True, "In", "FailJob")
        if status in codes["values"]:
            reason = "PodFailurePolicy"
    rules = spec["failurePolicy"]["rules"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    return next((rule["action"] for rule in rules if reason in rule["onJobFailureReasons"]), "RestartJobSet")


def run_pods(name, reports, fault):
    """Run the commands on one host, with one rank a pod in place of eight; return statuses and output."""
    port = str(free_port())
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    reported = here | {f"PET_{one}": value for one, value in here.items()} | {"PET_NPROC_PER_NODE": "1"}
    words = {"ddpdoctor": [sys.executable, "-m", "ddpdoctor"], "/reports/train": [str(reports)],
             "train.py": [str(JOBS / "over_nodes.py"), fault, "20"]}  # fmt: skip
    processes = []
    for pod in read_pods(name):
        command = [word for one in pod.command[: pod.command.index("train.py") + 1] for word in words.get(one, [one])]
        env = clean_environment(**{**pod.variables, **reported})
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for folder in (reports, *reports.glob("nodes/*")):
            kill_job(folder)
    return [process.returncode for process in processes], said
