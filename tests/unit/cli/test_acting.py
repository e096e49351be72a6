"""Actions on verdicts that are made up: which hosts are excluded, what a command and a webhook get."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ddpdoctor.cli import actions
from ddpdoctor.cli.actions import (
    call_webhook,
    check_webhook,
    exclude_hosts,
    hosts_to_exclude,
    run_command,
    status_of_verdict,
)
from ddpdoctor.cli.metrics import MetricExport, OtlpSender, check_metrics, file_of
from ddpdoctor.collect.proc import read_process
from ddpdoctor.diagnose.live import read_samples
from ddpdoctor.launch.run_folder import write_run_file
from ddpdoctor.model.errors import UserError, install_command
from ddpdoctor.model.findings import FaultOrigin, RankRow, Severity
from ddpdoctor.model.live import METRICS, JobNow, Liveness, RankNow, ReplicasNow
from ddpdoctor.report.formats import render_metrics
from tests.golden import Cases, words
from tests.metrics import decode, parse, read, sent, value
from tests.pictures import FINISHED, finding
from tests.pictures import report as small_report
from tests.scenarios.running import clean_environment, wait_for
from tests.simulated import wrap_options
from tests.web import Receiver

CASES = Cases(__name__)
test_kept = CASES.test()
FINDING = replace(
    finding("DD611", "transport", ranks=(1,), hosts=("node1",), origin=FaultOrigin.NETWORK, fix="look at the network"),
    summary="an all_reduce\nstalls",
)


def report(**changes):
    rows = tuple(RankRow(rank=n, local_rank=0, host=f"node{n}", pid=None, state="in all_reduce") for n in range(3))
    return replace(small_report(replace(FINDING, **changes)), ranks=rows, ended_at="2026-01-02T03:04:06Z")


def blamed(*, origin="network", **changes):
    return report(origin=origin and FaultOrigin(origin), **changes)


def checked_webhook(url):
    try:
        return check_webhook(url)
    except UserError as refused:
        if SECRET in f"{refused.message} {refused.help}":
            return "the secret is shown"
        raise


test_words = words(
    __name__,
    hosts_to_exclude=lambda changes: hosts_to_exclude(blamed(**changes)),
    status_of_verdict=lambda row: status_of_verdict(blamed(origin=row[0], severity=Severity(row[1])), row[2]),
    check_webhook=checked_webhook, check_metrics=partial(check_metrics, None, otlp=True),
)  # fmt: skip


def test_a_host_is_excluded_once_with_reason_and_time(tmp_path):
    path = tmp_path / "excluded"
    path.write_text("node7\n")
    assert exclude_hosts(path, report(), Path("report.json")) == f"node1 excluded in {path}"
    assert exclude_hosts(path, report(), Path("report.json")) == ""
    assert path.read_text().splitlines() == [
        "node7", "# 2026-01-02T03:04:06Z DD611 transport: an all_reduce stalls (report.json)", "node1",
    ]  # fmt: skip


@pytest.mark.parametrize("host", ["node1\nnode2", "node1,node2", "node1 node2", "#", "", "n" * 256, "node\x1b[31m"])
def test_a_name_that_would_exclude_other_hosts_is_not_written(tmp_path, host):
    """It comes from another node."""
    path = tmp_path / "excluded"
    assert exclude_hosts(path, report(hosts=(host,)), Path("report.json")) == ""
    assert exclude_hosts(path, report(hosts=(host, "node3")), Path("a\nnode4")) == f"node3 excluded in {path}"
    assert path.read_text().splitlines()[1:] == ["node3"]


DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
for number in range(3):
    os.close(number)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(1000)
"""
FORK_TWICE = shlex.join([sys.executable, "-c", DAEMON])
WAYS = {
    "in its group": "sleep 1000 & echo $! > {child}; wait",
    "setsid": "setsid sh -c 'echo $$ > {child}; exec sleep 1000' & wait",
    "setsid, and it ignores SIGTERM": "setsid sh -c 'trap \"\" TERM HUP; echo $$ > {child}; sleep 1000; :' & wait",
    "two forks": FORK_TWICE + " {child}; sleep 1000",
}


def is_over(child):
    found = read_process(child)
    return found is None or found.state in "ZX"


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Run a command in each way until its limit, all at once; return what was said, and the file with its child."""
    children = {way: tmp_path_factory.mktemp("way") / "child" for way in WAYS}

    def run(way):
        script = WAYS[way].format(child=children[way])
        return run_command(script, report(), FINDING, Path("report.json"), limit_s=2.0)

    with ThreadPoolExecutor(len(WAYS)) as pool:
        return {way: (said, children[way]) for way, said in zip(WAYS, pool.map(run, WAYS), strict=True)}


@pytest.mark.parametrize("way", WAYS)
def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(way, killed):
    said, file = killed[way]
    assert said == "--on-finding: the command was killed after 2 s"
    child = int(file.read_text())
    assert wait_for(lambda: is_over(child))


def test_what_a_command_leaves_behind_is_not_waited_for_and_ends_at_the_limit(tmp_path):
    file = tmp_path / "child"
    script = f"{FORK_TWICE} {file}; while ! test -s {file}; do sleep 0.05; done"
    assert run_command(script, report(), FINDING, Path("report.json"), limit_s=3.0) == ""
    child = int(file.read_text())
    assert not is_over(child)
    assert wait_for(lambda: is_over(child))


def test_a_command_may_end_without_reading_the_report(tmp_path):
    """It is larger than a pipe takes. The healthy twin reads all of it."""
    large = replace(report(), command=("wrap", "x" * 200_000))
    assert run_command("exit 0", large, FINDING, Path("report.json")) == ""
    assert run_command(f"cat > {tmp_path}/told", large, FINDING, Path("report.json")) == ""
    assert json.loads((tmp_path / "told").read_text())["command"][1] == "x" * 200_000


@pytest.mark.parametrize("summary", ["a\0b", "a\ud800b", "a" * 200_000, "$(touch x); `touch x`"])
def test_whatever_a_verdict_says_the_command_runs(tmp_path, summary, monkeypatch):
    """Texts of exceptions may hold anything, and none of it is run."""
    monkeypatch.chdir(tmp_path)
    one = replace(FINDING, summary=summary, ranks=tuple(range(50_000)))
    said = run_command('printf %s "$DDPDOCTOR_SUMMARY" > told', report(), one, Path("report.json"))
    assert said == ""
    assert [path.name for path in tmp_path.iterdir()] == ["told"]
    assert (tmp_path / "told").read_text()[:1] == summary[:1]


@pytest.mark.parametrize(("command", "status"), [("exit 7", "7"), ("kill -9 $$", "-9")])
def test_a_command_that_fails_is_reported(command, status):
    said = run_command(command, report(), FINDING, Path("report.json"))
    assert said == f"--on-finding: the command ended with status {status}"


@pytest.mark.parametrize("form", ["json", "slack", "teams"])
def test_each_form_says_the_verdict(form):
    with Receiver() as receiver:
        assert call_webhook(receiver.url, form, report(), Path("report.json")) == ""
    (sent,) = receiver.received
    assert sent.keys() == {
        "json": {"text", "report", "started_at", "ended_at", "job", "verdict"}, "slack": {"text"},
        "teams": {"type", "attachments"},
    }[form]  # fmt: skip
    assert "stalls" in str(sent)
    assert "look at the network" in str(sent)


TRIES = {500: 3, 429: 3, 404: 1, 301: 1, 302: 1, 303: 1, 307: 1, 308: 1}


@pytest.mark.parametrize("answer", TRIES)
def test_a_server_that_may_recover_is_asked_again_and_a_redirect_is_not_followed(answer):
    """Its target might be the metadata service of a cloud, or a file."""
    with Receiver() as inner, Receiver(answers=(answer,), location=inner.url) as receiver:
        said = call_webhook(receiver.url, "json", report(), Path("report.json"), pause=lambda _: None)
    assert (len(receiver.received), inner.received, inner.gotten) == (TRIES[answer], [], 0)
    assert f"it answered {answer}" in said
    assert ("a redirect, which is not followed" in said) is (answer < 400)
    assert "/hook" not in said


def test_a_server_that_never_answers_is_given_up_before_the_end_of_wrap(monkeypatch):
    assert actions.TRIES * actions.TRY_LIMIT_S + 3 * actions.PAUSE_S < actions.END_LIMIT_S
    monkeypatch.setattr(actions, "TRY_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/hook"
        said = call_webhook(url, "json", report(), Path("report.json"), pause=lambda _: None)
    assert said == "--webhook: the verdict could not be sent to 127.0.0.1: no answer within 0 s"


SECRET = "T0S3CR3T"


ANSWERS = {
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n", "nothing": b"", "a line without end": b"x" * 200_000,
    "a status that repeats the path": f"HTTP/1.1 404 /hook/{SECRET}\r\nContent-Length: 0\r\n\r\n".encode(),
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000,
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_whatever_answers_the_url_is_not_shown(case):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):  # who does not ask again closes the server
                for _ in range(3):
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(100_000)
                        connection.sendall(ANSWERS[case])

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/hook/{SECRET}"
        said = call_webhook(url, "json", report(), Path("report.json"), pause=lambda _: None)
    assert said.startswith("--webhook: the verdict could not be sent to 127.0.0.1: ")
    assert SECRET not in said


# Metrics of jobs that are made up: how they are written and sent, and what is refused.


RANK = RankNow(
    rank=0, host="a", pid=1, lives=True, trains=True, state="trains", since_s=None, where=None, step=12, step_ms=250.0,
    waits_share=0.25, epoch=2, batch=13, memory_bytes=1024,
)  # fmt: skip
NOW = JobNow(
    run="record", state=Liveness.RUNNING, host="a", started_at="1970-01-01T00:01:00+00:00", running_s=1.0,
    exit_status=None, attempt=1, world_size=2,
    ranks=(RANK, replace(RANK, rank=1, trains=False, since_s=9.5, step_ms=None, waits_share=None)), waits=(),
    waited_for=(), replicas=ReplicasNow(equal_up_to=8, at="optimizer step", compared=4), unseen=(), reported="",
)  # fmt: skip
SLOW = replace(finding("DD610", "straggler", Severity.WARNING), summary="rank 1 is slow")
ENDED = small_report(SLOW, SLOW, job=FINISHED)
MEASURED = {"run": "/runs/1", "script": "train.py", "version": "1", "is_first": True}


@CASES
def metrics_as_text():
    """At its end there are findings and a status; a further node writes only its ranks."""
    texts = {
        "it runs": render_metrics(read_samples(NOW, None, **MEASURED)),
        "it has ended": render_metrics(read_samples(NOW, ENDED, **MEASURED)),
        "a further node": render_metrics(read_samples(NOW, ENDED, **{**MEASURED, "is_first": False})),
    }
    assert {name for name, _ in parse(texts["it has ended"])} == {one.name for one in METRICS}
    return texts


def test_a_further_node_writes_a_file_of_its_own(tmp_path):
    assert file_of(Path("m/a.prom"), tmp_path / "report.json") == Path("m/a.prom")
    assert file_of(Path("m/a.prom"), tmp_path / "node-3.json") == Path("m/a-node-3.prom")


@pytest.mark.parametrize("name", ['a "b"', "a\\b", "a\nb", "a}b # EOF", "\udcff.py", "\x1b[0m"])
def test_a_name_from_the_job_cannot_damage_the_text(name):
    found = parse(render_metrics(read_samples(NOW, None, **{**MEASURED, "script": name})))
    shown = name.encode("utf-8", "replace").decode()
    assert value(found, "job_info", script=shown, version="1") == 1


def test_the_same_is_sent_over_otlp(monkeypatch):
    with Receiver(read=decode) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.base)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=s3cret")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
        sender = OtlpSender("a", "1")
        samples = read_samples(NOW, ENDED, **MEASURED)
        assert sender.send(samples[:1]) == ""
        assert sender.send(samples) == ""
    assert receiver.headers[0]["x-key"] == "s3cret"
    first, second = receiver.received
    assert len(sent(first)) == 1
    assert sent(second) == parse(render_metrics(samples))
    resource = {one.key: one.value.string_value for one in second.resource_metrics[0].resource.attributes}
    assert (resource["service.name"], resource["host.name"], resource["team"]) == ("ddpdoctor", "a", "vision")
    units = {one.name: one.unit for one in second.resource_metrics[0].scope_metrics[0].metrics}
    assert units["ddpdoctor_rank_memory_bytes"] == "By"


def test_a_collector_that_refuses_is_named_without_secrets(monkeypatch, capfd):
    with Receiver(answers=(403,), read=decode) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{receiver.base}/s3cret")
        said = OtlpSender("a", "1").send(read_samples(NOW, None, **MEASURED))
    address = receiver.base.partition("//")[2]
    assert said == f"--otlp: metrics could not be sent to {address}; ddpdoctor keeps trying"
    assert capfd.readouterr() == ("", "")


def test_a_redirect_is_no_success(monkeypatch):
    with Receiver() as inner, Receiver(answers=(302,), read=decode, location=inner.url) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.base)
        said = OtlpSender("a", "1").send(read_samples(NOW, None, **MEASURED))
    assert "metrics could not be sent" in said
    assert (len(receiver.received), inner.gotten) == (1, 0)


def test_a_pipe_is_refused_because_it_would_be_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        check_metrics(tmp_path / "pipe", {}, otlp=False)


def test_a_collector_that_never_answers_does_not_cost_the_file_its_end(tmp_path, monkeypatch):
    job, file = wrap_options(tmp_path), tmp_path / "job.prom"
    write_run_file(tmp_path, job, "2026-01-02T03:04:05+00:00", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        export = MetricExport(metrics_file=file, otlp=True, job=job, end_limit_s=0.1)
        export.start(tmp_path)
        with silent.accept()[0]:
            assert value(read(file), "job_status", status="running") == 1
            export.finish(tmp_path, lambda: ENDED)
            assert value(read(file), "job_status", status="finished") == 1
    assert export._thread is not None
    export._thread.join(20)


def test_without_opentelemetry_nothing_is_started(tmp_path):
    (tmp_path / "opentelemetry.py").write_text("")
    (tmp_path / "train.py").write_text("open('started', 'w')")
    command = [sys.executable, "-m", "ddpdoctor", "wrap", "--otlp", "train.py"]
    environment = clean_environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert install_command("otlp") in done.stderr
    assert not (tmp_path / "started").exists()
