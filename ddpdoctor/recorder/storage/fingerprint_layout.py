"""The layout of a fingerprint file, version 1: a rank's replica of a model at many points in time.

A rank has one file per stream. A stream is a set of tensors (``rows``) that are fingerprinted together at one kind of
event, its clock. When the set changes, as when an optimizer makes its state, a new file follows. It has three parts:

``header``
    identity, and how many records were begun.
``table``
    compressed JSON, written once: the description of the stream, and its rows.
``slots``
    records of one size; the oldest are overwritten. A record has a head, a JSON text, and 16 bytes per row, zeros if
    the rank has no such tensor. Its number is set to 0 before anything else changes, and written last.

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
"""Room for the text of a record. Our choice: enough for two dozen groups of hyperparameters."""
FINGERPRINT_SIZE = 16
ABSENT = bytes(FINGERPRINT_SIZE)
UNKNOWN = b"\xff" * FINGERPRINT_SIZE
"""The fingerprint of a tensor that could not be read on this rank. It is not compared."""

PARAMETER, GRADIENT, BUFFER, STATE = "p", "g", "b", "s"
"""The first field of a row in the table: ``[what, name, part, shape, dtype]``."""
STEP, FORWARD, SYNC, END = "step", "forward", "sync", "end"
"""Clocks of streams in the table."""
MESH = "mesh "
"""Prefix of a stream's group in the table if it is a set of device mesh dimensions instead of a process group."""


def slot_size(rows: int) -> int:
    """Return the size in bytes of a record with this many rows."""
    return RECORD_HEAD.size + TEXT_SIZE + rows * FINGERPRINT_SIZE
