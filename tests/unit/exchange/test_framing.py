"""Messages are refused where they are damaged, too large, or not signed as they should be."""

import json
import struct
import zlib

import pytest

from ddpdoctor.exchange.conversation import MAX_PACKED_BYTES, MAX_PLAIN_BYTES, BadMessage, pack, unpack

TOKEN = b"secret"
PLAIN = {"a": [1, 2.5, None, True, "é\udcff"]}


def raw(
    payload: bytes, *, magic: bytes = b"DDPD", version: int = 1, signed: int = 0, length: int | None = None
) -> bytes:
    return struct.pack("!4sBBI", magic, version, signed, len(payload) if length is None else length) + payload


GOOD = zlib.compress(b"[1]")
BOMB = zlib.compress(b"[" + b" " * (MAX_PLAIN_BYTES + 1) + b"]")


@pytest.mark.parametrize("token", [None, TOKEN])
def test_what_is_packed_is_unpacked(token):
    assert unpack(pack(PLAIN, token), token) == PLAIN


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "not a message"),
        (b"GET / HTTP/1.1\r\n\r\n", "not a message"),
        (raw(GOOD, magic=b"XXXX"), "not a message"),
        (raw(GOOD, version=2), "format 2"),
        (raw(GOOD)[:-1], "cut short"),
        (raw(GOOD) + b"x", "cut short"),
        (raw(b"", length=MAX_PACKED_BYTES + 1), "over the limit"),
        (raw(b"not zlib"), "damaged"),
        (raw(GOOD[:-2]), "damaged"),
        (raw(GOOD + b"tail"), "damaged"),
        (raw(BOMB), "unpacks to more than"),
        (raw(zlib.compress(b"[1")), "damaged"),
        (raw(zlib.compress(b"[NaN]")), "damaged"),
        (raw(zlib.compress(b"\xff\xfe")), "damaged"),
        (raw(zlib.compress(b"[" * 200_000)), "damaged"),
        (pack(PLAIN, TOKEN), "no DDPDOCTOR_TOKEN"),
    ],
)
def test_what_is_no_message_is_refused(message, words):
    with pytest.raises(BadMessage, match=words):
        unpack(message)


def test_the_bomb_is_small_on_its_way():
    assert len(BOMB) < MAX_PACKED_BYTES


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pack(PLAIN), "not signed"),
        (pack(PLAIN, b"other"), "another token"),
        (pack(PLAIN, TOKEN)[:-1] + b"\0", "another token"),
        (pack(PLAIN, TOKEN).replace(b"DDPD\x01\x01", b"DDPD\x01\x00", 1), "cut short"),
    ],
)
def test_with_a_token_only_what_it_signed_is_read(message, words):
    with pytest.raises(BadMessage, match=words):
        unpack(message, TOKEN)


def test_a_message_that_nobody_would_read_is_not_sent():
    with pytest.raises(BadMessage, match="over the limit"):
        pack("x" * (MAX_PLAIN_BYTES + 1))


def test_nothing_but_json_travels():
    header = struct.calcsize("!4sBBI")
    assert json.loads(zlib.decompress(pack(PLAIN)[header:])) == PLAIN
