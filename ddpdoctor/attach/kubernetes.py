"""Asks the pods of a Kubernetes job by kubectl exec, with the user's own kubectl and rights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.attach.nodes import LIMIT_S, Way, ask_nodes, collector
from ddpdoctor.collect.bounded import start_program, wait_for_program
from ddpdoctor.model.attached import NodeAnswer
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.words import count_of
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SERVER_LIMIT_S = 30.0
"""Our choice: a list of a thousand pods takes a few seconds."""
LACKS = ("No module named", "executable file not found", "no such file or directory")
_LOGIN = "see `kubectl get pods --selector={selector}`, and which cluster `kubectl config current-context` is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Which pods are asked, and where in them."""

    selector: str
    """A label selector: "job-name=train"."""
    namespace: str | None = None
    container: str | None = None

    @property
    def place(self) -> tuple[str, ...]:
        """Return kubectl's option for the namespace."""
        return (f"--namespace={self.namespace}",) if self.namespace else ()


def attach_kubectl(
    pods: Pods, output: Path, python: str, name: str | None, tell: Callable[[str], None], limit_s: float = LIMIT_S
) -> Path:
    """Have every pod look at its ranks, and return the folder. Raises UserError if that is impossible."""
    found = _list_pods(pods)
    stopped = {pod: reason for pod, reason in found.items() if reason}
    commands = {pod: (*_exec(pods, pod), *collector(python, name)) for pod, reason in found.items() if not reason}
    tell(f"asking {count_of(len(commands), 'pod')} with {pods.selector}")
    known = [NodeAnswer(node=pod, folder="", reason=reason, remedy=_see(pods)) for pod, reason in stopped.items()]
    way = Way(name="kubectl exec", noun="pod", remedy=lambda reason: _remedy(pods, reason))
    return ask_nodes(way, commands, output, known, limit_s)


def _exec(pods: Pods, pod: str) -> tuple[str, ...]:
    container = (f"--container={pods.container}",) if pods.container else ()
    return ("kubectl", "exec", *pods.place, pod, *container, "--")


def _list_pods(pods: Pods) -> dict[str, str]:
    """Return the names of the pods, each with why it cannot be asked, or an empty string."""
    if shutil.which("kubectl") is None:
        raise UserError(
            "kubectl is not on PATH here", help="Install it, or run `ddpdoctor attach` in every pod of the job."
        )
    process = start_program(("kubectl", "get", "pods", *pods.place, f"--selector={pods.selector}", "--output=json"))
    end = wait_for_program(process, SERVER_LIMIT_S)
    if end.status != 0:
        reason = hide_in_text(end.last_error) if end.status is not None else f"no answer within {SERVER_LIMIT_S:.0f} s"
        raise UserError(f"kubectl cannot list the pods: {reason}", help=_LOGIN.format(selector=pods.selector))
    try:
        items = json.loads(end.out)["items"]
        found = {str(item["metadata"]["name"]): _why_not(item.get("status") or {}, pods.container) for item in items}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError("kubectl did not print a list of pods", help="See `kubectl version`.") from None
    if not found:
        where = f"the namespace {pods.namespace}" if pods.namespace else "this namespace"
        raise UserError(
            f"no pod in {where} has the labels {pods.selector}",
            help="`kubectl get pods --all-namespaces --show-labels` lists them; give --namespace.",
        )
    return found


def _why_not(status: dict[str, Any], container: str | None) -> str:
    """Return why nothing can be run in a pod, or an empty string."""
    phase = str(status.get("phase", "Unknown"))
    states = [
        (str(one.get("name")), one.get("state") or {})
        for one in status.get("containerStatuses") or ()
        if container in {None, one.get("name")}
    ]
    if phase == "Running" and (not states or any("running" in state for _, state in states)):
        return ""
    why = "; ".join(filter(None, (_state_words(name, state) for name, state in states)))
    return f"the pod is {phase}" + (f": {why}" if why else "")


def _state_words(name: str, state: dict[str, Any]) -> str:
    """Return "trainer ended, OOMKilled, exit code 137", or "trainer waits, ImagePullBackOff"."""
    waits, ended = state.get("waiting") or {}, state.get("terminated") or {}
    if waits:
        return ", ".join(filter(None, (f"{name} waits", waits.get("reason"))))
    if ended:
        return ", ".join(filter(None, (f"{name} ended", ended.get("reason"), f"exit code {ended.get('exitCode')}")))
    return ""


def _see(pods: Pods) -> str:
    command = " ".join(("kubectl", "{}", *pods.place))
    return f"see `{command.format('describe')} pod NODE` and `{command.format('logs')} NODE`"


def _remedy(pods: Pods, reason: str) -> str:
    """Return what to do about a pod that sent nothing."""
    if any(words in reason for words in LACKS):
        command = " ".join((*_exec(pods, "NODE"), "python -m pip install 'ddpdoctor[attach]'"))
        return f"`{command}`, or name a Python there that has it with --python"
    if "forbidden" in reason.lower():
        return f"you need this permission: `{' '.join(('kubectl auth can-i create pods/exec', *pods.place))}`"
    return _see(pods)
