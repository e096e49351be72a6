"""Reads addresses as the kernel writes them in /proc/net/tcp."""

from __future__ import annotations

import ipaddress
import sys


def parse_end(text: str) -> str | None:
    """Return "10.0.0.4:29500" for "0400000A:733C", words of four bytes in the machine's own order; None for no address.

    An IPv4 address in an IPv6 socket comes out as IPv4.
    """
    host, _, port = text.partition(":")
    try:
        raw = bytes.fromhex(host)
        if sys.byteorder == "little":
            raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
        ip = ipaddress.ip_address(raw)
        number = int(port, 16)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        return f"{ip.ipv4_mapped}:{number}" if ip.ipv4_mapped else f"[{ip}]:{number}"
    return f"{ip}:{number}"
