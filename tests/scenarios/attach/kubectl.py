"""Stands in for kubectl where there is no cluster: a pod is a process with pids and a host name of its own.

It reads pods.json beside itself, a list of {"pid", "env", "namespace", "labels", "item"}: ``item`` is what the API has
of the pod, ``pid`` its first process. ``exec`` enters the pod as a container runtime does. Messages and statuses are
those of kubectl.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

PODS = json.loads((Path(__file__).parent / "pods.json").read_text())


def fail(message: str, status: int = 1) -> None:
    print(message, file=sys.stderr)
    sys.exit(status)


def option(name: str, words: list[str]) -> str | None:
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), None)


def get_pods(words: list[str]) -> None:
    if (Path(__file__).parent / "forbidden").exists():
        fail('Error from server (Forbidden): pods is forbidden: User "me" cannot list resource "pods" in API group ""')
    namespace, selector = option("namespace", words) or "default", option("selector", words)
    chosen = [pod["item"] for pod in PODS if pod["namespace"] == namespace and selector in pod["labels"]]
    print(json.dumps({"apiVersion": "v1", "items": chosen, "kind": "List"}, indent=4))


def run_in_pod(words: list[str]) -> None:
    at = words.index("--")
    own, command = words[:at], words[at + 1 :]
    name = next(word for word in own if not word.startswith("--"))
    namespace = option("namespace", own) or "default"
    pod = next((one for one in PODS if (one["namespace"], one["item"]["metadata"]["name"]) == (namespace, name)), None)
    if pod is None:
        fail(f'Error from server (NotFound): pods "{name}" not found')
    containers = [one["name"] for one in pod["item"]["status"]["containerStatuses"]]
    container = option("container", own)
    if container is None and len(containers) > 1:
        print(f'Defaulted container "{containers[0]}" out of: {", ".join(containers)}', file=sys.stderr)
    if container is not None and container not in containers:
        fail(f"Error from server (BadRequest): container {container} is not valid for pod {name}")
    enter = [shutil.which("nsenter"), f"--target={pod['pid']}", "--pid", "--mount", "--uts", "--"]
    look = ["sh", "-c", 'command -v "$0"', command[0]]
    found = subprocess.run([*enter, *look], env=pod["env"], capture_output=True, check=False)
    if found.returncode != 0:
        fail(
            "error: Internal error occurred: error executing command in container: failed to exec in container: OCI "
            "runtime exec failed: exec failed: unable to start container process: exec: "
            f'"{command[0]}": executable file not found in $PATH: unknown'
        )
    ended = subprocess.run([*enter, *command], env=pod["env"], stdin=subprocess.DEVNULL, check=False)
    if ended.returncode != 0:
        fail(f"command terminated with exit code {ended.returncode}", ended.returncode)


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    os.environ.pop("PYTHONPATH", None)
    {"get": lambda: get_pods(rest[1:]), "exec": lambda: run_in_pod(rest)}[verb]()
