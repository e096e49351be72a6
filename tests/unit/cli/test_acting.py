"""Actions on verdicts that are made up: which hosts are excluded, what a command and a webhook get."""

import contextlib
import json
import shlex
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.cli.actions import (
    call_webhook,
    check_webhook,
    exclude_hosts,
    hosts_to_exclude,
    run_command,
    status_of_verdict,
)
from ddpdoctor.collect.proc import read_process
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, FaultOrigin, Finding, RankRow, Report, Severity
from tests.scenarios.running import wait_for
from tests.web import Receiver

FINDING = Finding(
    code="DD611", kind="transport", severity=Severity.ERROR, confidence=Confidence.HIGH,
    summary="an all_reduce\nstalls", ranks=(1,), hosts=("node1",), origin=FaultOrigin.NETWORK,
    fix="look at the network",
)  # fmt: skip


def report(**changes):
    finding = replace(FINDING, **changes)
    rows = tuple(RankRow(rank=n, local_rank=0, host=f"node{n}", pid=None, state="in all_reduce") for n in range(3))
    return Report(
        command=("wrap",), started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z", job=None,
        verdict=finding, findings=(finding,), checks=(), ranks=rows, tool_version="1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "hosts"),
    [
        ({}, ("node1",)),
        ({"origin": FaultOrigin.MACHINE}, ("node1",)),
        ({"hosts": (), "ranks": (2,)}, ("node2",)),
        ({"hosts": ("node0", "node1", "node2")}, ()),
        ({"origin": FaultOrigin.SCRIPT}, ()),
        ({"origin": FaultOrigin.SETTINGS}, ()),
        ({"origin": None}, ()),
    ],
)
def test_only_hosts_with_a_fault_of_theirs_are_excluded(changes, hosts) -> None:
    assert hosts_to_exclude(report(**changes)) == hosts


def test_a_host_is_excluded_once_with_reason_and_time(tmp_path: Path) -> None:
    path = tmp_path / "excluded"
    path.write_text("node7\n")
    assert exclude_hosts(path, report(), Path("report.json")) == f"node1 excluded in {path}"
    assert exclude_hosts(path, report(), Path("report.json")) == ""
    assert path.read_text().splitlines() == [
        "node7", "# 2026-01-02T03:04:06Z DD611 transport: an all_reduce stalls (report.json)", "node1",
    ]  # fmt: skip


@pytest.mark.parametrize("host", ["node1\nnode2", "node1,node2", "node1 node2", "#", "", "n" * 256, "node\x1b[31m"])
def test_a_name_that_would_exclude_other_hosts_is_not_written(tmp_path: Path, host: str) -> None:
    """It comes from another node."""
    path = tmp_path / "excluded"
    assert exclude_hosts(path, report(hosts=(host,)), Path("report.json")) == ""
    assert exclude_hosts(path, report(hosts=(host, "node3")), Path("a\nnode4")) == f"node3 excluded in {path}"
    assert path.read_text().splitlines()[1:] == ["node3"]


@pytest.mark.parametrize(
    ("origin", "severity", "status", "wanted"),
    [
        (FaultOrigin.NETWORK, Severity.ERROR, 124, 75),
        (FaultOrigin.SCRIPT, Severity.ERROR, 1, 70),
        (FaultOrigin.SETTINGS, Severity.ERROR, 1, 70),
        (None, Severity.ERROR, 124, 124),
        (FaultOrigin.SCRIPT, Severity.WARNING, 1, 1),
        (FaultOrigin.SCRIPT, Severity.ERROR, 0, 0),
    ],
)
def test_the_status_says_whether_to_start_again(origin, severity, status, wanted) -> None:
    assert status_of_verdict(report(origin=origin, severity=severity), status) == wanted


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


def is_over(child: int) -> bool:
    found = read_process(child)
    return found is None or found.state in "ZX"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """Run a command in each way until its limit, all at once; return what was said, and the file with its child."""
    children = {way: tmp_path_factory.mktemp("way") / "child" for way in WAYS}

    def run(way: str) -> str:
        script = WAYS[way].format(child=children[way])
        return run_command(script, report(), FINDING, Path("report.json"), limit_s=2.0)

    with ThreadPoolExecutor(len(WAYS)) as pool:
        return {way: (said, children[way]) for way, said in zip(WAYS, pool.map(run, WAYS), strict=True)}


@pytest.mark.parametrize("way", WAYS)
def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(
    way: str, killed: dict[str, tuple[str, Path]]
) -> None:
    said, file = killed[way]
    assert said == "--on-finding: the command was killed after 2 s"
    child = int(file.read_text())
    assert wait_for(lambda: is_over(child))


def test_what_a_command_leaves_behind_is_not_waited_for_and_ends_at_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "child"
    script = f"{FORK_TWICE} {file}; while ! test -s {file}; do sleep 0.05; done"
    assert run_command(script, report(), FINDING, Path("report.json"), limit_s=10.0) == ""
    child = int(file.read_text())
    assert not is_over(child)
    assert wait_for(lambda: is_over(child))


def test_a_command_may_end_without_reading_the_report(tmp_path: Path) -> None:
    """It is larger than a pipe takes. The healthy twin reads all of it."""
    large = replace(report(), command=("wrap", "x" * 200_000))
    assert run_command("exit 0", large, FINDING, Path("report.json")) == ""
    assert run_command(f"cat > {tmp_path}/told", large, FINDING, Path("report.json")) == ""
    assert json.loads((tmp_path / "told").read_text())["command"][1] == "x" * 200_000


@pytest.mark.parametrize("summary", ["a\0b", "a\ud800b", "a" * 200_000, "$(touch x); `touch x`"])
def test_whatever_a_verdict_says_the_command_runs(tmp_path: Path, summary: str, monkeypatch) -> None:
    """Texts of exceptions may hold anything, and none of it is run."""
    monkeypatch.chdir(tmp_path)
    finding = replace(FINDING, summary=summary, ranks=tuple(range(50_000)))
    said = run_command('printf %s "$DDPDOCTOR_SUMMARY" > told', report(), finding, Path("report.json"))
    assert said == ""
    assert [path.name for path in tmp_path.iterdir()] == ["told"]
    assert (tmp_path / "told").read_text()[:1] == summary[:1]


@pytest.mark.parametrize(("command", "status"), [("exit 7", "7"), ("kill -9 $$", "-9")])
def test_a_command_that_fails_is_reported(command: str, status: str) -> None:
    said = run_command(command, report(), FINDING, Path("report.json"))
    assert said == f"--on-finding: the command ended with status {status}"


@pytest.mark.parametrize("form", ["json", "slack", "teams"])
def test_each_form_says_the_verdict(form) -> None:
    with Receiver() as receiver:
        assert call_webhook(receiver.url, form, report(), Path("report.json")) == ""
    (sent,) = receiver.received
    assert sent.keys() == {
        "json": {"text", "report", "started_at", "ended_at", "job", "verdict"}, "slack": {"text"},
        "teams": {"type", "attachments"},
    }[form]  # fmt: skip
    assert "stalls" in str(sent)
    assert "look at the network" in str(sent)


@pytest.mark.parametrize(("answer", "tries"), [(500, 3), (429, 3), (404, 1)])
def test_a_server_that_may_recover_is_asked_again(answer, tries) -> None:
    with Receiver(answers=(answer,)) as receiver:
        said = call_webhook(receiver.url, "json", report(), Path("report.json"), pause=lambda _: None)
    assert len(receiver.received) == tries
    assert f"it answered {answer}" in said
    assert "/hook" not in said


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_no_success(status: int) -> None:
    """Its target might be the metadata service of a cloud, or a file."""
    with Receiver() as inner, Receiver(answers=(status,), location=inner.url) as receiver:
        said = call_webhook(receiver.url, "json", report(), Path("report.json"), pause=lambda _: None)
    assert (len(receiver.received), inner.received, inner.gotten) == (1, [], 0)
    assert f"it answered {status}" in said
    assert "a redirect, which is not followed" in said
    assert "/hook" not in said


SECRET = "T0S3CR3T"


@pytest.mark.parametrize(
    "url",
    [
        f"https://hooks.example.org/services/{SECRET} x",
        f"https://hooks.example.org/{SECRET}\n",
        f"https://hooks.example.org/{SECRET}\t",
        f"https://hooks.example.org/{SECRET}é",
        f" https://hooks.example.org/{SECRET}",
        f"https://[hooks.example.org/{SECRET}",
        f"https://hooks.example.org:{SECRET}/x",
        f"https://hooks.example.org:99999/{SECRET}",
        f"https://user:{SECRET}@hooks.example.org/",
        f"https:/{SECRET}",
        f"https:///{SECRET}",
        f"hooks.example.org/{SECRET}",
        f"ftp://hooks.example.org/{SECRET}",
        f"file:///tmp/{SECRET}",
        f"data:text/plain,{SECRET}",
        f"gopher://169.254.169.254/{SECRET}",
        "",
    ],
)
def test_what_is_no_url_is_refused_and_never_shown(url: str) -> None:
    with pytest.raises(UserError) as refused:
        check_webhook(url)
    assert SECRET not in f"{refused.value.message} {refused.value.help}"


@pytest.mark.parametrize(
    "url", ["https://hooks.example.org/T/B?x=%20y&z=[1]", "http://[::1]:8080/hook", "HTTPS://10.0.0.1/hook"]
)
def test_a_url_of_a_web_server_is_taken(url: str) -> None:
    check_webhook(url)


ANSWERS = {
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n", "nothing": b"", "a line without end": b"x" * 200_000,
    "a status that repeats the path": f"HTTP/1.1 404 /hook/{SECRET}\r\nContent-Length: 0\r\n\r\n".encode(),
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000,
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_whatever_answers_the_url_is_not_shown(case: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
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
