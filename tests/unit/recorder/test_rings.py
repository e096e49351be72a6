"""A ring and other files of a run folder, in whatever state they are."""

import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ddpdoctor.recorder
from ddpdoctor.recorder.settings import RecorderSettings, read_settings
from ddpdoctor.recorder.storage import files, ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring
from ddpdoctor.recorder.storage.secrets import hide_in_text, hide_secrets

# A ring written by one side is read back by the other, whatever state it is in.


def make(tmp_path: Path, shape: ring_layout.RingShape = ring_layout.CHILD_SHAPE) -> Ring:
    return Ring(str(tmp_path), ring_layout.ROLE_RANK, shape, pid=42, start_ticks=7)


def read(ring: Ring) -> ring_reading.RingContent:
    return ring_reading.read_ring_file(ring.path)


def record(ring: Ring, op: str = "all_reduce", seq: int = 1, dims: tuple[int, ...] = (4, 8)) -> int:
    site = ring.intern_site(("f.py", 3), {"f": "f.py", "l": 3, "n": "main", "u": 1})
    names = (ring.intern(op), 0, ring.intern("0"), site, 0, ring.intern("torch.float32"))
    return ring.begin(ring_layout.pack_kind(*names, peer=-1, tensors=1, flags=4, dims=dims), seq)


def test_a_call_is_there_before_it_ends_and_complete_after(tmp_path: Path) -> None:
    ring = make(tmp_path)
    index = record(ring)
    (slot,) = read(ring).slots
    assert (slot.op, slot.group, slot.seq, slot.dtype, slot.shape) == ("all_reduce", "0", 1, "torch.float32", (4, 8))
    assert slot.site is not None
    assert slot.site["l"] == 3
    assert slot.ended_ns == 0
    ring.end(index, ring_layout.FLAG_FAILED)
    (slot,) = read(ring).slots
    assert slot.ended_ns >= slot.started_ns > 0
    assert slot.flags & ring_layout.FLAG_FAILED


def test_the_oldest_calls_are_overwritten_and_the_file_keeps_its_size(tmp_path: Path) -> None:
    ring = make(tmp_path)
    size = Path(ring.path).stat().st_size
    for seq in range(1, 101):
        ring.end(record(ring, seq=seq))
    content = read(ring)
    assert [slot.seq for slot in content.slots] == list(range(69, 101))
    assert content.cells["calls_done"] == 100
    assert Path(ring.path).stat().st_size == size == ring_layout.CHILD_SHAPE.total_bytes


def test_ending_a_call_that_was_overwritten_changes_nothing(tmp_path: Path) -> None:
    ring = make(tmp_path)
    first = record(ring)
    for seq in range(2, 40):
        record(ring, seq=seq)
    before = list(read(ring).slots)
    ring.end(first)
    assert list(read(ring).slots) == before


def test_a_full_journal_drops_and_counts_and_calls_go_on(tmp_path: Path) -> None:
    ring = make(tmp_path)
    while ring.note({"k": "filler", "text": "x" * 500}):
        pass
    assert ring.intern("n" * 600) == 0
    ring.end(record(ring))
    content = read(ring)
    assert content.cells["dropped"] >= 2
    assert len(content.slots) == 1


def test_all_blocks_are_allocated_at_the_start(tmp_path: Path) -> None:
    ring = make(tmp_path, ring_layout.RANK_SHAPE)
    assert Path(ring.path).stat().st_blocks * 512 >= ring_layout.RANK_SHAPE.total_bytes


def test_no_room_is_an_error_at_the_start_and_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[2]);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from ddpdoctor.recorder.storage import ring_layout, ring_writing\n"
        "try: ring_writing.Ring(sys.argv[1], 1, ring_layout.CHILD_SHAPE, 1, 1)\n"
        "except OSError as e: print('refused')"
    )
    root = str(Path(ring_layout.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(tmp_path), root], capture_output=True, text=True, check=False
    )
    assert done.stdout == "refused\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_many_threads_lose_no_call(tmp_path: Path) -> None:
    ring = make(tmp_path, ring_layout.RANK_SHAPE)

    def work() -> None:
        for _ in range(200):
            ring.end(record(ring))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = read(ring)
    assert [slot.number for slot in content.slots] == list(range(1, 801))
    assert all(slot.ended_ns for slot in content.slots)


def test_more_dimensions_than_a_record_holds(tmp_path: Path) -> None:
    ring = make(tmp_path)
    record(ring, dims=(1, 2, 3, 4, 5, 6, 7))
    assert read(ring).slots[0].shape is None


def test_the_last_place(tmp_path: Path) -> None:
    ring = make(tmp_path)
    assert read(ring).place is None
    ring.place("/home/u/train.py", 12, "load")
    ring.place("/home/u/träin.py", 13, "main")
    assert read(ring).place == ("/home/u/träin.py", 13, "main")


@pytest.mark.parametrize("data", [b"", b"x" * 5000, ring_layout.MAGIC + b"\0" * 5000, bytes(9000)])
def test_what_is_no_ring_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "no.ring"
    path.write_bytes(data)
    with pytest.raises(ring_reading.DamagedRingError):
        ring_reading.read_ring_file(path)


def test_a_truncated_ring_is_refused_and_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    ring = make(tmp_path)
    ring.note({"k": "first"})
    ring.note({"k": "second"})
    data = bytearray(Path(ring.path).read_bytes())
    copy = tmp_path / "copy.ring"
    copy.write_bytes(data[:-1])
    with pytest.raises(ring_reading.DamagedRingError, match="truncated"):
        ring_reading.read_ring_file(copy)
    data[ring_layout.HEADER_SIZE + 2] = 0xFF
    copy.write_bytes(data)
    assert [note["k"] for note in ring_reading.read_ring_file(copy).notes] == ["second"]


# Rings in any state: turned over, torn, of another version, cut short while they are read.


SHAPE = ring_layout.CHILD_SHAPE


def filled(folder: Path, calls: int, shape: ring_layout.RingShape = SHAPE) -> Path:
    ring = Ring(str(folder), ring_layout.ROLE_RANK, shape, pid=42, start_ticks=7)
    for seq in range(1, calls + 1):
        key = ("f.py", seq % 3)
        site = ring.known_site(key) or ring.intern_site(key, {"f": "f.py", "l": seq % 3, "n": "main", "u": 1})
        op, group, dtype = map(ring.intern, ("all_reduce", "0", "f"))
        kind = ring_layout.pack_kind(op, 0, group, site, 0, dtype, peer=-1, tensors=1, flags=4, dims=(seq,))
        ring.end(ring.begin(kind, seq))
    return Path(ring.path)


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("calls", [0, 1, 31, 32, 33, 64, 100, 5000])
def test_all_calls_that_are_still_there_are_read_in_order(tmp_path: Path, calls: int) -> None:
    slots = ring_reading.read_ring_file(filled(tmp_path, calls)).slots
    assert [slot.seq for slot in slots] == list(range(max(1, calls - SHAPE.slots + 1), calls + 1))
    assert all(slot.shape == (slot.seq,) and slot.site is not None for slot in slots)
    assert all(slot.site["l"] == slot.seq % 3 for slot in slots if slot.site)


def test_a_record_that_was_claimed_and_not_written_is_left_out(tmp_path: Path) -> None:
    path = filled(tmp_path, 10)
    change(path, SHAPE.slots_at + 3 * ring_layout.SLOT_SIZE, bytes(ring_layout.SLOT_SIZE))
    assert [slot.seq for slot in ring_reading.read_ring_file(path).slots] == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_a_record_beyond_the_last_claimed_one_is_read(tmp_path: Path) -> None:
    """Threads claim out of order, and a process may be killed between a record and the claim."""
    path = filled(tmp_path, 10)
    change(path, ring_layout.CELL_OFFSETS["slots_claimed"], ring_layout.CELL.pack(8))
    assert [slot.seq for slot in ring_reading.read_ring_file(path).slots] == list(range(1, 11))


@pytest.mark.parametrize("number", [2**64 - 1, 0, 12345])
def test_a_damaged_number_costs_its_own_record_only(tmp_path: Path, number: int) -> None:
    path = filled(tmp_path, 40)
    change(path, SHAPE.slots_at + 20 * ring_layout.SLOT_SIZE, ring_layout.CELL.pack(number))
    assert [slot.seq for slot in ring_reading.read_ring_file(path).slots] == [n for n in range(9, 41) if n != 21]


@pytest.mark.parametrize("cell", ["slots_claimed", "journal_used", "steps_recorded"])
@pytest.mark.parametrize("value", [0, 7, 2**63, 2**64 - 1])
def test_a_damaged_cell_raises_nothing(tmp_path: Path, cell: str, value: int) -> None:
    path = filled(tmp_path, 40)
    change(path, ring_layout.CELL_OFFSETS[cell], ring_layout.CELL.pack(value))
    content = ring_reading.read_ring_file(path)
    assert len(list(content.slots)) <= SHAPE.slots
    assert list(content.steps) == []


def test_a_ring_of_another_version_says_which(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    change(path, len(ring_layout.MAGIC), struct.pack("<I", 1))
    with pytest.raises(ring_reading.DamagedRingError, match="ring version 1, this program reads"):
        ring_reading.read_ring_file(path)


def test_cells_of_version_2_are_read_where_they_stood(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    order = [ring_layout.CELL_NAMES.index(name) for name in ring_layout.CELL_NAMES_OF_VERSION_2]
    cells = struct.unpack_from(f"<{len(order)}Q", path.read_bytes(), ring_layout.CELLS_OFFSET)
    before = ring_reading.read_ring_file(path)
    change(path, ring_layout.CELLS_OFFSET, struct.pack(f"<{len(order)}Q", *(cells[i] for i in order)))
    change(path, len(ring_layout.MAGIC), struct.pack("<I", 2))
    after = ring_reading.read_ring_file(path)
    assert order != sorted(order)
    assert (after.cells, list(after.slots)) == (before.cells, list(before.slots))


@pytest.mark.parametrize("kept", [0, 100, ring_layout.HEADER_SIZE, SHAPE.slots_at + 5, SHAPE.total_bytes - 1])
def test_a_file_that_was_cut_short_says_so(tmp_path: Path, kept: int) -> None:
    path = filled(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ring_reading.DamagedRingError, match=r"truncated|too short"):
        ring_reading.read_ring_file(path)


def test_a_header_that_promises_gigabytes_is_not_believed(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    identity = list(ring_layout.IDENTITY.unpack_from(path.read_bytes()))
    identity[4], identity[5] = 2**33, 2**33 + ring_layout.HEADER_SIZE
    change(path, 0, ring_layout.IDENTITY.pack(*identity))
    with path.open("r+b") as file:
        file.truncate(2**34)
    with pytest.raises(ring_reading.DamagedRingError, match="promises"):
        ring_reading.read_ring_file(path)


def test_one_damaged_line_of_the_journal_costs_that_line_only(tmp_path: Path) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, SHAPE, pid=42, start_ticks=7)
    for word in ("first", "second", "third"):
        ring.note({"k": word})
    data = Path(ring.path).read_bytes().replace(b'"second"', b'"sec\nnd"')
    Path(ring.path).write_bytes(data)
    assert [note["k"] for note in ring_reading.read_ring_file(ring.path).notes] == ["first", "third"]


@pytest.mark.parametrize("note", [{"k": 3}, {"pid": 1}, {"k": "child_end", "pid": "x"}, {"k": "raised", "at": []}])
def test_a_note_that_no_recorder_writes_is_left_out(tmp_path: Path, note: dict[str, object]) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, SHAPE, pid=42, start_ticks=7)
    ring.note(note)
    ring.note({"k": "init", "rank": None, "at": 5})
    assert [found["k"] for found in ring_reading.read_ring_file(ring.path).notes] == ["init"]


@pytest.mark.parametrize(
    ("backends", "expected"),
    [([], False), (["cpu:gloo"], False), (["cpu:gloo,cuda:nccl"], True), (["cuda:nccl", "cpu:gloo,cuda:gloo"], False)],
)
def test_whether_the_group_goes_over_nccl_is_read_of_a_ring_in_use(
    tmp_path: Path, backends: list[str], *, expected: bool
) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, SHAPE, pid=42, start_ticks=7)
    for backend in backends:
        ring.note({"k": "initialized", "backend": backend, "at": 1})
    assert ring_reading.uses_nccl(Path(ring.path).read_bytes()) is expected


# Files of a run folder are opened as what they are, and written whole and private.


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("umask")
def test_what_is_written_is_private_whatever_the_umask(tmp_path):
    files.make_folder(tmp_path / "rings")
    files.write_whole(tmp_path / "run.json", "text")
    os.close(files.open_new(tmp_path / "control"))
    assert [mode(tmp_path / name) for name in ("rings", "run.json", "control")] == [0o700, 0o600, 0o600]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control", "rings", "run.json"]


@pytest.mark.parametrize("name", ["run.json", "run.json.part"])
def test_a_link_is_replaced_and_not_written_through(tmp_path, name):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / name).symlink_to("outside")
    files.write_whole(tmp_path / "run.json", b"new")
    assert (tmp_path / "outside").read_text() == "mine"
    assert not (tmp_path / "run.json").is_symlink()
    assert (tmp_path / "run.json").read_text() == "new"


def test_another_name_of_a_file_keeps_what_it_holds(tmp_path):
    (tmp_path / "outside").write_text("mine")
    os.link(tmp_path / "outside", tmp_path / "control")
    os.close(files.open_new(tmp_path / "control"))
    assert (tmp_path / "outside").read_text() == "mine"


def plant(path, kind):
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**40)


@pytest.mark.parametrize("kind", ["link", "dangling", "device", "pipe", "folder", "sparse"])
def test_what_is_no_plain_file_is_not_read_and_waited_for(tmp_path, kind):
    plant(tmp_path / "evidence", kind)
    with pytest.raises(OSError, match=r"it is a link|it is no regular file|it has more than"):
        files.read_plain(tmp_path / "evidence")


@pytest.mark.parametrize("kind", ["link", "dangling", "device", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_written_to(tmp_path, kind):
    plant(tmp_path / "agent.jsonl", kind)
    with pytest.raises(OSError, match=r"it is a link|it is no regular file|No such device|Is a directory"):
        os.close(files.open_plain(tmp_path / "agent.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def test_a_folder_that_is_a_link_is_not_used(tmp_path):
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


def test_settings_arrive_as_they_were_sent():
    sent = RecorderSettings(check_every=7, tune_rounds=2)
    assert sent.variables() == {
        "DDPDOCTOR_CHECK_EVERY": "7", "DDPDOCTOR_SPEED": "0", "DDPDOCTOR_TUNE_ROUNDS": "2", "DDPDOCTOR_TUNE_ONLY": "",
            "DDPDOCTOR_TUNE_SETTING": "", "DDPDOCTOR_LOG_FINDINGS": "0", "DDPDOCTOR_CHECK_AUTO": "0",
    }  # fmt: skip
    assert values(read_settings(sent.variables())) == values(sent)


@pytest.mark.parametrize("env", [{}, {"DDPDOCTOR_CHECK_EVERY": ""}, {"DDPDOCTOR_CHECK_EVERY": "often"}])
def test_what_is_no_value_leaves_the_default(env):
    assert values(read_settings(env)) == values(RecorderSettings())


# Which processes are recorded as ranks from their first line on.


BOOTSTRAP = Path(ddpdoctor.recorder.__file__).parent / "bootstrap"
SAY = "import sys\nprint(int(sys._ddpdoctor_recorder.is_rank), flush=True)\n"
START = "import subprocess, sys\nsubprocess.run([sys.executable, sys.argv[1]], check=True)\n"
ME = str(os.getpid())


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SAY)
    (tmp_path / "rings").mkdir()
    (tmp_path / "evidence").mkdir()
    return file


def said(script, *words, **env):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(BOOTSTRAP), "DDPDOCTOR_RUN": str(script.parent), **env}
    command = [sys.executable, *(words or [str(script)])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=script.parent)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("env", "is_rank"),
    [
        ({"RANK": "0", "DDPDOCTOR_AGENT": ME}, True),
        ({"DDPDOCTOR_AGENT": ME}, False),
        ({"RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_RANK": "1"}, True),
        ({"PMI_RANK": "1"}, True),
        ({"SLURM_PROCID": "0"}, True),
        ({}, False),
        ({"DDPDOCTOR_WATCHER": ME}, True),
        ({"DDPDOCTOR_WATCHER": "1"}, False),
    ],
)
def test_a_number_of_its_own_makes_a_rank_and_so_does_being_the_command(env, is_rank, script):
    assert said(script, **env) == [str(int(is_rank))]


@pytest.mark.parametrize("env", [{"RANK": "0"}, {"RANK": "0", "DDPDOCTOR_AGENT": ME}, {"DDPDOCTOR_WATCHER": ME}])
def test_what_a_rank_starts_is_none(env, script):
    starter = script.with_name("starter.py")
    starter.write_text(SAY + START)
    assert said(script, str(starter), str(script), **env) == ["1", "0"]


def test_a_launcher_that_has_a_number_gives_its_children_others(script):
    starter = script.with_name("starter.py")
    starter.write_text("import os\nos.environ['RANK'] = '5'\n" + START)
    assert said(script, str(starter), str(script), RANK="0") == ["1"]


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed"])
def test_a_launcher_in_a_batch_job_is_no_rank(name, script):
    launcher = script.with_name(name)
    launcher.write_text(SAY)
    assert said(script, "-u", str(launcher), SLURM_PROCID="0", DDPDOCTOR_WATCHER=ME) == ["0"]


# Secrets are hidden by name, place, form and randomness; what only looks a little like one stays.


RANDOM = "q7Rk2LmZ9xVt4Bn8Wc1Ys6"
COMMIT = "1b866ed0c5f2a94d7e3b8f6a1c0d9e8f7a6b5c4d"
"""Has the form of an old key of W&B, too."""
HEX = "0123456789abcdef0123456789abcdef"
UUID = "550e8400-e29b-41d4-a716-446655440000"
SHORT, PLAIN = "abc123def456", "abcdefghijklmnopqrstuvwx"


@pytest.mark.parametrize(
    ("typed", "stored"),
    [
        ("train.py --api-key abc --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --wandb_token=abc --password=x", "train.py --wandb_token=*** --password=***"),
        ("train.py --hf_token abc", "train.py --hf_token ***"),
        ("train.py --hftoken abc", "train.py --hftoken ***"),
        ("train.py --hfToken abc", "train.py --hfToken ***"),
        ("train.py --wandb-key abc", "train.py --wandb-key ***"),
        ("train.py --wandbkey abc", "train.py --wandbkey ***"),
        ("train.py --db-pass hunter2", "train.py --db-pass ***"),
        ("train.py --openai_key=abc --neptune-key x1", "train.py --openai_key=*** --neptune-key ***"),
        ("train.py --auth u:p", "train.py --auth ***"),
        ("train.py -p hunter2", "train.py -p ***"),
        ("mysqldump -psecret -u root db", "mysqldump -p*** -u root db"),
        ("mysql -p secret db", "mysql -p *** db"),
        ("curl -u me:secret x", "curl -u me:*** x"),
        ("TOKEN=abc train.py", "TOKEN=*** train.py"),
        ("env WANDB_API_KEY=abc HF_TOKEN=x python t.py", "env WANDB_API_KEY=*** HF_TOKEN=*** python t.py"),
        ("srun --export=ALL,HF_TOKEN=abc t.py", "srun --export=ALL,HF_TOKEN=*** t.py"),
        ("t.py logger.api_key=abc +wandb.key=abc", "t.py logger.api_key=*** +wandb.key=***"),
        ("t.py --data s3://k:pw@host/x", "t.py --data s3://k:***@host/x"),
        ("t.py --db=postgres://u:p@w@h:5432/d", "t.py --db=postgres://u:***@h:5432/d"),
        ("t.py https://h/x?token=abc&n=3", "t.py https://h/x?token=***&n=3"),
        ("t.py --url=https://h/x?a=1&X-Amz-Signature=ab12", "t.py --url=https://h/x?a=1&X-Amz-Signature=***"),
        ("t.py --x hf_abcdefghijklmnopqrstuvwx", "t.py --x ***"),
        (f"t.py --x {RANDOM}", "t.py --x ***"),
        ("train.py --password --lr 1", "train.py --password --lr 1"),
    ],
)
def test_values_of_secrets_are_hidden(typed: str, stored: str) -> None:
    assert " ".join(hide_secrets(tuple(typed.split()))) == stored


@pytest.mark.parametrize(
    "typed",
    [
        "train.py",
        "train.py --tokenizer gpt2 --lr 0.1 --max-tokens=5 --token-budget 4096 --eos-token </s>",
        "train.py --pad_token_id=0 --pad-token [PAD] --use_auth_token True --lr 1",
        "train.py --model meta-llama/Llama-3-8B --revision " + COMMIT,
        "train.py --model Meta-Llama-3.1-8B-Instruct-Q4_K_M --name ViTBasePatch16Imagenet21kFinetuned",
        "train.py --sort-key name --image-key jpg --state-dict-key model --keyboard qwerty",
        "train.py --run-id 550e8400-e29b-41d4-a716-446655440000 --job 12345678.batch",
        "train.py --out /scratch/u1/runs/20260304-050607-gpt2small/version_12/checkpoints/epoch=3-step=1200.ckpt",
        "train.py --sha " + COMMIT + "00112233445566778899aabb",
        "train.py -p 29500 -p out/run1 -p bf16 -p 0.1 -p debug -p 16-mixed",
        "train.py --rdzv-endpoint=tcp://[::1]:29500 --rdzv-id run_2026 --master-addr host:29500",
        "train.py --passes 3 --authors me --sigma 0.1 --bypass 2 --secretary x",
        "git clone git@github.com:pytorch/pytorch.git https://user@host/x",
        "train.py --data s3://bucket/a/b?versions=3 optimizer.lr=0.1 +trainer.max_steps=5",
        "python -m torch.distributed.run --nproc-per-node=2 --master-port=29500 train.py",
        "train.py --key-file ~/.ssh/id_rsa --token-file /run/secrets/token",
    ],
)
def test_what_is_no_secret_stays(typed: str) -> None:
    assert " ".join(hide_secrets(tuple(typed.split()))) == typed


SHAPES = [
    "hf_abcdefghijklmnopqrstuvwxyz01234567", "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0abcdefghijkl_xyz",
    "sk-abcdefghijklmnopqrstuvwxyz012345", "sk-ant-api03-abcdefghijklmnopqrstuvwx-AA",
    "sk-proj-abcd1234efgh5678ijkl9012",
    "AKIAIOSFODNN7EXAMPLE", "xoxb-123456789012-abcdefABCDEF", "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "glpat-abcdefghijklmnop1234", "npm_abcdefghijklmnopqrstuvwxyz0123456789", "gsk_abcdefghijklmnopqrstuvwxyz",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "nvapi-abcdefghijklmnopqrstuvwxyz", "dapi0123456789abcdef0123456789abcdef", RANDOM,
]  # fmt: skip


@pytest.mark.parametrize("token", SHAPES)
def test_a_credential_is_known_by_its_form(token: str) -> None:
    assert hide_in_text(f"401 for {token}, try again") == "401 for ***, try again"


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("GET https://me:pw@h/x?token=abc failed", "GET https://me:***@h/x?token=*** failed"),
        ("Authorization: Bearer abc123def456", "Authorization: ***"),
        ("{'Authorization': 'Basic dXNlcjpwdw=='}", "{'Authorization': '***'}"),
        ("sent Bearer abcdef0123456789", "sent Bearer ***"),
        ("host=db user=me password=pw dbname=x", "host=db user=me password=*** dbname=x"),
        ('{"api_key": "abc", "lr": 1}', '{"api_key": "***", "lr": 1}'),
        (f"wandb: api_key={COMMIT}", "wandb: api_key=***"),
        (f"wandb login {COMMIT}", "wandb login ***"),
        ("Server=h;Pwd=x;Database=d", "Server=h;Pwd=***;Database=d"),
        ("posted to https://hooks.slack.com/services/T0/B0/abc", "posted to https://hooks.slack.com/services/***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
         "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----"),
        ("failed: mysql --password=abc --port 3306", "failed: mysql --password=*** --port 3306"),
        ("--hf-token abc123 --max-tokens 5", "--hf-token *** --max-tokens 5"),
        ("['t.py', '--wandb_key', '0123456789abcdef', '--lr', '0.1']", "['t.py', '--wandb_key', '***', '--lr', '0.1']"),
        ("t.py --password='a b' -x", "t.py --password='***' -x"),
        ("bad secret wJalrXUtnFEMI/K7MDENG/bPxRfiCYEX1", "bad secret ***"),
    ],
)  # fmt: skip
def test_secrets_in_a_text_are_hidden(text: str, stored: str) -> None:
    assert hide_in_text(text) == stored


@pytest.mark.parametrize(
    "text",
    [
        "boom",
        "Unexpected token: '}' at line 3",
        "expected scalar type Float but found Half, key: layers.0.weight",
        f"commit {COMMIT} is not an ancestor",
        "KeyError: 'model.layers.0.self_attn.q_proj.weight'",
        "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1800000 ms",
        "Connection closed by peer [127.0.0.1]:29500",
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
        "frame #0: _ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string<char>) + 0x57 (0x7f3a1c2b4d87 in libc10.so)",
        "File /opt/conda/envs/py311/lib/python3.11/site-packages/torch/nn/modules/module.py, line 1501",
        "tokenizer.pad_token=<pad>, num_tokens=4096, basic training, sort_key=name",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ],
)
def test_a_plain_text_stays(text: str) -> None:
    assert hide_in_text(text) == text


WANDB = [
    f"wandb: Paste an API key from your profile and hit enter: {COMMIT}",
    f'wandb.login(key="{COMMIT}")', f"WANDB_API_KEY {COMMIT}", f"export WANDB_API_KEY={COMMIT}",
    f"wandb: ERROR invalid key {COMMIT} for api.wandb.ai", f"echo {COMMIT} | wandb login --relogin",
    f"machine api.wandb.ai login user password {COMMIT}", f"W&B key {COMMIT}", f"Weights & Biases: {COMMIT}",
    f"https://{COMMIT}@api.wandb.ai", f"wandb: Paste an API key from your profile and hit enter:\n{COMMIT}\n",
]  # fmt: skip
HOOKS = [
    f"https://acme.webhook.office.com/webhookb2/{UUID}@{UUID}/IncomingWebhook/{HEX}/{UUID}",
    f"https://outlook.office.com/webhook/{UUID}@{UUID}/IncomingWebhook/{HEX}/{UUID}",
    f"https://prod-12.westus.logic.azure.com:443/workflows/{HEX}/triggers/manual/paths/invoke?sp=%2Frun&sig=a{UUID}",
    f"https://default.aa.environment.api.powerplatform.com:443/powerautomate/automations/direct/workflows/{HEX}/x?y",
    f"https://discord.com/api/webhooks/1234/{HEX}", f"https://canary.discord.com/api/v10/webhooks/123/{HEX}_ghi",
    f"https://hooks.slack.com/triggers/T0/123/{HEX}", f"https://open.feishu.cn/open-apis/bot/v2/hook/{UUID}",
    f"https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={UUID}", f"https://hc-ping.com/{UUID}",
    f"https://oapi.dingtalk.com/robot/send?access_token={HEX}", f"https://api.telegram.org/bot12345678:AA{HEX}/send",
    f"https://chat.googleapis.com/v1/spaces/A/messages?key={UUID}&token={HEX}", f"https://mm.example.com/hooks/{HEX}",
    f"https://chat.example.com:8065/hooks/5d8f7a/{HEX}",
]  # fmt: skip
ADDRESSES = [
    f"git clone https://{HEX}@github.com/x", f"https://{HEX}@o123.ingest.sentry.io/456",
    f"https://oauth2:{HEX}@gitlab.com/x.git", f"postgresql://u:{HEX}@h/db", f"redis://:{HEX}@h:6379/0",
    f"http_proxy=http://u:{HEX}@proxy:3128", f"https://s3/x?X-Amz-Algorithm=AWS4&X-Amz-Signature={HEX}",
    f"https://a.blob.core.windows.net/c?sv=1&sig={HEX}", f"https://storage.googleapis.com/x?X-Goog-Signature={HEX}",
    f"git clone https://{PLAIN}@github.com/x", f"redirect=?token%3D{HEX}", f"AccountKey={HEX}==;EndpointSuffix=x",
]  # fmt: skip
ESCAPED = [
    f'body: {{\\"api_key\\": \\"{HEX}\\", \\"lr\\": 1}}', f'{{\\\\\\"password\\\\\\": \\\\\\"{HEX}\\\\\\"}}',
    f"{{\\'secret\\': \\'{HEX}\\'}}", f'cut off: {{"api_key": "{HEX}', f'"token":"{HEX}"',
    f"{{\\u0022password\\u0022: \\u0022{HEX}\\u0022}}", f"&quot;password&quot;: &quot;{HEX}&quot;",
    f'{{"username":"me","key":"{HEX}"}}', f'{{\\"username\\": \\"me\\", \\"key\\": \\"{HEX}\\"}}',
]  # fmt: skip
NAMED = [
    f"PGPASSWORD={HEX} psql", f"passwd: {HEX}", f"curl -u me:{HEX} x", f"docker login -u me -p {HEX}",
    f"sshpass -p {HEX} ssh h", f"curl -H 'X-API-Key: {HEX}' x", f"Set-Cookie: sid={HEX}", f"API key: {HEX}",
    f"Incorrect API key provided: {HEX}",
    f"if password == '{HEX}':",
    f"password=b'{HEX}'", f'token = f"{HEX}"', f"('HF_TOKEN', 'x{HEX}')", f"(b'password', b'{HEX}')",
    f"['train.py', '--wandb-key', '{SHORT}']", f"wandb_api_key            = {HEX}", f"password:          {HEX}",
    f"  wandb_api_key ......................... {SHORT}",
    f"\u2502 hf_token   \u2502 x{HEX} \u2502", f"curl --user=me:{HEX} x",
    f"ms-{UUID}", f"secret={HEX}(x)", f"token=abc{HEX}&x", f"token '{HEX}' is invalid", f"authorization: bearer {HEX}",
    "sent Bearer abcdefghijklmnopqrstuvwxyz".replace("abcdefgh", HEX.replace("0", "a")),
]  # fmt: skip


@pytest.mark.parametrize("text", [*WANDB, *HOOKS, *ADDRESSES, *ESCAPED, *NAMED])
def test_what_lets_others_in_is_hidden(text: str) -> None:
    shown = hide_in_text(text)
    assert "***" in shown
    assert [part for part in (COMMIT, HEX, UUID, SHORT, PLAIN) if part in shown] == []
    assert hide_in_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        f"wandb: git commit {COMMIT}", f"wandb: Run summary, commit:\n{COMMIT}", f"syncs to W&B\nat {COMMIT}",
        "  num_tokens ............... 4096", "  tokenizer_type ........... GPT2BPETokenizer", "('token', 'unexpected')",
        "['password', 'user', 'host']", "https://first.last@example.org/x", "https://example.org/webhooks",
        "\u2502 pad_token \u2502 <pad> \u2502", "  moe_token_dispatcher_type ....... alltoall",
        "docker run --user=1000:1000 x", f"wandb: Tracking run with wandb version 0.17.0, sha {COMMIT}",
        f'"wandb": true, "commit": "{COMMIT}"', f"wandb @ git+https://github.com/wandb/wandb@{COMMIT}",
        "wandb: View run at https://wandb.ai/team/proj/runs/a1b2c3d4",
        f'File "/root/.cache/hub/models--x/snapshots/{COMMIT}/modeling.py", line 7', f"HEAD is now at {COMMIT} fix",
        f"sha256:{HEX}{HEX}", f"container {HEX}{HEX} exited", f"checkpoint {HEX}{HEX}.pt", f'etag: "{HEX}"',
        f"GPU-{UUID} MIG-{UUID}", f"run id {UUID}",
        "n3:4711:4720 [0] NCCL INFO ncclCommInitRank comm 0x55d0c8f0 rank 0 busId 1b000 commId 0x5c1d2e3f4a5b6c7d",
        "PWD=/home/me/train OLDPWD=/tmp", "AuthType=auth/munge AuthInfo=socket=/run/munge",
        "https://github.com/pytorch/pytorch/issues/12345", "ssh://git@github.com/x", "s3://bucket/a@2x.png",
        "token: 128000 is out of range", "KeyError: 'token'", "the token is invalid", "bad authorization header",
        "docker run -p 8080:80 nginx", "mysql running on port 3306", "def __init__(self, token=None, secret: str = '')",
        "signature = inspect.signature(forward)", 'if token.type == OP and token.string == "def":',
        "dict_keys(['model', 'optimizer'])", "See https://huggingface.co/settings/tokens", "hf_transfer is missing",
        "PG GUID 0(default_pg) Rank 1] NCCL_COMM_ID=10.0.0.1:1234 job_id=1234567_89 fsdp_auth_wrap=1 pass 3 of 5",
        "2026-01-02T03:04:05.678901Z model-00001-of-00004.safetensors events.out.tfevents.1700000000.host.123.0",
    ],
)  # fmt: skip
def test_numbers_and_words_of_a_job_stay(text: str) -> None:
    assert hide_in_text(text) == text


UNITS = (
    "a", "a=", "token=", "token=<", "://a:", "https://aaaa", "eyJ.", "eyJ-", "eyJaaaaaaaa-", "a.", "'", 'token="',
    '\\"', "sk-", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "-----BEGIN A", "x:y@", "sk-a-", "sk-abc-", "SG.",
    "SG.-", "xoxb-", "token ", "wandb ", f"wandb {COMMIT} ", "curl -", "docker login ", "bearer ", "--a", "--token ",
    "hooks.slack.com/services/", "://a/hooks", "://a", " ", "a    ", "a ....", "('token', ", "|", "a | ", "&quot;",
    '"username":"', "%3D", "password=\\\\\\", "hc-ping.com/",
)  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_with_the_length_of_a_line_and_not_with_its_square(unit: str) -> None:
    """Twenty times the text takes about twenty times as long; with the square it would be four hundred times."""
    assert cpu_s(unit, 100_000) < 100 * max(cpu_s(unit, 5_000), 0.003)


def cpu_s(unit: str, length: int) -> float:
    text = unit * (length // len(unit))
    began = time.process_time()
    hide_secrets((f"{text}!=x",))
    return time.process_time() - began
