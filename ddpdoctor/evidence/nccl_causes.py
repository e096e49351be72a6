"""Turns warnings of NCCL into facts. They stand in NCCL's log, or after "Last error:" in an error of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import Failed, Hint, Link, Nature, Trouble, Who
from ddpdoctor.model.known_errors import find_known
from ddpdoctor.model.nccl_warnings import Accused, read_warning

if TYPE_CHECKING:
    from ddpdoctor.model.evidence import Fact
    from ddpdoctor.model.nccl_warnings import NcclWarning


def warned(text: str, place: str | None, common: dict[str, Any]) -> Fact:
    """Return the fact that a warning reports. ``common``: who, spot, time and said of the fact."""
    warning = read_warning(text)
    known = find_known(text) if warning is None else None
    if known is not None and known.nature == "own":
        return Failed(type="NCCL", message=text, nature=Nature.OWN, alone=True, **common)
    if warning is None or warning.accused is Accused.NOBODY:
        words = quote(f"NCCL warns{f' ({place})' if place else ''}: {text}") if warning is None else warning.words
        return Hint(words=words, kind="nccl-warning", **common)
    return _fact(warning, text, common)


def last_error(message: str) -> str:
    """Return NCCL's message at the end of an error of torch, or an empty string."""
    return message.partition("Last error:")[2].strip()


def named_cause(text: str, common: dict[str, Any]) -> Fact | None:
    """Return the cause outside the writing process that NCCL's message names, or None."""
    warning = read_warning(text) if text else None
    if warning is None or warning.accused in {Accused.NOBODY, Accused.PROCESS, Accused.PEER}:
        return None
    return _fact(warning, text, common)


def _fact(warning: NcclWarning, text: str, common: dict[str, Any]) -> Fact:
    if warning.accused is Accused.PROCESS:
        memory = warning.kind == "memory"
        message = "out of memory" if memory else warning.named.get("error", warning.words)
        return Failed(type="CUDA error", message=message, nature=Nature.OWN, memory=memory, **common)
    fix = warning.fix or (known.fix if (known := find_known(text)) is not None else "")
    if warning.accused is Accused.START:
        ranks = tuple(int(warning.named[name]) for name in ("rank", "other") if name in warning.named)
        return Trouble(kind=warning.kind, problem=warning.words, fix=fix, ranks=ranks, **common)
    return link_of(replace(warning, fix=fix), common)


def link_of(warning: NcclWarning, common: dict[str, Any]) -> Link:
    """Return the connection that a warning is about."""
    named = warning.named
    local_rank = int(named["local_rank"]) if "local_rank" in named else None
    host = common["who"].host if local_rank is not None else named.get("host", "")
    return Link(
        to=Who(host=host, address=named.get("address", ""), local_rank=local_rank), problem=warning.words,
        fix=warning.fix, victim=warning.accused is Accused.PEER, local=warning.accused is Accused.HOST, **common,
    )  # fmt: skip
