"""A ring and other files of a run folder, in whatever state they are."""

import json
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ddpdoctor.recorder.settings import RecorderSettings, read_settings
from ddpdoctor.recorder.storage import files, ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring
from ddpdoctor.recorder.storage.secrets import hide_in_text, hide_secrets
from tests.golden import words
from tests.scenarios.harmless.alone import RECORDER, make_folder

# A ring written by one side is read back by the other, whatever state it is in.


def make(tmp_path, shape=ring_layout.CHILD_SHAPE):
    return Ring(str(tmp_path), ring_layout.ROLE_RANK, shape, pid=42, start_ticks=7)


def read(ring):
    return ring_reading.read_ring_file(ring.path)


def record(ring, seq=1, dims=(4, 8), line=3):
    key = ("f.py", line)
    site = ring.known_site(key) or ring.intern_site(key, {"f": "f.py", "l": line, "n": "main", "u": 1})
    names = (ring.intern("all_reduce"), 0, ring.intern("0"), site, 0, ring.intern("torch.float32"))
    return ring.begin(ring_layout.pack_kind(*names, peer=-1, tensors=1, flags=4, dims=dims), seq)


def test_a_call_is_there_before_it_ends_and_complete_after(tmp_path):
    ring = make(tmp_path)
    index = record(ring)
    (slot,) = read(ring).slots
    assert (slot.op, slot.group, slot.seq, slot.dtype, slot.shape) == ("all_reduce", "0", 1, "torch.float32", (4, 8))
    assert slot.site is not None
    assert slot.site["l"] == 3
    assert slot.ended_ns == 0
    ring.end(index, ring_layout.FLAG_FAILED)
    record(ring, dims=(1, 2, 3, 4, 5, 6, 7))
    slot, of_many_dimensions = read(ring).slots
    assert slot.ended_ns >= slot.started_ns > 0
    assert slot.flags & ring_layout.FLAG_FAILED
    assert of_many_dimensions.shape is None


def test_ending_a_call_that_was_overwritten_changes_nothing(tmp_path):
    ring = make(tmp_path)
    first = record(ring)
    for seq in range(2, 40):
        record(ring, seq=seq)
    before = list(read(ring).slots)
    ring.end(first)
    assert list(read(ring).slots) == before


def test_a_full_journal_drops_and_counts_and_calls_go_on_and_what_a_verdict_rests_on_has_room(tmp_path):
    ring = make(tmp_path, ring_layout.RANK_SHAPE)
    while ring.note({"k": "filler", "text": "x" * 500}):
        pass
    assert ring.intern("n" * 600) == 0
    ring.end(record(ring))
    assert ring.note({"k": "raised", "text": "x" * 12_000}, vital=True)
    content = read(ring)
    assert content.cells["dropped"] >= 2
    assert (len(content.slots), content.notes[-1]["k"]) == (1, "raised")


NO_ROOM = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from ddpdoctor.recorder.storage import ring_layout, ring_writing
try: ring_writing.Ring(sys.argv[1], 1, ring_layout.CHILD_SHAPE, 1, 1)
except OSError as e: print('refused')
"""


def test_all_blocks_are_allocated_at_the_start_and_no_room_is_an_error_then_and_leaves_no_file(tmp_path):
    ring = make(tmp_path, ring_layout.RANK_SHAPE)
    assert Path(ring.path).stat().st_blocks * 512 >= ring_layout.RANK_SHAPE.total_bytes
    (tmp_path / "full").mkdir()
    command = [sys.executable, "-B", "-c", NO_ROOM, str(tmp_path / "full"), str(RECORDER.parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, [*(tmp_path / "full").iterdir()]) == ("refused\n", []), done.stderr


def test_many_threads_lose_no_call(tmp_path):
    ring = make(tmp_path, ring_layout.RANK_SHAPE)

    def work(_):
        for _ in range(200):
            ring.end(record(ring))

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(4))] == [None] * 4
    content = read(ring)
    assert [slot.number for slot in content.slots] == list(range(1, 801))
    assert all(slot.ended_ns for slot in content.slots)


def test_a_note_that_another_thread_makes_while_one_is_written_is_kept(tmp_path):
    ring = make(tmp_path)

    def meanwhile(frame, event, _):
        if (event, frame.f_code) == ("call", Ring.set.__code__):
            sys.setprofile(None)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(ring.note, {"k": "second"}).result()

    sys.setprofile(meanwhile)
    try:
        assert ring.note({"k": "first"})
    finally:
        sys.setprofile(None)
    content = read(ring)
    assert [note["k"] for note in content.notes] == ["first", "second"]
    assert content.cells["dropped"] == 0


def test_the_last_place(tmp_path):
    ring = make(tmp_path)
    assert read(ring).place is None
    ring.place("/home/u/train.py", 12, "load")
    ring.place("/home/u/träin.py", 13, "main")
    assert read(ring).place == ("/home/u/träin.py", 13, "main")


# Rings in any state: turned over, torn, of another version, cut short while they are read.


SHAPE = ring_layout.CHILD_SHAPE


def filled(folder, calls):
    ring = make(folder)
    for seq in range(1, calls + 1):
        ring.end(record(ring, seq, (seq,), seq % 3))
    return Path(ring.path)


def change(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("calls", [0, 1, 31, 32, 33, 64, 100, 5000])
def test_all_calls_that_are_still_there_are_read_in_order_and_the_file_keeps_its_size(tmp_path, calls):
    path = filled(tmp_path, calls)
    content = ring_reading.read_ring_file(path)
    assert [slot.seq for slot in content.slots] == list(range(max(1, calls - SHAPE.slots + 1), calls + 1))
    assert all(slot.shape == (slot.seq,) and slot.site is not None for slot in content.slots)
    assert all(slot.site["l"] == slot.seq % 3 for slot in content.slots if slot.site)
    assert (content.cells["calls_done"], path.stat().st_size) == (calls, SHAPE.total_bytes)


def test_a_damaged_number_or_a_record_that_was_claimed_and_not_written_costs_itself_only(tmp_path):
    """Threads claim out of order, and a process may be killed between a record and the claim."""
    path = filled(tmp_path, 40)
    place = SHAPE.slots_at + 20 * ring_layout.SLOT_SIZE
    for damage in (bytes(ring_layout.SLOT_SIZE), *map(ring_layout.CELL.pack, (2**64 - 1, 0, 12345))):
        change(path, place, damage)
        assert [slot.seq for slot in ring_reading.read_ring_file(path).slots] == [n for n in range(9, 41) if n != 21]
    path = filled(tmp_path, 10)
    change(path, ring_layout.CELL_OFFSETS["slots_claimed"], ring_layout.CELL.pack(8))
    assert [slot.seq for slot in ring_reading.read_ring_file(path).slots] == list(range(1, 11))


@pytest.mark.parametrize("cell", ["slots_claimed", "journal_used", "steps_recorded"])
@pytest.mark.parametrize("value", [0, 7, 2**63, 2**64 - 1])
def test_a_damaged_cell_raises_nothing(tmp_path, cell, value):
    path = filled(tmp_path, 40)
    change(path, ring_layout.CELL_OFFSETS[cell], ring_layout.CELL.pack(value))
    content = ring_reading.read_ring_file(path)
    assert len(list(content.slots)) <= SHAPE.slots
    assert list(content.steps) == []


def test_cells_of_version_2_are_read_where_they_stood(tmp_path):
    path = filled(tmp_path, 3)
    order = [ring_layout.CELL_NAMES.index(name) for name in ring_layout.CELL_NAMES_OF_VERSION_2]
    cells = struct.unpack_from(f"<{len(order)}Q", path.read_bytes(), ring_layout.CELLS_OFFSET)
    before = ring_reading.read_ring_file(path)
    change(path, ring_layout.CELLS_OFFSET, struct.pack(f"<{len(order)}Q", *(cells[i] for i in order)))
    change(path, len(ring_layout.MAGIC), struct.pack("<I", 2))
    after = ring_reading.read_ring_file(path)
    assert order != sorted(order)
    assert (after.cells, list(after.slots)) == (before.cells, list(before.slots))


def read_of(row):
    """Return how many calls are read of a ring whose bytes were altered: those of a whole one are ``whole``."""
    with TemporaryDirectory() as folder:
        path = filled(Path(folder), 3)
        path.write_bytes(eval(row, globals(), {"whole": path.read_bytes()}))
        return len(list(ring_reading.read_ring_file(path).slots))


def test_a_header_that_promises_gigabytes_is_not_believed(tmp_path):
    path = filled(tmp_path, 3)
    identity = list(ring_layout.IDENTITY.unpack_from(path.read_bytes()))
    identity[4], identity[5] = 2**33, 2**33 + ring_layout.HEADER_SIZE
    change(path, 0, ring_layout.IDENTITY.pack(*identity))
    with path.open("r+b") as file:
        file.truncate(2**34)
    with pytest.raises(ring_reading.DamagedRingError, match="promises"):
        ring_reading.read_ring_file(path)


@pytest.mark.parametrize("damaged", [b'k":"sec\nnd', b'\xff":"second'])
def test_one_damaged_line_of_the_journal_costs_that_line_only(tmp_path, damaged):
    ring = make(tmp_path)
    for word in ("first", "second", "third"):
        ring.note({"k": word})
    Path(ring.path).write_bytes(Path(ring.path).read_bytes().replace(b'k":"second', damaged))
    for no_note in ({"k": 3}, {"pid": 1}, {"k": "child_end", "pid": "x"}, {"k": "raised", "at": []}):
        ring.note(no_note)  # no recorder writes it
    ring.note({"k": "init", "rank": None, "at": 5})
    assert [note["k"] for note in read(ring).notes] == ["first", "third", "init"]


def over_nccl(backends):
    """Say whether the group goes over NCCL, as a ring in use tells."""
    with TemporaryDirectory() as folder:
        ring = make(folder)
        for backend in backends:
            ring.note({"k": "initialized", "backend": backend, "at": 1})
        return ring_reading.uses_nccl(Path(ring.path).read_bytes())


# Files of a run folder are opened as what they are, and written whole and private.


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_what_is_written_is_private_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        files.make_folder(tmp_path / "rings")
        files.write_whole(tmp_path / "run.json", "text")
        os.close(files.open_new(tmp_path / "control"))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"rings": 0o700, "run.json": 0o600, "control": 0o600}


@pytest.mark.parametrize("name", ["run.json", "run.json.part"])
def test_a_link_is_replaced_and_not_written_through_and_another_name_keeps_what_it_holds(tmp_path, name):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / name).symlink_to("outside")
    files.write_whole(tmp_path / "run.json", b"new")
    os.link(tmp_path / "outside", tmp_path / "control")
    os.close(files.open_new(tmp_path / "control"))
    assert (tmp_path / "outside").read_text() == "mine"
    assert not (tmp_path / "run.json").is_symlink()
    assert (tmp_path / "run.json").read_text() == "new"


PLANTS = {
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", PLANTS)
def test_what_is_no_plain_file_is_not_read_and_waited_for_and_not_written_to(tmp_path, kind):
    PLANTS[kind](tmp_path / "evidence")
    with pytest.raises(OSError, match=r"it is a link|it is not a regular file"):
        files.read_plain(tmp_path / "evidence")
    with pytest.raises(OSError, match=r"it is a link|it is not a regular file|No such device|Is a directory"):
        os.close(files.open_plain(tmp_path / "evidence", os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def test_a_file_that_is_too_large_is_not_read_and_a_folder_that_is_a_link_not_used(tmp_path):
    with (tmp_path / "evidence").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="it has more than"):
        files.read_plain(tmp_path / "evidence")
    (tmp_path / "outside").mkdir()
    (tmp_path / "rings").symlink_to("outside")
    with pytest.raises(OSError, match="it is a link, or no folder"):
        files.make_folder(tmp_path / "rings")


def test_json_of_few_bytes_and_many_values_is_refused():
    healthy = json.dumps([{"rank": rank, "state": "training"} for rank in range(1024)]).encode()
    assert files.check_json(healthy) == healthy
    with pytest.raises(ValueError, match="values"):
        files.check_json(b"[" + b"[]," * files.MAX_JSON_VALUES + b"0]")


# What wrap tells the ranks arrives as it was sent, and the rest of the environment cannot break it.


def values(settings):
    return {name: getattr(settings, name) for name in RecorderSettings.__slots__}


def test_settings_arrive_as_they_were_sent_and_what_is_no_value_leaves_the_default():
    sent = RecorderSettings(check_every=7, tune_rounds=2)
    assert sent.variables() == {
        "DDPDOCTOR_CHECK_EVERY": "7", "DDPDOCTOR_SPEED": "0", "DDPDOCTOR_TUNE_ROUNDS": "2", "DDPDOCTOR_TUNE_ONLY": "",
            "DDPDOCTOR_TUNE_SETTING": "", "DDPDOCTOR_LOG_FINDINGS": "0", "DDPDOCTOR_CHECK_AUTO": "0",
    }  # fmt: skip
    assert values(read_settings(sent.variables())) == values(sent)
    for env in ({}, {"DDPDOCTOR_CHECK_EVERY": ""}, {"DDPDOCTOR_CHECK_EVERY": "often"}):
        assert values(read_settings(env)) == values(RecorderSettings())


# Which processes are recorded as ranks from their first line on.


SAY = "import sys\nprint(int(sys._ddpdoctor_recorder.is_rank), flush=True)\n"
START = "import subprocess, sys\nsubprocess.run([sys.executable, sys.argv[1]], check=True)\n"


PROGRAMS = {
    "train.py": SAY, "starter.py": SAY + START, "gives.py": f"import os\nos.environ['RANK'] = '5'\n{START}",
    **dict.fromkeys(("torchrun", "accelerate", "deepspeed"), SAY),
}  # fmt: skip


def ranks_of(row):
    """Return of each process that a command with an environment starts whether it is recorded as a rank."""
    command, _, env = row.partition(" | ")
    with TemporaryDirectory() as folder:
        run = make_folder(Path(folder) / "run")
        for name, text in PROGRAMS.items():
            (run / name).write_text(text)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(RECORDER / "bootstrap"), "DDPDOCTOR_RUN": str(run)}
        environment |= dict(one.split("=") for one in env.replace("=ME", f"={os.getpid()}").split())
        words = [sys.executable, *command.split()]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, cwd=run)
        assert done.stderr == ""
        return done.stdout.split()


# Secrets are hidden by name, place, form and randomness; what only looks a little like one stays.


COMMIT = "1b866ed0c5f2a94d7e3b8f6a1c0d9e8f7a6b5c4d"
"""Has the form of an old key of W&B, too."""


def read_secrets():
    """Return what is stored of each text of tests/data/secrets.txt, by the kind of text."""
    found: dict[str, list[list[str]]] = {}
    for line in (Path(__file__).parents[2] / "data" / "secrets.txt").read_text("utf-8").splitlines():
        text = line.encode().decode("unicode_escape") if "\\" in line else line
        if line.startswith("# "):
            rows = found.setdefault(line[2:], [])
        elif line.startswith("    "):
            rows[-1][1] = text[4:]
        elif line:
            rows.append([text, text])
    return found


SECRETS = read_secrets()


@pytest.mark.parametrize(("typed", "stored"), SECRETS["words of a command line"])
def test_secrets_in_a_command_line_are_hidden(typed, stored):
    assert " ".join(hide_secrets(tuple(typed.split()))) == stored


@pytest.mark.parametrize(("text", "stored"), SECRETS["texts"])
def test_secrets_in_a_text_are_hidden_and_nothing_else(text, stored):
    assert hide_in_text(text) == stored
    assert hide_in_text(stored) == stored


UNITS = (
    "a", "a=", "token=", "token=<", "://a:", "https://aaaa", "eyJ.", "eyJ-", "eyJaaaaaaaa-", "a.", "'", 'token="',
    '\\"', "sk-", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "-----BEGIN A", "x:y@", "sk-a-", "sk-abc-", "SG.",
    "SG.-", "xoxb-", "token ", "wandb ", f"wandb {COMMIT} ", "curl -", "docker login ", "bearer ", "--a", "--token ",
    "hooks.slack.com/services/", "://a/hooks", "://a", " ", "a    ", "a ....", "('token', ", "|", "a | ", "&quot;",
    '"username":"', "%3D", "password=\\\\\\", "hc-ping.com/",
)  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_with_the_length_of_a_line_and_not_with_its_square(unit):
    """Twenty times the text takes about twenty times as long; with the square it would be four hundred times."""
    assert cpu_s(unit, 40_000) < 100 * max(cpu_s(unit, 2_000), 0.0015)


def cpu_s(unit, length):
    text = unit * (length // len(unit))
    began = time.process_time()
    hide_secrets((f"{text}!=x",))
    return time.process_time() - began


test_words = words(__name__, read_ring=read_of, are_ranks=ranks_of, uses_nccl=over_nccl)
