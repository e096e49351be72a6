"""Durations as people type them."""

from __future__ import annotations

import pytest

from ddpdoctor.cli.durations import parse_duration
from ddpdoctor.model.errors import UserError


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
