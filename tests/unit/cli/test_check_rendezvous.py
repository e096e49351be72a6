"""Options of check-rendezvous that need more than Typer's own reading."""

from __future__ import annotations

import pytest

from ddpdoctor.cli.check_rendezvous import parse_ports
from ddpdoctor.model.errors import UserError


def test_ports():
    assert parse_ports(None) is None
    assert parse_ports("40000-40100") == (40000, 40100)
    assert parse_ports("5-5") == (5, 5)


@pytest.mark.parametrize("text", ["", "40000", "40100-40000", "0-10", "1-70000", "a-b", "1-2-3"])
def test_what_is_no_range_of_ports(text):
    with pytest.raises(UserError, match="--port-range"):
        parse_ports(text)
