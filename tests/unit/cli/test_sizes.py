"""Sizes, shares, bandwidths and numbers of parameters as people type them."""

from __future__ import annotations

import pytest

from ddpdoctor.cli.sizes import parse_bandwidth, parse_count, parse_share, parse_size
from ddpdoctor.model.errors import UserError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_size, "4096", 4096),
        (parse_size, "1KiB", 1024),
        (parse_size, "1 kib", 1024),
        (parse_size, "8M", 8 * 2**20),
        (parse_size, "1.5GiB", 3 * 2**29),
        (parse_size, "1GB", 10**9),
        (parse_size, "3B", 3),
        (parse_share, "90%", 0.9),
        (parse_share, "90 %", 0.9),
        (parse_share, "0.9", 0.9),
        (parse_share, "100%", 1.0),
        (parse_bandwidth, "460", 460.0),
        (parse_bandwidth, "460GB/s", 460.0),
        (parse_bandwidth, "460 gb/s", 460.0),
        (parse_bandwidth, "400Gbit/s", 50.0),
        (parse_bandwidth, "1.8TB/s", 1800.0),
        (parse_count, "350M", 350_000_000),
        (parse_count, "1.5B", 1_500_000_000),
        (parse_count, "124439808", 124_439_808),
    ],
)
def test_what_is_understood(parse, text, value):
    assert parse(text, "--it") == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_size, ""),
        (parse_size, "0"),
        (parse_size, "-1KiB"),
        (parse_size, "1.5"),
        (parse_size, "1e3"),
        (parse_size, "MiB"),
        (parse_size, "٤"),
        (parse_size, "9" * 400),
        (parse_share, "0%"),
        (parse_share, "101%"),
        (parse_share, "90"),
        (parse_share, "%"),
        (parse_bandwidth, "0"),
        (parse_bandwidth, "fast"),
        (parse_bandwidth, "460 GiB/s"),
        (parse_count, "0"),
        (parse_count, "350MB"),
    ],
)
def test_what_is_not(parse, text):
    with pytest.raises(UserError, match="--it is ") as error:
        parse(text, "--it")
    assert error.value.help
