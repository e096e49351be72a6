"""The server for coding agents, asked by a client of the SDK over the pipes of a process of its own."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ddpdoctor.cli.report import read_run
from ddpdoctor.report.formats import parse_report
from tests.scenarios.running import free_port, wait_for

ROOT = Path(__file__).parents[2]
LOG = ROOT / "tests" / "data" / "nccl-logs" / "sockets.txt"
CALLS = {
    "report": ("report", {"run_dir": "hung"}),
    "report with data": ("report", {"run_dir": "hung", "with_data": True}),
    "analyze": ("analyze", {"paths": [str(LOG)]}),
    "analyze a run": ("analyze", {"paths": ["hung"]}),
    "explain a kind": ("explain", {"name": "stuck"}),
    "explain an error": ("explain", {"name": "RuntimeError: CUDA out of memory"}),
    "check_env": ("check_env", {"checks": ["shm"], "with_data": True}),
    "status": ("status", {"run_dir": "hung"}),
}
BAD = {
    "no run": ("report", {}, "there is no run folder in ddpdoctor-report/\nGive the folder of a run"),
    "no such run": (
        "report", {"run_dir": "gone\x1b[31m"}, "there is no gone\\x1b[31m\nRun folders of `ddpdoctor wrap`"
    ),
    "stdin": ("analyze", {"paths": ["-"]}, "stdin belongs to the protocol\nSave the text to a file"),
    "a pipe": (
        "analyze", {"paths": ["pipe"]}, "nothing was recognized in 1 file (pipe: a named pipe, which may never end"
    ),
    "the kernel's log": ("analyze", {"paths": ["/proc/kmsg"]}, "(/proc/kmsg: a file of the kernel"),
    "a device": ("analyze", {"paths": ["/dev/zero"]}, "(/dev/zero: no regular file)"),
    "a report that is a pipe": ("report", {"run_dir": "pipe"}, "pipe is not a run folder of ddpdoctor"),
    "a report of the kernel": ("report", {"run_dir": "/proc/kmsg"}, "/proc/kmsg: the report cannot be read"),
    "nothing known": (
        "analyze", {"paths": ["noise.txt"]}, "nothing was recognized in 1 file\nGive logs of a training job"
    ),
    "no such code": ("explain", {"name": "DD60"}, "there is no rule DD60\nDid you mean"),
    "no such check": ("check_env", {"skip": ["dance"]}, "dance"),
    "a number": ("report", {"run_dir": 3}, "Input should be a valid string"),
}  # fmt: skip
"""What cannot be used, and what is said of it."""
UNDER_TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
"""A server that was started in a rank still looks at its own machine only: there is nobody to wait for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mcp")
    with tarfile.open(ROOT / "tests" / "data" / "runs" / "hung.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    os.mkfifo(folder / "pipe")
    (folder / "noise.txt").write_text("it rains\n")
    return folder


@pytest.fixture(scope="module")
def session(folder):
    """Return the tools by name and the results of all calls, from one session."""
    import anyio
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **UNDER_TORCHRUN, "MASTER_PORT": str(free_port())}
    server = StdioServerParameters(command=sys.executable, args=["-m", "ddpdoctor", "mcp"], cwd=folder, env=env)

    async def ask():
        async with Client(stdio_client(server)) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            return tools, {name: await client.call_tool(*call[:2]) for name, call in (CALLS | BAD).items()}

    return anyio.run(ask)


def texts(session, name):
    result = session[1][name]
    return result.is_error, [content.text for content in result.content]


def test_only_what_reads_is_served(session):
    assert session[0].keys() == {"report", "analyze", "explain", "check_env", "status"}
    assert all(tool.annotations.read_only_hint for tool in session[0].values())
    assert all(tool.description for tool in session[0].values())


def test_a_report_is_its_verdict_and_its_json(session, folder):
    saved = read_run(folder / "hung")
    failed, (text, written) = texts(session, "report")
    assert not failed
    assert text.splitlines()[0] == f"ddpdoctor: {saved.verdict.summary}"
    assert f"ddpdoctor explain {saved.verdict.code}" in text
    assert json.loads(written) == session[1]["report"].structured_content
    read = parse_report(written)
    assert (read.verdict, read.findings, read.ranks) == (saved.verdict, saved.findings, saved.ranks)
    assert read.data == {}


def test_what_was_measured_comes_on_request(session, folder):
    assert parse_report(texts(session, "report with data")[1][1]) == read_run(folder / "hung")


def test_logs_are_analyzed(session):
    failed, (text, written) = texts(session, "analyze")
    assert not failed
    assert text.startswith("ddpdoctor: ")
    assert parse_report(written).command == ("ddpdoctor", "analyze", str(LOG))


def test_a_run_folder_given_to_analyze_is_reported(session):
    assert texts(session, "analyze a run") == texts(session, "report")


def test_codes_and_errors_are_explained(session):
    assert texts(session, "explain a kind")[1][0].startswith("DD601 stuck")
    assert session[1]["explain a kind"].structured_content["code"] == "DD601"
    error = session[1]["explain an error"].structured_content
    assert error.keys() == {"error", "means", "at_fault", "to_do", "source"}


def test_this_machine_alone_is_checked(session):
    report = parse_report(texts(session, "check_env")[1][1])
    assert [check.id for check in report.checks] == ["shm"]
    assert (report.data["launcher"], report.data["world_size"], report.data["missing_ranks"]) == ("none", 1, [])


def test_status_is_text_and_json(session):
    failed, (text, written) = texts(session, "status")
    assert not failed
    assert text
    assert json.loads(written)["state"] == "ended"


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_with_what_to_do(session, name):
    failed, (text,) = texts(session, name)
    assert failed
    assert BAD[name][2] in text
    assert "Traceback" not in text


HOLDS_THE_FIRST = """
import os, sys
if "cli.mcp import" in "".join(sys.orig_argv):
    try:
        os.rename("hold", "held")
    except OSError:
        pass
    else:
        open("release").read()
"""
"""A sitecustomize: the process of the first tool waits until the test opens the pipe "release" for writing."""


@pytest.mark.full
def test_a_tool_that_takes_long_does_not_keep_the_others_waiting(tmp_path):
    """Whatever a project in the working folder calls json.py is not imported."""
    import anyio
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    os.mkfifo(tmp_path / "release")
    (tmp_path / "hold").touch()
    (tmp_path / "json.py").write_text("raise SystemExit('of the project')\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HOLDS_THE_FIRST)
    start = "import sys; sys.path.pop(0); from ddpdoctor.cli.app import main; sys.argv[0] = 'ddpdoctor'; main()"
    server = StdioServerParameters(
        command=sys.executable, args=["-c", start, "mcp"], cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    ended = {}

    async def ask():
        async with Client(stdio_client(server)) as client, anyio.create_task_group() as tasks:

            async def slow():
                ended["slow"] = await client.call_tool("analyze", {"paths": [str(LOG)]})

            tasks.start_soon(slow)
            await anyio.to_thread.run_sync(wait_for, (tmp_path / "held").exists)
            ended["fast"] = await client.call_tool("explain", {"name": "stuck"})
            assert "slow" not in ended
            (tmp_path / "release").write_text("")

    anyio.run(ask)
    assert ended["fast"].structured_content["code"] == "DD601"
    assert ended["slow"].content[0].text.startswith("ddpdoctor: ")


@pytest.mark.full
def test_stdout_has_the_protocol_alone_and_an_older_client_is_served(folder):
    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    messages = [
        {"id": 1, "method": "initialize", "params": about},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "report", "arguments": {"run_dir": "hung"}}},
    ]
    command = [sys.executable, "-m", "ddpdoctor", "mcp"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=env, stdin=-1, stdout=-1, text=True) as server:
        for message in messages:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            server.stdin.flush()
        lines = [json.loads(server.stdout.readline()) for _ in range(2)]
        rest, _ = server.communicate(timeout=100)
    assert [line["id"] for line in lines] == [1, 2]
    assert lines[1]["result"]["structuredContent"]["tool"]["name"] == "ddpdoctor"
    assert (rest, server.returncode) == ("", 0)
