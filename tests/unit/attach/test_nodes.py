"""Programs that ask nodes, and what they send. These are real processes, which do what srun and kubectl exec do."""

import base64
import io
import json
import signal
import subprocess
import sys
import zlib

import pytest

from ddpdoctor.attach.nodes import NO_RANK, SEE_LOG, Way, ask_nodes
from ddpdoctor.attach.stream import MARK, receive_folder, send_look
from ddpdoctor.collect.proc import read_process
from ddpdoctor.model.attached import AskedNodes
from ddpdoctor.model.codec import decode
from ddpdoctor.model.errors import UserError
from tests.scenarios.running import wait_for

WAY = Way(name="srun", noun="node", remedy=lambda _reason: "see NODE")
FILES = {"attach.json": b"{}\n", "look_1/rank_0_pid_7.json": b"\xff" * 5000, "look_2/fr_dump_pid_7_rank_0": b""}


def look(folder):
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def sent():
    out = io.BytesIO()
    assert send_look(look, out) == 0
    return out.getvalue()


def saved(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(**fields):
    return json.dumps({"stream": MARK, "version": 1, **fields}).encode() + b"\n"


def packed(content):
    return base64.b64encode(zlib.compress(content)).decode()


def test_what_one_side_saved_the_other_side_saves(sent, tmp_path):
    arrived = receive_folder(io.BytesIO(sent), tmp_path / "a")
    assert (arrived.files, arrived.whole, arrived.error) == (3, True, "")
    assert saved(tmp_path / "a") == FILES


def test_lines_of_others_between_are_left_out(sent, tmp_path):
    noise = b"module load cuda\n\xff\xfe {\n" + b'{"stream": "' + MARK.encode() + b'", cut\r\n'
    mixed = b"".join(noise + b"0: " + line for line in sent.splitlines(keepends=True))
    assert receive_folder(io.BytesIO(mixed.replace(b"\n", b"\r\n")), tmp_path / "a").whole
    assert saved(tmp_path / "a") == FILES


def test_of_a_stream_that_is_cut_off_the_whole_files_are_kept(sent, tmp_path):
    first, second, *_ = sent.splitlines(keepends=True)
    arrived = receive_folder(io.BytesIO(first + second[:-20]), tmp_path / "a")
    assert (arrived.files, arrived.whole) == (1, False)
    assert len(saved(tmp_path / "a")) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"file": "../escaped", "data": packed(b"x")},
        {"file": "/escaped", "data": packed(b"x")},
        {"file": "look_1/../../escaped", "data": packed(b"x")},
        {"file": "look_3/x", "data": packed(b"x")},
        {"file": "attach.json", "data": "not base64"},
        {"file": "attach.json", "data": base64.b64encode(b"not packed").decode()},
        {"file": "attach.json", "data": 5},
        {"file": ["attach.json"], "data": packed(b"x")},
    ],
)
def test_names_that_lead_elsewhere_and_damaged_files_are_not_saved(fields, tmp_path):
    assert receive_folder(io.BytesIO(record(**fields)), tmp_path / "a").files == 0
    assert not list(tmp_path.iterdir())


def test_why_nothing_was_seen_arrives(tmp_path):
    def refuse(_folder):
        raise UserError("no training job runs on this machine", help="Look elsewhere.")

    out = io.BytesIO()
    assert send_look(refuse, out) == 2
    arrived = receive_folder(io.BytesIO(out.getvalue()), tmp_path / "a")
    assert (arrived.error, arrived.help, arrived.files) == (
        "no training job runs on this machine", "Look elsewhere.", 0
    )  # fmt: skip


def python(code):
    return (sys.executable, "-c", code)


def prints(data):
    return python(f"import sys; sys.stdout.buffer.write({data!r})")


def fails(words, status=1):
    return python(f"import sys; print({words!r}, file=sys.stderr); sys.exit({status})")


WAITS = python("import time; print('here', flush=True); time.sleep(1000)")
MINDS_NO_SIGNAL = python(
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
)  # fmt: skip
LOST = (
    "srun: error: Task launch for StepId=7.{0} failed on node {0}: Communication connection failure\n"
    "srun: error: Application launch failed: Communication connection failure\nsrun: Job step aborted"
)


def test_each_node_has_its_folder_and_those_that_sent_nothing_are_told_with_the_reason(sent, tmp_path):
    commands = {
        "n1": prints(sent), "n2": fails(LOST.format(2)), "n3": fails(LOST.format(3)), "n4": WAITS,
        "n5": MINDS_NO_SIGNAL, "n6": prints(record(error="no training job", help="Look elsewhere.")),
        "n7": prints(sent[: sent.rindex(b"{")]), "n8": python(""),
    }  # fmt: skip
    folder = ask_nodes(WAY, commands, tmp_path, limit_s=1.5)

    asked = decode(AskedNodes, json.loads((folder / "nodes.json").read_text()))
    assert [one.node for one in asked.nodes] == sorted(commands)
    assert {one.node: one.folder for one in asked.nodes if one.folder} == {"n1": "n1", "n7": "n7"}
    assert saved(folder / "n1") == saved(folder / "n7") == FILES
    assert [one.line() for one in asked.unseen()] == [
        "n2 and n3: Task launch failed: Communication connection failure; see n2",
        "n4 and n5: no answer within 2 s; see n4",
        f"n6: {NO_RANK}; {SEE_LOG}",
        "n7 and n8: it ended with status 0; see n7",
    ]


def test_if_no_node_sent_anything_that_is_an_error_and_no_folder_is_left(tmp_path):
    with pytest.raises(UserError, match="none of 2 nodes sent what it saw") as told:
        ask_nodes(WAY, {"n1": fails("no way"), "n2": fails("no way")}, tmp_path)
    assert (told.value.help, told.value.status) == ("n1 and n2: no way; see n1", 2)
    assert not list(tmp_path.iterdir())


ASKS = """
import pathlib, signal, sys
from ddpdoctor.attach.nodes import Way, ask_nodes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
folder = pathlib.Path(sys.argv[1])
pid = str(folder / "pid")
waits = f"import os, pathlib, time; pathlib.Path({pid!r}).write_text(str(os.getpid())); time.sleep(1000)"
ask_nodes(Way(name="srun", noun="node", remedy=str), {"n1": (sys.executable, "-c", waits)}, folder)
"""


def test_a_ctrl_c_ends_what_was_started_and_leaves_no_folder(tmp_path):
    asking = subprocess.Popen([*python(ASKS), str(tmp_path)], stderr=subprocess.PIPE)
    assert wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    asking.send_signal(signal.SIGINT)
    asking.communicate(timeout=100)
    asked = int((tmp_path / "pid").read_text())
    assert wait_for(lambda: (found := read_process(asked)) is None or found.state in "ZX")
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]
