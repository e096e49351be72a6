"""The layout of a file of fingerprints, version 1: what a rank's replica of a model was like, again and again.

A rank has one file per stream: a set of tensors (``rows``) that are looked at together by one clock. Where the set
changes, as when an optimizer has made its state, a new file follows. It has three parts:

``header``
    identity, and how many records were begun.
``table``
    JSON, compressed, written once: what the stream is, and its rows.
``slots``
    records of one size; the oldest are overwritten. A record is its head, a text of JSON, and 16 bytes a row, zeros
    where the rank has no such tensor. Its number is written last, and set to 0 before anything else is changed.

All numbers are little-endian. Times are CLOCK_MONOTONIC in nanoseconds.
"""

from __future__ import annotations

import struct

MAGIC = b"DDPPRNT\n"
VERSION = 1
HEADER_SIZE = 128
IDENTITY = struct.Struct("<8sIIQQQQQQ")
"""magic, version, rows, table size, slots offset and size of one, their count, pid, start ticks."""
WRITTEN_OFFSET = 120
NUMBER = struct.Struct("<Q")

RECORD_HEAD = struct.Struct("<QQQI4x")
"""number of the record from 1 (0: being written), number of the point, time_ns, size of the text."""
TEXT_SIZE = 1984
"""Room for the text of a record. Ours: two dozen groups of hyper-parameters."""
FINGERPRINT_SIZE = 16
ABSENT = bytes(FINGERPRINT_SIZE)
UNKNOWN = b"\xff" * FINGERPRINT_SIZE
"""Of a tensor that could not be read on this rank: it is compared with none."""

PARAMETER, GRADIENT, BUFFER, STATE = "p", "g", "b", "s"
"""What a row is, as in the table: ``[what, name, part, shape, dtype]``."""
STEP, FORWARD, SYNC, END = "step", "forward", "sync", "end"
"""Clocks of streams, as in the table."""
MESH = "mesh "
"""What the group of a stream begins with in a table, where it is no process group but dimensions of a device mesh."""


def slot_size(rows: int) -> int:
    """Return the size of a record of so many rows."""
    return RECORD_HEAD.size + TEXT_SIZE + rows * FINGERPRINT_SIZE
