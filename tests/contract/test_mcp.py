"""The server for coding agents, asked by a client of the SDK over the pipes of a process of its own."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ddpdoctor.cli.mcp import answer
from ddpdoctor.cli.report import read_run
from ddpdoctor.report.formats import parse_report
from tests.golden import words
from tests.scenarios.running import free_port, wait_for

ROOT = Path(__file__).parents[2]
LOG = ROOT / "tests" / "data" / "nccl-logs" / "sockets.txt"
CALLS = {
    "report": ("report", {"run_dir": "hung"}),
    "analyze": ("analyze", {"paths": [str(LOG)]}),
    "explain": ("explain", {"name": "stuck"}),
    "check_env": ("check_env", {"checks": ["shm"], "with_data": True}),
    "status": ("status", {"run_dir": "hung"}),
    "no such run": ("report", {"run_dir": "gone"}),
    "a number": ("report", {"run_dir": 3}),
}
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


def ask_all(folder):
    """Return the tools by name and the results of all calls, from one session."""
    import anyio
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **UNDER_TORCHRUN, "MASTER_PORT": str(free_port())}
    server = StdioServerParameters(command=sys.executable, args=["-m", "ddpdoctor", "mcp"], cwd=folder, env=env)

    async def ask():
        async with Client(stdio_client(server)) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            return tools, {name: await client.call_tool(*call) for name, call in CALLS.items()}

    return anyio.run(ask)


def test_only_what_reads_is_served_and_answers_in_words_and_json(folder):
    tools, results = ask_all(folder)
    assert tools.keys() == {"report", "analyze", "explain", "check_env", "status"}
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools.values())
    texts = {name: [content.text for content in result.content] for name, result in results.items()}
    assert [name for name, result in results.items() if result.is_error] == ["no such run", "a number"]
    bodies = {name: json.loads(both[1]) for name, both in texts.items() if not results[name].is_error}
    assert bodies == {name: results[name].structured_content for name in bodies}

    saved, read = read_run(folder / "hung"), parse_report(texts["report"][1])
    assert texts["report"][0].splitlines()[0] == f"ddpdoctor: {saved.verdict.summary}"
    assert f"ddpdoctor explain {saved.verdict.code}" in texts["report"][0]
    assert (read.verdict, read.findings, read.ranks) == (saved.verdict, saved.findings, saved.ranks)
    assert read.data == {}
    assert texts["analyze"][0].startswith("ddpdoctor: ")
    assert parse_report(texts["analyze"][1]).command == ("ddpdoctor", "analyze", str(LOG))
    assert texts["explain"][0].startswith("DD601 stuck")
    assert (bodies["explain"]["code"], bodies["status"]["state"], bool(texts["status"][0])) == ("DD601", "ended", True)
    machine = parse_report(texts["check_env"][1])
    assert [check.id for check in machine.checks] == ["shm"]
    assert [machine.data[name] for name in ("launcher", "world_size", "missing_ranks")] == ["none", 1, []]
    assert "gone does not exist\nRun folders of" in texts["no such run"][0]
    assert "Input should be a valid string" in texts["a number"][0]


def test_a_run_folder_given_to_analyze_is_reported_what_was_measured_comes_on_request_and_errors_are_explained(folder):
    run = str(folder / "hung")
    told = answer("report", {"run_dir": run, "with_data": True})
    assert answer("analyze", {"paths": [run], "with_data": True}) == told
    assert parse_report(json.dumps(told["body"])) == read_run(folder / "hung")
    refused = answer("report", {"run_dir": "/proc/kmsg", "with_data": False})
    assert "/proc/kmsg: the report cannot be read" in refused["error"]
    error = answer("explain", {"name": "RuntimeError: CUDA out of memory"})["body"]
    assert error.keys() == {"error", "means", "at_fault", "to_do", "source"}


def refusal(request, row):
    """Return what a tool says of bad input, as the server has it from the process that it asks."""
    tool, arguments = row
    request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("folder"))
    return answer(tool, {"with_data": False, **arguments} if tool != "explain" else arguments)["error"]


test_words = words(__name__, refusal=refusal)


def test_a_call_that_takes_too_long_is_stopped_and_says_what_to_do():
    from mcp.server.mcpserver.exceptions import ToolError

    from ddpdoctor.cli.mcp_server import _run_tool

    said = r"explain had no answer within 0.0 s and was stopped\nGive fewer or smaller files"
    with pytest.raises(ToolError, match=said):
        _run_tool(0.0, "explain", name="DD601")


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
