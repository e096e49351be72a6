"""Damages what ddpdoctor reads, as a bad disk or a bad person would: bytes, JSON, whole files."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

HOSTILE_TEXTS = (
    "", "x" * 5000, "\x1b[31mred\x1b[0m", "a\0b", "\u202egnp.exe", "\u2066\u2069", "\u200b\u2028\u2029", "\ud800",
    "\x7f\x9b5m",
    "<script>alert(1)</script>", "]]>&amp;<!--", "$\\frac{", "$x^$", "|`*_#[a](javascript:alert(1))", "```\n# x",
    "=1+cmd|' /C calc'!A0", "../../etc/passwd", "%s%n{0}", "\r\nX: y", "2026-99-99T99:99:99Z", "NaN", "-", "0", "1e999",
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 2**64, 2**70, 10**400, 1.5, -0.0, 1e308, float("inf"), float("nan"),
    [], [1], [[]], {}, {"a": 1}, *HOSTILE_TEXTS,
)  # fmt: skip
KINDS = ("json", "json", "json", "json", "text", "bytes", "bytes", "cut", "swap", "place")
MAX_TREE = 400_000
"""Longer files are damaged as bytes: to parse them again takes the time of ten others."""


def spoil(dice: random.Random, path: Path, others: list[Path]) -> None:
    """Damage one file in one way; ``others`` are files that may take its place."""
    data = path.read_bytes()
    kind = dice.choice(KINDS)
    if kind == "json" and path.suffix in {".json", ".jsonl", ".safetensors"} and len(data) < MAX_TREE:
        path.write_bytes(_spoil_json(dice, data))
    elif kind == "json" and path.suffix in {".ring", ".held"}:
        path.write_bytes(_spoil_journal(dice, data))
    elif kind == "text":
        at = dice.randrange(len(data) + 1)
        path.write_bytes(data[:at] + dice.choice(HOSTILE_TEXTS).encode("utf-8", "surrogatepass") + data[at:])
    elif kind == "cut":
        path.write_bytes(data[: dice.randrange(len(data) + 1)])
    elif kind == "swap":
        path.write_bytes(dice.choice(others).read_bytes())
    elif kind == "place":
        _put_in_place(dice, path)
    else:
        path.write_bytes(_spoil_bytes(dice, data))


def _spoil_json(dice: random.Random, data: bytes) -> bytes:
    how = dice.randrange(12)
    if how == 0:
        depth = dice.choice([50, 400, 5000, 100_000])
        return b"[" * depth + b"]" * depth
    if how == 1:
        return b"[" + b"{}," * dice.choice([1000, 3_000_000]) + b"0]"
    if how == 2:
        return data.replace(b"1", b"1" * 5000, 1)
    try:
        lines = [json.loads(line) for line in data.decode().splitlines()]
    except ValueError:
        try:
            lines = [json.loads(data)]
        except ValueError:
            return _spoil_bytes(dice, data)
    share = dice.choice([0.002, 0.02, 0.1])
    lines = [_mangle(dice, line, share) for line in lines]
    for _ in range(dice.choice([1, 1, 3])):
        lines[dice.randrange(len(lines))] = _mangle_one(dice, lines[dice.randrange(len(lines))])
    return "\n".join(map(json.dumps, lines)).encode()


def _mangle(dice: random.Random, value: Any, share: float) -> Any:
    if dice.random() < share:
        return dice.choice(JUNK)
    if isinstance(value, dict):
        return {
            dice.choice(HOSTILE_TEXTS) if dice.random() < share / 4 else name: _mangle(dice, one, share)
            for name, one in value.items()
            if dice.random() > share / 4
        }
    return [_mangle(dice, one, share) for one in value] if isinstance(value, list) else value


def _mangle_one(dice: random.Random, value: Any) -> Any:
    """Replace one value, found by walking down from the top: what lies deep is met as often as what does not."""
    if not isinstance(value, dict | list) or not value or dice.random() < 0.05:
        deep: Any = 0
        for _ in range(dice.choice([60, 300])):
            deep = [deep]
        return dice.choice((*JUNK, deep, dice.choice(HOSTILE_TEXTS)))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = dice.choice(keys)
    copied: Any = dict(value) if isinstance(value, dict) else list(value)
    copied[key] = _mangle_one(dice, value[key])
    return copied


def _spoil_journal(dice: random.Random, data: bytes) -> bytes:
    """Damage lines of JSON within a ring, and keep its length and all that stands around them."""
    lines = data.split(b"\n")
    inside = [number for number, line in enumerate(lines) if _is_json(line)]
    for number in dice.sample(inside, min(len(inside), dice.choice([1, 3, 20]))):
        reported = json.dumps(_mangle_one(dice, json.loads(lines[number]))).encode()
        lines[number] = reported[: len(lines[number])].ljust(len(lines[number]))
    return b"\n".join(lines)


def _is_json(line: bytes) -> bool:
    """Return whether a line is an object in JSON: a number in the ring may begin with the byte of a brace."""
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _spoil_bytes(dice: random.Random, data: bytes) -> bytes:
    spoilt = bytearray(data)
    if not spoilt:
        return b"\0"
    first = dice.choice([0, 0, 128, 1024, 4096, dice.randrange(len(spoilt))]) % len(spoilt)
    for _ in range(dice.choice([1, 5, 50])):
        at = dice.randrange(first, min(first + 2000, len(spoilt)))
        spoilt[at] = dice.choice([0, 0xFF, 0x7F, 0x80, dice.randrange(256)])
    if dice.random() < 0.1:
        at = dice.randrange(len(spoilt))
        spoilt[at : at + dice.randrange(64)] = b""
    return bytes(spoilt)


def _put_in_place(dice: random.Random, path: Path) -> None:
    """Put what is no plain file in the place of one."""
    path.unlink()
    what = dice.choice(["nothing", "device", "pipe", "folder", "dangling", "outside", "sparse", "loop"])
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "sparse":
        with path.open("wb") as file:
            file.truncate(dice.choice([2**26, 2**33, 2**40]))
    elif what != "nothing":
        target = {"device": "/dev/zero", "dangling": "nowhere", "outside": "/etc/passwd", "loop": path.name}[what]
        path.symlink_to(target)


def link_folder(dice: random.Random, folder: Path) -> None:
    """Put a link in the place of a part of a run folder."""
    parts = [path for path in folder.iterdir() if path.is_dir()]
    if parts:
        part = dice.choice(parts)
        shutil.rmtree(part)
        part.symlink_to(dice.choice(["/dev", "/proc/self", "nowhere", "."]))
