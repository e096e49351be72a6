"""What the members of a job say to each other and keep of it."""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ddpdoctor.collect.run_files import load
from ddpdoctor.collect.system import System
from ddpdoctor.exchange.conversation import BadMessage
from ddpdoctor.exchange.store import MAX_NOTICE_BYTES, MAX_SAID_BYTES, Heard
from ddpdoctor.launch import node_messages, starting
from ddpdoctor.launch.command_line import SplitCommand
from ddpdoctor.launch.first_node import BROKEN_NS, FRESH_NS, SILENT_NS, MembersHeard
from ddpdoctor.launch.hang import note_reached, places_to_try, try_places
from ddpdoctor.launch.node_messages import (
    LAST,
    MAX_PLAIN_BYTES,
    Board,
    Greeting,
    NodeProgress,
    Pulse,
    pack_folder,
    read_board,
    read_pulse,
    unpack_folder,
    write_board,
    write_pulse,
)
from ddpdoctor.launch.placement import Placement, Style, WrapOptions
from ddpdoctor.launch.run_folder import Starter, make_member_folder
from ddpdoctor.launch.starting import nccl_log_environment, start_launcher
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import REACHED_NAME as FILE
from ddpdoctor.model.facts import NodeSeen, NodesSeen, Presence
from ddpdoctor.model.findings import Confidence, Finding, Judgment, Severity
from ddpdoctor.model.launch import Connecting, Contact
from tests.golden import words
from tests.synthetic import Job, write_hosts

# Who is here, silent, gone or was never heard, and who is waited for.


S = 1_000_000_000
PLACE = Placement(number=0, expected=2, hosts=("dd0",), names=("dd0", "dd1"))
PULSE = Pulse(progress=NodeProgress(alive=2, ended_s=3.0), ranks=(2, 3))
LATE_NS, LOST_NS = FRESH_NS + S, BROKEN_NS + S
MOVED = replace(PULSE, moved=True)


def heard(ago_ns=0, pulse=PULSE, **more):
    return Heard(heard_ns=time.monotonic_ns() - ago_ns, said=write_pulse(pulse), **more)


def members(*others):
    made = MembersHeard(PLACE, "dd0")
    made.hear({str(number): one for number, one in enumerate(others, start=1)})
    return made


def presence_of(beat):
    """Return what a member is of which this was heard, and whether it is waited for: at first, and after its time."""
    made = members(eval(beat))
    waits = ", ".join(str(not made.have_answered(1, late=late)) for late in (False, True))
    return f"{made.seen().nodes[1].presence.value}, waited for: {waits}"


def test_a_greeting_gives_name_and_clocks_and_reports_a_number_that_two_have():
    made = members(heard())
    assert made.unknown() == [1]
    made.greet(1, Greeting(host="h", pid=1, started_as=0, wall_offset_s=0.5, clock_offset_ns=7, clock_error_ns=2))
    node = made.seen().nodes[1]
    assert (node.host, node.clock_offset_ns, node.clock_error_ns, node.ranks) == ("h", 7, 2, (2, 3))
    assert "number 0" in node.why
    assert made.unknown() == []


def test_an_answer_is_fetched_once_and_all_have_ended_once_the_last_is_here():
    for number in (2, LAST):
        made = members(heard(pulse=replace(PULSE, answered=number)))
        assert made.unread() == [(1, number)]
        assert not made.have_ended()
        made.receive(1, number, b"packed")
        assert made.unread() == []
        assert made.have_answered(2, late=False)
        assert made.have_ended() is (number == LAST)
        assert made.take_packed() == {1: b"packed"}
        assert made.take_packed() == {}


def test_for_ranks_of_a_launcher_that_failed_nobody_waits_in_vain_and_who_is_silent_says_nothing_of_its_ranks():
    for status, ended_s in ((None, 3.0), (0, 3.0), (1, None), (-9, None)):
        (progress,) = members(heard(pulse=replace(PULSE, status=status))).progress()
        assert progress.ended_s == ended_s
    assert members(heard(SILENT_NS + S)).progress() == []


def test_names_that_are_no_numbers_are_not_heard_and_one_that_no_host_has_is_not_kept():
    """Who never came is absent under the name that was given."""
    node = members().seen().nodes[1]
    assert (node.presence, node.host, node.heard_ns) == (Presence.ABSENT, "dd1", None)
    made = members(heard())
    made.hear({"x": heard(), "-1": heard(), "9999999": heard(), "²": heard()})
    made.greet(1, Greeting(host="h" * 256, pid=1, started_as=1, wall_offset_s=0, clock_offset_ns=0, clock_error_ns=0))
    assert [node.host for node in made.seen().nodes] == ["dd0", "dd1"]


def test_what_members_send_that_does_not_fit_with_the_others_counts_as_lost(monkeypatch):
    monkeypatch.setattr("ddpdoctor.launch.first_node.MAX_PACKED_BYTES", 10)
    made = members(heard(), heard(), heard())
    for number, size in ((1, 6), (2, 6), (3, 4)):
        made.receive(number, 1, bytes(size))
    assert made.have_answered(1, late=False)
    assert made.take_packed() == {1: bytes(6), 3: bytes(4)}


# What members tell each other with their beats fits in, and comes back as it was; what is no message is none.


LARGE = Pulse(
    progress=NodeProgress(
        alive=99_999, starting=True, never=True, begun=True, waits_s=1234567.8, stuck_s=1234567.8, still=99_999,
        stood=99_999, idle=True, ended_s=1234567.8, lives_on=True,
    ),
    answered=LAST, moved=True, heard=LAST, status=-9, ranks=(199_000, 199_999),
)  # fmt: skip


BOARDS = [Board(), Board(request=LAST, verdict=LAST, roster=LAST, ends=True, left=True)]


def test_a_pulse_and_a_board_come_back():
    for said, write, read, most in (
        *((pulse, write_pulse, read_pulse, MAX_SAID_BYTES) for pulse in (Pulse(progress=NodeProgress()), LARGE)),
        *((board, write_board, read_board, MAX_NOTICE_BYTES) for board in BOARDS),
    ):
        assert read(write(said)) == said
        assert len(write(said)) <= most


@pytest.mark.parametrize("place", range(14))
def test_a_number_that_is_none_makes_no_pulse(place):
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 30):
        values = ["2", "0", "0", "1", "null", "0.0", "null", "0", "0", "0", "null", "0", "0", "0"]
        values[place] = number
        assert read_pulse(f"[[{','.join(values[:12])}],{','.join(values[12:])},0,null,null]".encode()) is None


def ranks_of(text):
    """Return a pulse with such first and last ranks: 60 bytes can ask for any number of them."""
    pulse = read_pulse(b"[[2,0,0,1,null,0.0,null,0,0,0,null,0],0,0,0,null,%s]" % text.encode())
    return f"{pulse.progress.alive} alive, ranks {pulse.all_ranks}"


# Each member of a job has a run folder of its own, also on a file system that all see, and at each start.


NOW = datetime(2026, 3, 4, 5, 6, 7)  # noqa: DTZ001  a name, not a moment
JOB = {"SLURM_JOB_ID": "12"}
AGAIN = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
THIRD = AGAIN | {"SLURM_RESTART_COUNT": "2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def folders_of(row: str) -> object:
    """Return the folder and the report of each member that comes, also where one before it has left its run."""
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)

        def come(
            number: int | None = 0, asked: str | None = "run", leaves: object = None, *, host: str = "h",
            env: dict[str, str] | None = None, most: int = 3, **more: object,
        ) -> str:  # fmt: skip
            command = ("ddpdoctor", "wrap", "train.py")
            starter = Starter(script="train.py", is_module=False, command=command, host=host, env=env or {}, now=NOW)
            placement = Placement(number=number, expected=most, most=most, **more)
            try:
                folder, report = make_member_folder(asked and Path(place, asked), placement, starter)
            except UserError as error:
                return error.message.replace(place, "")
            if leaves is not None:  # what wrap writes first
                run = {"environment": leaves, "host": "h", "command": command}
                (folder / "run.json").write_text(json.dumps(run))
            return f"{folder.stat().st_mode & 0o777:o} {folder} {report}".replace(f"{place}/", "")

        def damage() -> str:
            Path("run").mkdir()
            return str(Path("run", "run.json").write_text("["))

        return eval(row, globals() | {"come": come, "damage": damage})


# A run folder goes to the first node with all that is judged of it, and nothing that is no part of one gets in.


PIECE = 64 * 1024


def packed(index, rest=b""):
    """Return what somebody else packed."""
    text = json.dumps(index).encode() if not isinstance(index, bytes) else index
    return zlib.compress(len(text).to_bytes(4, "big") + text + rest)


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_folder_arrives_as_it_was_and_replaces_what_came_before(tmp_path):
    _, second = write_hosts(tmp_path / "hosts", Job(world=4, steps=30, situation="stuck"), 2)
    (tmp_path / "gathered").mkdir()
    for name in ("run.json", "former.json"):
        (tmp_path / "gathered" / name).write_text("former")
    unpack_folder(pack_folder(second), tmp_path / "gathered")
    assert files_of(tmp_path / "gathered") == files_of(second)


HOLES = (
    b"", b"x", bytes(3 * PIECE), bytes(3 * PIECE + 7), bytes(PIECE) + b"x" + bytes(2 * PIECE),
    b"x" * PIECE + bytes(PIECE - 1) + b"y", bytes(2 * PIECE) + b"end",
)  # fmt: skip


def test_holes_arrive_as_zeros(tmp_path):
    contents = {f"rings/{number}-2.ring": content for number, content in enumerate(HOLES, start=1)}
    (tmp_path / "own" / "rings").mkdir(parents=True)
    for name, content in contents.items():
        (tmp_path / "own" / name).write_bytes(content)
    unpack_folder(pack_folder(tmp_path / "own"), tmp_path / "gathered")
    assert files_of(tmp_path / "gathered") == contents


def test_zeros_take_no_room_on_either_side(tmp_path):
    (tmp_path / "own" / "rings").mkdir(parents=True)
    with (tmp_path / "own" / "rings" / "1-2.ring").open("wb") as ring:
        ring.truncate(32 * 2**20)
    one = pack_folder(tmp_path / "own")
    unpack_folder(one, tmp_path / "gathered")
    assert len(one) < 200
    assert (tmp_path / "gathered" / "rings" / "1-2.ring").stat().st_blocks == 0


WELL = packed([["run.json", 2, [0]]], b"{}")


def unpacked(row):
    """Unpack what another program packed: the index and all contents, any bytes, or packed ones (an expression)."""
    if isinstance(row, str):
        data = eval(row, vars(node_messages) | globals())
    else:
        data = zlib.compress(row) if isinstance(row, bytes) else packed(*row)
    with TemporaryDirectory() as folder:
        try:
            unpack_folder(data, Path(folder) / "gathered")
        except BadMessage:
            assert list(Path(folder).iterdir()) == []
            raise
        return files_of(Path(folder))


@pytest.mark.full
def test_what_unpacks_to_more_than_the_limit_is_refused(tmp_path):
    packer = zlib.compressobj()
    first, again = (packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = first + again * (MAX_PLAIN_BYTES // 2**24)
    with pytest.raises(BadMessage, match="unpacks to more"):
        unpack_folder(bomb, tmp_path / "gathered")


def test_what_is_no_part_of_a_run_folder_is_not_sent(tmp_path):
    own = tmp_path / "own"
    (own / "rings").mkdir(parents=True)
    (own / "run.json").write_text("{}")
    (own / "secret.txt").write_text("secret")
    (own / "report.json").write_text("{}")
    (own / "watch.json").symlink_to("/etc/passwd")
    os.mkfifo(own / "rings" / "1-2.ring")
    unpack_folder(pack_folder(own), tmp_path / "gathered")
    assert files_of(tmp_path / "gathered") == {"run.json": b"{}"}


# Where a node knocks when others are missing, and what it keeps of that.


HERE, SILENT, ABSENT = Presence.HERE, Presence.SILENT, Presence.ABSENT
PLACEMENT = Placement(number=0, expected=3, port=29501, store=("node0", 29500))


def seen_reached(*presences, own=0, alone=False):
    nodes = tuple(NodeSeen(number=n, host=f"node{n}", presence=presence) for n, presence in enumerate(presences))
    return NodesSeen(expected=len(nodes), own=own, nodes=nodes, alone_since_ns=1 if alone else None)


def test_hosts_without_a_name_and_the_own_one_are_left_out():
    seen = (("node0", HERE), ("node0", SILENT), ("", ABSENT))
    nodes = tuple(NodeSeen(number=n, host=host, presence=presence) for n, (host, presence) in enumerate(seen))
    assert places_to_try(NodesSeen(expected=3, own=0, nodes=nodes), Placement(port=29501)) == ()


def test_what_was_tried_can_be_read_again(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        up, down = server.getsockname()[1], other.getsockname()[1]
        other.close()
        assert try_places(tmp_path, (("127.0.0.1", up), ("127.0.0.1", down), ("no-such-name.invalid", 1)))
        assert [attempt.contact for attempt in load(tuple[Connecting, ...], tmp_path / FILE)] == [
            Contact.CONNECTED, Contact.REFUSED, Contact.UNRESOLVED,
        ]  # fmt: skip
        assert not try_places(tmp_path, (("127.0.0.1", up),)), "a moment ago"


@pytest.mark.parametrize("text", ["", "{", '[{"host": 1}]', '{"host": "node0"}', "[" * 100_000])
def test_a_damaged_file_holds_nothing(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert load(tuple[Connecting, ...], tmp_path / FILE) in {None, ()}


@pytest.mark.parametrize(("code", "is_tried"), [("DD607", True), ("DD605", True), ("DD601", False)])
def test_nobody_knocks_unless_a_node_may_be_missing(tmp_path, code, is_tried):
    found = Finding(code=code, kind="any", severity=Severity.ERROR, confidence=Confidence.HIGH, summary="")
    judgment = Judgment(findings=(found,), checks=(), certain=False)
    placement = Placement(port=1, store=("127.0.0.1", 1))
    assert note_reached(tmp_path, judgment, seen_reached(HERE, HERE), placement) is is_tried
    assert bool(load(tuple[Connecting, ...], tmp_path / FILE)) is is_tried


# Where NCCL's warnings go: to the run folder, unless the user has said anything about them.


def machine(root, env, *devices, conf=""):
    (root / "dev").mkdir(parents=True)
    for name in devices:
        (root / "dev" / name).touch()
    if conf:
        (root / "etc").mkdir()
        (root / "etc" / "nccl.conf").write_text(conf)
    return System(root=root, env=env)


@pytest.mark.parametrize("device", ["nvidiactl", "kfd"])
def test_it_writes_warnings_to_the_run_folder(device, tmp_path):
    run = tmp_path / "run%1"
    run.mkdir()
    found = nccl_log_environment({}, run, machine(tmp_path / "root", {}, device))
    assert found == {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{tmp_path}/run%%1/nccl/%h.%p.log"}
    assert (run / "nccl").is_dir()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_warnings_are_asked_for_only_where_a_gpu_is(tmp_path, monkeypatch, has_gpu):
    drivers = (tmp_path / "nvidiactl", tmp_path / "kfd")
    monkeypatch.setattr(starting, "GPU_DRIVERS", drivers)
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    if has_gpu:
        drivers[1].touch()
    options = WrapOptions(
        split=SplitCommand(script="sh", script_args=("-c", f"echo $NCCL_DEBUG > {tmp_path}/said"), is_command=True),
        hang_timeout_s=1.0, on_hang="auto", report_dir=tmp_path, report_file=tmp_path / "report.json",
        placement=Placement(style=Style.COMMAND), command=(),
    )  # fmt: skip
    assert start_launcher(options, tmp_path, {}, lambda: None).wait() == 0
    assert (tmp_path / "said").read_text().strip() == ("WARN" if has_gpu else "")


def chosen_by_user(row):
    with TemporaryDirectory() as folder:
        env, devices, conf = row
        return nccl_log_environment(env, Path(folder), machine(Path(folder, "root"), env, *devices, conf=conf))


test_words = words(
    __name__,
    folders=folders_of,
    presence=presence_of, has_moved=lambda more: members(eval(f"heard(pulse=MOVED, {more})")).have_moved(),
    places_to_try=lambda nodes: places_to_try(eval(f"seen_reached({nodes})"), PLACEMENT),
    nccl_log_of_a_user=chosen_by_user,
    last_word=lambda word: members(heard(left=word)).seen().nodes[1].status,
    read_pulse=read_pulse, read_board=read_board, ranks_of=ranks_of, unpacked=unpacked,
)  # fmt: skip
