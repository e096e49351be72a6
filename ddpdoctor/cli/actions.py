"""Acts on a verdict of ``wrap``, outside the job and with time limits: a failure here only prints a message."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ddpdoctor.cli.output import render, say
from ddpdoctor.collect.proc import safe_flags
from ddpdoctor.launch.run_folder import REPORT_NAME
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.findings import FaultOrigin, JobStatus, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpdoctor.model.facts import Logger
    from ddpdoctor.model.findings import Finding, Report

# Keeps these libraries from sending reports of their use, and from printing.
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
WebhookFormat = Literal["json", "slack", "teams"]
COMMAND_LIMIT_S = 60.0  # our choice: a command that runs longer is killed with all that it started
END_LIMIT_S = 90.0  # our choice: how long the end of ``wrap`` waits for actions that still run
# Of a webhook: the limit of one try, and the pause before the second; twice that before the third.
TRIES, TRY_LIMIT_S, PAUSE_S = 3, 10.0, 2.0
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
# Names come from other nodes. In a file of hosts, a line break or a comma in one would exclude others.
_HOST = re.compile(r"[\w.:-]{1,255}")
MAX_VARIABLE = 100_000  # Linux takes variables of up to 128 KiB each; with a longer one, the command would not start
HOSTS_ARE_AT_FAULT = {FaultOrigin.MACHINE, FaultOrigin.NETWORK}
# A process that runs a command and ends at a limit with all that the command has started.
#
# Whatever daemonizes itself, by ``setsid`` or two forks, becomes a child of this process when its parent ends, because
# it is their subreaper. It reports how the command ended, and then waits for what the command has left behind. It keeps
# the limit even if ddpdoctor is killed.
_LEASH = """
import os, signal, subprocess, sys, time

def descendants():
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/" + name + "/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, ())
    return found[1:]

def reap():
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            os._exit(0)
        if pid == child:
            report("status %d" % os.waitstatus_to_exitcode(status))
        if not pid:
            return

def report(text):
    global told
    if not told:
        told = True
        os.write(1, text.encode())
        os.dup2(2, 1)  # who reads this need not wait for what the command has left behind

told, deadline = False, time.monotonic() + float(sys.argv[1])
try:
    import ctypes
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
except (ImportError, OSError, AttributeError):
    pass  # a Python without ctypes: what has daemonized itself is not found
try:
    started = subprocess.Popen(["/bin/sh", "-c", sys.argv[2]], stdout=2, start_new_session=True)
except OSError as error:
    report("status " + (error.strerror or "unknown"))
    sys.exit()
child = started.pid  # "started" is kept, because its end would reap the child
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
while (left := deadline - time.monotonic()) > 0:
    reap()
    signal.sigtimedwait([signal.SIGCHLD], left)
report("killed")
for _ in range(500):
    for pid in descendants():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    reap()
    time.sleep(0.01)
"""
LOG_LIMIT_S = 60.0  # our choice: on a busy machine importing a library takes seconds, and so does an upload
MISSING = "ModuleNotFoundError"
NOWHERE = "the script did not log to TensorBoard, W&B or MLflow, so the findings are logged nowhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a log gets."""

    verdict: str  # the verdict in one sentence with its code, or the first finding if there is no verdict
    step: int  # the last step of the job
    has_finished: bool  # whether the job ended well
    text: str  # the report, as Markdown


def write_to_tensorboard(place: Mapping[str, str], entry: Entry) -> None:
    """Write a new event file with the report as a text that TensorBoard shows."""
    import time

    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    if not Path(place["folder"]).is_dir():
        raise SystemExit(f"its folder {place['folder']} is gone")
    writer = EventFileWriter(place["folder"], filename_suffix=".ddpdoctor")
    writer.add_event(Event(wall_time=time.time(), step=entry.step, summary=text_pb("ddpdoctor/report", entry.text)))
    writer.close()


def write_to_wandb(place: Mapping[str, str], entry: Entry) -> None:
    """Resume the run and add the verdict and the report. The run counts as failed if the job failed."""
    import html

    import wandb

    settings = wandb.Settings(
        base_url=place["base_url"], console="off", disable_code=True, disable_git=True, x_disable_meta=True,
        x_disable_stats=True,
    )  # fmt: skip
    with wandb.init(
        id=place["id"], project=place["project"], entity=place["entity"] or None, dir=place["folder"],
        mode="offline" if place["mode"] == "offline" else "online", resume="allow", settings=settings,
    ) as run:  # fmt: skip
        run.log({"ddpdoctor/report": wandb.Html(f"<pre>{html.escape(entry.text)}</pre>", inject=False)})
        run.summary["ddpdoctor/verdict"] = entry.verdict
        run.finish(exit_code=0 if entry.has_finished else 1)


def write_to_mlflow(place: Mapping[str, str], entry: Entry) -> None:
    """Add the verdict to the run as a tag and the report as an artifact; the run keeps its status."""
    os.chdir(place["folder"])  # addresses of files may be relative
    from mlflow import MlflowClient

    client = MlflowClient(place["tracking_uri"] or None)
    client.log_text(place["id"], entry.text, "ddpdoctor/report.md")
    client.set_tag(place["id"], "ddpdoctor.verdict", entry.verdict)


WRITERS: Mapping[str, Callable[[Mapping[str, str], Entry], None]] = {
    "tensorboard": write_to_tensorboard, "wandb": write_to_wandb, "mlflow": write_to_mlflow,
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Actor:
    """Acts once on each verdict of a job. An action returns a message for the user, or an empty string."""

    on_finding: str | None = None  # a command for the shell
    webhook: str | None = None
    webhook_format: WebhookFormat = "json"
    exclude_file: Path | None = None
    _threads: dict[tuple[str, tuple[int, ...]], threading.Thread] = field(default_factory=dict)

    def act(self, report: Report, file: Path) -> None:
        """Start what is wanted for the verdict of a report, which is saved in ``file``, without waiting for it."""
        verdict = report.verdict
        key = (verdict.code, verdict.ranks) if verdict is not None else ("", ())
        if verdict is None or key in self._threads:
            return
        actions: list[Callable[[], str]] = []
        if (excluded := self.exclude_file) is not None:
            actions.append(lambda: exclude_hosts(excluded, report, file))
        if command := self.on_finding:
            actions.append(lambda: run_command(command, report, verdict, file))
        if url := self.webhook:
            actions.append(lambda: call_webhook(url, self.webhook_format, report, file))
        if actions:
            self._threads[key] = threading.Thread(target=_run_actions, args=(actions,), daemon=True)
            self._threads[key].start()

    def finish(self) -> None:
        for thread in self._threads.values():
            thread.join(END_LIMIT_S)


def _run_actions(actions: list[Callable[[], str]]) -> None:
    for act in actions:
        try:
            problem = act()
        except Exception as error:  # noqa: BLE001 - an action that fails must not cost the job or its report
            problem = f"an action failed: {type(error).__name__}: {error}"
        if problem:
            say(sys.stderr, problem)


def exclude_hosts(path: Path, report: Report, file: Path) -> str:
    """Append the hosts at fault, with a reason and the time, to a file that ``srun --exclude`` reads."""
    hosts = [host for host in hosts_to_exclude(report) if _HOST.fullmatch(host)]
    if not hosts or report.verdict is None:
        return ""
    reason = " ".join(f"{report.verdict.code} {report.verdict.kind}: {report.verdict.summary} ({file})".split())
    with path.open("a+", encoding="utf-8") as excluded:
        fcntl.flock(excluded, fcntl.LOCK_EX)
        excluded.seek(0)
        known = {line.strip() for line in excluded}
        new = [host for host in hosts if host not in known]
        if new:
            excluded.write(f"# {report.ended_at} {reason}\n" + "".join(f"{host}\n" for host in new))
            excluded.flush()
            os.fsync(excluded.fileno())
    return f"{', '.join(new)} excluded in {path}" if new else ""


def hosts_to_exclude(report: Report) -> tuple[str, ...]:
    """Return the hosts that the verdict blames; none if the network fails for the whole job."""
    verdict = report.verdict
    if verdict is None or verdict.origin not in HOSTS_ARE_AT_FAULT:
        return ()
    named = verdict.hosts or tuple(dict.fromkeys(row.host for row in report.ranks if row.rank in verdict.ranks))
    others = {row.host for row in report.ranks} - set(named)
    return named if others or verdict.origin is FaultOrigin.MACHINE else ()


def run_command(command: str, report: Report, verdict: Finding, file: Path, limit_s: float = COMMAND_LIMIT_S) -> str:
    """Run the user's command with the report on stdin. Its output goes to stderr: stdout belongs to the script."""
    from ddpdoctor.report.formats import render_json

    told = {
        "REPORT": file, "CODE": verdict.code, "KIND": verdict.kind, "SEVERITY": verdict.severity.value,
        "SUMMARY": verdict.summary, "FIX": verdict.fix, "RANKS": ",".join(map(str, verdict.ranks)),
        "HOSTS": ",".join(verdict.hosts), "ORIGIN": verdict.origin.value if verdict.origin is not None else "",
    }  # fmt: skip
    variables = {
        f"DDPDOCTOR_{name}": os.fsencode(value)
        if isinstance(value, Path)
        else str(value).replace("\0", "").encode(errors="replace")[:MAX_VARIABLE]
        for name, value in told.items()
    }
    with tempfile.TemporaryFile() as given:
        given.write(render_json(report).encode())
        given.seek(0)
        leash = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LEASH, str(limit_s), command],
            stdin=given, stdout=subprocess.PIPE, stderr=sys.stderr.fileno(), start_new_session=True,
            env={**os.environb, **{os.fsencode(name): value for name, value in variables.items()}},
        )  # fmt: skip
    assert leash.stdout is not None
    with leash.stdout:
        said = leash.stdout.read().decode()
    threading.Thread(target=leash.wait, daemon=True).start()  # it may have to wait for what is left behind
    if said == "killed":
        return f"--on-finding: the command was killed after {limit_s:.0f} s"
    status = said.removeprefix("status ") or "unknown"
    return f"--on-finding: the command ended with status {status}" if status != "0" else ""


def check_webhook(url: str) -> None:
    """Raise ``UserError`` for a text that is not a URL of a web server. The URL is a secret and never shown."""
    help_ = "Give the URL of the service, in quotes."
    if re.search(r"[^\x21-\x7e]", url):
        raise UserError("--webhook has a space or another character that no URL has", help=help_)
    try:
        parts = urlsplit(url)
        is_url, has_login = parts.scheme in {"http", "https"} and bool(parts.hostname), "@" in parts.netloc
        _ = parts.port
    except ValueError:
        is_url = has_login = False
    if not is_url:
        raise UserError("--webhook is not a URL that begins with https://", help=help_)
    if has_login:
        raise UserError("--webhook has a name or password before its host", help="Give a URL without them.")


def call_webhook(
    url: str, form: WebhookFormat, report: Report, file: Path, pause: Callable[[float], None] = time.sleep
) -> str:
    """Post the verdict. Neither the URL nor an error's own text, which may contain it, is shown.

    Only http and https are used. Redirects are not followed, because they would let the server choose where the verdict
    goes, and turn the POST into a GET without it.
    """
    import ssl
    import urllib.error
    import urllib.request

    from ddpdoctor.diagnose.bundle import without_secrets

    body = json.dumps(_message(form, without_secrets(report)[0], file)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "ddpdoctor"})  # noqa: S310 - checked by check_webhook
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(), urllib.request.HTTPErrorProcessor(),
    ):  # fmt: skip
        opener.add_handler(handler)
    problem = ""
    for number in range(TRIES):
        if number:
            pause(PAUSE_S * number)
        try:
            with opener.open(request, timeout=TRY_LIMIT_S):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            problem = f"it answered {error.code} {_PHRASES.get(error.code, '')}".rstrip()
            if 300 <= error.code < 400:
                problem += ", a redirect, which is not followed; give its target URL"
            if error.code != 429 and error.code < 500:  # only who has too much to do is asked again
                break
        except Exception as error:  # noqa: BLE001 - http.client's errors quote parts of the URL
            # without any text that may contain the URL
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                problem = f"no answer within {TRY_LIMIT_S:.0f} s"
            elif isinstance(reason, ssl.SSLError):
                problem = f"TLS failed: {reason.reason or type(reason).__name__}"
            else:
                problem = (isinstance(reason, OSError) and reason.strerror) or type(reason).__name__
    return f"--webhook: the verdict could not be sent to {urlsplit(url).hostname}: {problem}"


def _message(form: WebhookFormat, report: Report, file: Path) -> dict[str, Any]:
    from ddpdoctor.model.codec import encode

    verdict = report.verdict
    said = "ddpdoctor: no problem found" if verdict is None else f"ddpdoctor: {verdict.summary} ({verdict.code})"
    if form == "json":
        times = {"started_at": report.started_at, "ended_at": report.ended_at}
        return {"text": said, "report": str(file), **times, "job": encode(report.job), "verdict": encode(verdict)}
    lines = [said, *([f"To do: {verdict.fix}"] if verdict is not None and verdict.fix else []), f"Report: {file}"]
    if form == "slack":
        return {"text": "\n".join(lines)}
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4",
        "body": [{"type": "TextBlock", "text": line, "wrap": True} for line in lines],
    }  # fmt: skip
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [attachment]}


def status_of_verdict(report: Report, status: int) -> int:
    """Return the exit status for a scheduler: whether to start the job again. A job that succeeded keeps its status."""
    verdict = report.verdict
    if not status or verdict is None or verdict.severity is not Severity.ERROR or verdict.origin is None:
        return status
    return ExitStatus.RETRY if verdict.origin in HOSTS_ARE_AT_FAULT else ExitStatus.GIVE_UP


def log_findings(run_dir: Path, report: Report, file: Path) -> None:
    """Add the report to the script's logs, if it has findings and this host reports on the job."""
    if not report.findings or file.name != REPORT_NAME:
        return
    try:
        from ddpdoctor.collect.run import read_loggers

        problems = [NOWHERE]
        if loggers := read_loggers(run_dir):
            finding = report.verdict or report.findings[0]
            verdict, text = f"{finding.summary} ({finding.code})", render(report, "markdown")
            step = max((row.step or 0 for row in report.ranks), default=0)
            has_finished = report.job is not None and report.job.status == JobStatus.FINISHED
            entry = Entry(verdict=verdict, step=step, has_finished=has_finished, text=text)
            problems = [_write(logger, entry) for logger in loggers]
    except Exception as error:  # noqa: BLE001 - a log must not cost the job its exit status
        problems = [f"{type(error).__name__}: {error}"]
    for problem in filter(None, problems):
        say(sys.stderr, f"--log-findings: {problem}")


def _write(logger: Logger, entry: Entry) -> str:
    """Have a child write; return what went wrong, or an empty string."""
    text = json.dumps(asdict(logger) | {"entry": asdict(entry)})
    command = [sys.executable, *safe_flags(), "-m", "ddpdoctor.cli.actions"]
    try:
        done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=LOG_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{logger.name} had not written the findings after {LOG_LIMIT_S:.0f} s"
    if not done.returncode:
        return ""
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if last.startswith(MISSING):
        return f"{logger.name} is not installed for {sys.executable}: pip install {logger.name}"
    return f"{logger.name} did not log the findings: {last}"


if __name__ == "__main__":
    os.environ.update(QUIET)
    job = json.load(sys.stdin)
    WRITERS[job["name"]](job["place"], Entry(**job["entry"]))
