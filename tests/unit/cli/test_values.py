"""Values as people type them."""

import pytest

from ddpdoctor.cli.values import (
    parse_bandwidth,
    parse_count,
    parse_duration,
    parse_port,
    parse_ports,
    parse_share,
    parse_size,
    parse_steps,
)
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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8", 8), ("8.0", 8), ("8s", 8), ("5m", 300), ("1h", 3600), ("500ms", 0.5), (".5", 0.5), ("2 M", 120)],
)
def test_durations(text, seconds):
    assert parse_duration(text, "--hang-timeout") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "8x", "s", "1e3", "nan", "inf", "5 minutes", "9" * 400])
def test_what_is_no_duration_names_the_option(text):
    with pytest.raises(UserError, match="--hang-timeout") as error:
        parse_duration(text, "--hang-timeout")
    assert error.value.status == 2


def test_ports():
    assert parse_port(" 29500 ", "--exchange-port") == 29500
    assert parse_ports("40000-40100", "--port-range") == (40000, 40100)
    assert parse_ports("5-5", "--port-range") == (5, 5)


@pytest.mark.parametrize("text", ["", "40000", "40100-40000", "0-10", "1-70000", "a-b", "1-2-3"])
def test_what_is_no_range_of_ports(text):
    with pytest.raises(UserError, match="--port-range"):
        parse_ports(text, "--port-range")


@pytest.mark.parametrize(("text", "steps"), [("1", 1), ("50", 50), (" 200 ", 200), ("999999999", 999_999_999)])
def test_every_how_many_steps_replicas_are_compared(text, steps):
    assert parse_steps(text, "--check-every") == steps


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "ten", "", "5s", "1e3", "²", "9" * 10, "9" * 5000])
def test_what_is_no_number_of_steps_is_wrong_use(text):
    with pytest.raises(UserError, match="--check-every") as raised:
        parse_steps(text, "--check-every")
    assert "--no-consistency" in raised.value.help
