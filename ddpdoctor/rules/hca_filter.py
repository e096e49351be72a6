"""NCCL_IB_HCA: which RDMA ports it lets NCCL use. The grammar follows NCCL's parseStringList and matchIfList."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HcaToken:
    """One entry of the list: ``NAME[:PORT[:RAIL[:PLANE]]]``."""

    name: str
    port: int | None
    """None: every port of the device."""

    def matches(self, device: str, port: int, *, exact: bool) -> bool:
        """Say whether the entry matches this port, by the device's whole name or by its beginning."""
        same = device == self.name if exact else device.startswith(self.name)
        return same and self.port in {None, port}

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HcaFilter:
    """A value of NCCL_IB_HCA. Without entries it matches every device."""

    exclude: bool
    """The value begins with ^: all but these."""
    exact: bool
    """The value has =, after any ^: whole names, not beginnings."""
    tokens: tuple[HcaToken, ...]

    def takes(self, device: str, port: int) -> bool:
        """Say whether NCCL would use this port if it were up."""
        listed = not self.tokens or any(token.matches(device, port, exact=self.exact) for token in self.tokens)
        return listed is not self.exclude

    def names(self, device: str) -> bool:
        """Say whether the value asks for the device by its whole name, not by a beginning that others share."""
        return not self.exclude and any(token.name == device for token in self.tokens)


def parse_hca_filter(text: str) -> HcaFilter:
    """Return the filter that a value means. NCCL takes any text; an entry without meaning matches nothing."""
    exclude = text.startswith("^")
    rest = text.removeprefix("^")
    exact = rest.startswith("=")
    tokens = tuple(_parse_token(part) for part in rest.removeprefix("=").split(",") if part.partition(":")[0])
    return HcaFilter(exclude=exclude, exact=exact, tokens=tokens)


def _parse_token(text: str) -> HcaToken:
    """Read the port as C's atoi does: leading digits, else 0; an empty field means all ports."""
    name, found, more = text.partition(":")
    port = more.partition(":")[0]
    digits = re.match(r"\s*(\d+)", port)
    number = int(digits[1]) if digits else 0
    return HcaToken(name=name, port=number if found and port else None)
