"""Cases of evidence, below tests/data/logs: logs, dumps and stacks, and what `analyze` must say of them.

A file has many cases. A case begins with "==== NAME", and has lines of head, which say what is true (the fields of
`Truth`), and the evidence below "----", or below "---- FILE" for each of several files. Lines stand as programs write
them; those with "@" stand for several, see `tests.log_texts.written`. A case is one for each of what differs:

    | a line          one of several lines
    || NAME ... ||    the same with several lines
"""

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.log_texts import interleaved, raised, ras_json, steps, text, watchdog, work, written
from tests.rules.logs.truths import ABSENT, Truth, analyzed, hold

DATA = Path(__file__).parents[2] / "data"
WORDS = ("kinds", "hosts", "hosts_within", "confidence")
NUMBERS = ("ranks", "not_ranks")
PASTED = [line.split("\t") for line in (DATA / "known_errors.tsv").read_text(encoding="utf-8").splitlines()[1:]]
LINES = ("says", "mentions", "collect", "never_says")


def truth_of(head):
    """Return what the lines of a head say; those that begin with # are for readers."""
    said = {}
    for line in head:
        name, _, value = line.partition(":")
        name, value = name.replace(" ", "_"), value.removeprefix(" ")
        if line.startswith("#"):
            continue
        if name in LINES:
            said[name] = (*said.get(name, ()), value)
        elif name in WORDS + NUMBERS:
            words = () if value == "none" else tuple(value.split())
            words = tuple(one for word in words for one in (ABSENT if word == "absent" else (word,)))
            said[name] = tuple(map(int, words)) if name in NUMBERS else words
        else:
            said[name] = {"": True, "no": False}.get(value, value)
    return Truth(**said)


def each(lines):
    """Return the lines of a case, or of each of several that differ in one place, with its name."""
    marks = [number for number, line in enumerate(lines) if line.startswith("||")]
    if marks:
        before, after = lines[: marks[0]], lines[marks[-1] + 1 :]
        return [(lines[first][3:], [*before, *lines[first + 1 : last], *after]) for first, last in pairwise(marks)]
    rows = [number for number, line in enumerate(lines) if line.startswith("| ")]
    if rows:
        return [(lines[row][2:], [*lines[: rows[0]], lines[row][2:], *lines[rows[-1] + 1 :]]) for row in rows]
    return [("", lines)]


def cases():
    """Return each case: its name, what is true, and the lines of its files, or of each of several that differ."""
    for path in sorted((DATA / "logs").glob("*.txt")):
        for case in re.split(r"^==== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            name, *lines = case.rstrip("\n").split("\n")
            start = next(number for number, line in enumerate(lines) if line.startswith("----"))
            yield pytest.param(truth_of(lines[:start]), each(lines[start:]), id=f"{path.stem}: {name}")


@pytest.mark.parametrize(("truth", "bodies"), list(cases()))
def test_what_the_evidence_shows_is_said(tmp_path, truth, bodies):
    for number, (which, body) in enumerate(bodies):
        print(which)
        files = {}
        for line in body:
            if line == "----" or line.startswith("---- "):
                current = files.setdefault(line[5:] or "job.log", [])
            else:
                current.append(line)
        hold(tmp_path / f"case{number}", {name: text(written(lines)) for name, lines in files.items()}, truth)


# What a case of text cannot say.


def test_numbers_that_no_job_has_take_no_memory(tmp_path):
    """A damaged line may make a group of 10**13 ranks, or a rank that no job has."""
    call = work(7, "_ALLGATHER_BASE", numel=1, out=10**13)
    those = [watchdog(rank, call, group="1", group_rank=rank) for rank in (0, 1)]
    named = [f"[rank{rank}]: world_size=999999999999, rank {rank} of 999999999999" for rank in (0, 1)]
    report = hold(tmp_path, interleaved(named, *those), Truth(kinds=("transport",), ranks=(), or_cannot_tell=True))
    assert report.data["evidence"]["world_size"] is None


@pytest.mark.parametrize("after", ["pid", "host", "cuda_dev", "unresponsive", "}"])
def test_json_of_nccl_2_28_9_lacks_a_comma_where_a_rank_is_missing(tmp_path, after):
    plain = json.dumps(json.loads(ras_json(dict.fromkeys(range(6), 5120), {6: True, 7: True})), indent=2)
    head, missing = plain.split('"missing_ranks":')
    damaged = re.sub(
        r"\},(\s*\{)" if after == "}" else rf'("{after}": [^,]+),', r"}\1" if after == "}" else r"\1", missing
    )
    assert damaged != missing
    report = hold(tmp_path, {"ras.json": f'{head}"missing_ranks":{damaged}'}, Truth(kinds=("killed",), ranks=(6, 7)))
    assert not report.data["evidence"]["not_read"]


DIAG = "w1:4242 NCCL DIAG "
FINE = [
    "NCCL DIAG === NCCL Diagnostics ===",
    f"{DIAG}[OK]   p2p: all 56 directed GPU P2P edges verified",
    f"{DIAG}=== RAS Diagnostics ===",
    f"{DIAG}[OK]   GPU inventory: 8x NVIDIA H100 per node consistent across 8 ranks in comm 0x12ab",
    f"{DIAG}[INFO] ECC: unavailable via NVML across 8 ranks in comm 0x12ab",
    f"{DIAG}[INFO] p2p: temporarily enabled context-wide CUDA peer access rank=3 cudaDev=3; avoid concurrent CUDA use",
    f"{DIAG}RAS diagnostics completed in 12.3 ms across 8 RAS peers",
]


def test_variables_that_differ_are_named_without_their_values(tmp_path):
    log = [
        *FINE,
        f"{DIAG}[INFO] NCCL environment: mismatch across 8 ranks in comm 0x12ab for NCCL_BUFFSIZE",
        f"{DIAG}[INFO] NCCL environment: NCCL_BUFFSIZE=secret4711 on rank(s) {{0,1,2,3}}",
        f"{DIAG}[INFO] NCCL environment: diagnostics incomplete, gathered 7/8 ranks in comm 0x1/0x2/0x3",
        *interleaved(*(watchdog(rank, work(9)) for rank in range(4))).splitlines(),
    ]
    report = hold(
        tmp_path, text(log), Truth(kinds=("transport",), ranks=(), or_cannot_tell=True, never_says=("secret4711",))
    )
    notes = "\n".join(report.data["evidence"]["notes"])
    assert "NCCL_BUFFSIZE differs between ranks" in notes
    assert "7/8 ranks" in notes


@pytest.mark.parametrize("line", [text for text, _, nature in PASTED if nature in {"peer-lost", "timed-out"}])
def test_no_pasted_line_of_a_victim_blames_the_rank_that_wrote_it(tmp_path, line):
    hold(tmp_path, f"[rank3]: {line}\n", Truth(kinds=("transport", "missing"), not_ranks=(3,), or_cannot_tell=True))


@pytest.mark.parametrize("line", [text for text, _, nature in PASTED if nature == "own"])
def test_every_other_known_line_is_an_answer(tmp_path, line):
    assert analyzed(tmp_path, f"{line}\n").verdict is not None


@pytest.mark.parametrize("line", (DATA / "harmless_lines.txt").read_text(encoding="utf-8").splitlines())
def test_a_line_that_sounds_like_an_error_accuses_nobody_even_at_the_end(tmp_path, line):
    hold(tmp_path, text([*steps(5), line]), Truth(silent=True, ended=False))


def test_a_packed_log(tmp_path):
    log = text([*steps(9), *raised("KeyError: 'labels'", 1)])
    hold(
        tmp_path, {"job.log.gz": gzip.compress(log.encode())}, Truth(kinds=("crash",), ranks=(1,), where="train.py:40")
    )


def test_a_checkpoint_and_a_core_beside(tmp_path):
    files = {
        "job.log": text([*steps(50), "`Trainer.fit` stopped: `max_steps=50` reached."]),
        "model.pt": b"PK\x03\x04" + bytes(5000) + b"Traceback (most recent call last):",
        "core.811": b"\x7fELF" + bytes(3000),
    }
    hold(tmp_path, files, Truth(silent=True))
