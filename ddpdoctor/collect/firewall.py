"""Reads which chains of the kernel's packet filter refuse incoming packets, and which exceptions they accept.

firewalld and ufw also write such chains, whose names show who wrote them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.model.node import FirewallChain
from ddpdoctor.model.reading import Unread, Why

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.collect.system import System

    Tables = dict[str, dict[str, "_Chain"]]


LIMIT_S = 2.0
MAX_ACCEPTS = 20  # how many accepting rules of a chain we keep, which is enough to judge it
NFT, IPTABLES = ("nft", "list", "ruleset"), ("iptables-save",)
_COUNTER = re.compile(
    r'\bcounter packets \d+ bytes \d+ ?|\b(comment|prefix) "[^"]*" ?|\blog( (level|flags|group) \S+)* ?'
)
_CHAIN = re.compile(r"chain (\S+) \{$")
_TABLE = re.compile(r"table (\S+ \S+) \{$")
_POLICY = re.compile(r"\bpolicy (\w+);")
_JUMP = re.compile(r"(?:\bjump|\bgoto|-j|-g) ([^\s,};]+)")
_ACCEPT = re.compile(r"(?:^|\s)accept$|-j ACCEPT$")
_REFUSES = re.compile(r"(?:drop|reject(?: with .*)?|(?:-j (?:DROP|REJECT)(?: --reject-with \S+)?))$")
# Marks of rules that accept no new connections from other hosts: loopback, replies, ICMP.
_NOT_NEW = re.compile(
    r'iif(?:name)? "lo"|-i lo\b|icmp|ct status|ct state (?!\{? ?(?:\w+,)*new)|--(?:ct)?state (?!(?:\w+,)*NEW)'
)


@dataclass
class _Chain:
    """A chain while it is parsed."""

    incoming: bool = False
    policy: str = ""
    rules: list[str] = field(default_factory=list)


def read_firewall(system: System) -> tuple[FirewallChain, ...] | Unread:
    """Return the chains that refuse incoming packets, from nft and iptables-save, or why we cannot list the rules."""
    commands = {command[0]: partial(system.calls.run, command, LIMIT_S) for command in (NFT, IPTABLES)}
    replies = ask_side_by_side(commands, LIMIT_S + 0.5)  # the command's own limit ends it first
    done = {name: reply.value.out for name, reply in replies.items() if reply.value and reply.value.status == 0}
    if not done:
        if all(isinstance(reply.error, FileNotFoundError) for reply in replies.values()):
            return Unread(why=Why.ABSENT, reason="neither nft nor iptables-save is installed")
        return Unread(why=Why.DENIED, reason="to list the packet filter's rules needs root")
    iptables = tuple(_refusing("iptables", _parse_iptables(done.get("iptables-save", ""))))
    # Tables of chains from the output of nft list ruleset
    text = done.get("nft", "")
    tables: Tables = {}
    chains: dict[str, _Chain] = {}
    chain: _Chain | None = None
    for line in _joined(text):
        table, start = _TABLE.match(line), _CHAIN.match(line)
        if table:
            chains = tables.setdefault(table[1], {})
        elif start:
            chain = chains.setdefault(start[1], _Chain())
        elif line == "}":
            chain = None
        elif chain is not None and line.startswith("type "):
            policy = _POLICY.search(line)
            chain.incoming, chain.policy = " hook input " in line, policy[1] if policy else ""
        elif chain is not None:
            chain.rules.append(_COUNTER.sub("", line).strip())
    nft = _refusing("nft", tables)
    return (*iptables, *(chain for chain in nft if not (iptables and chain.name == "nft ip filter INPUT")))


def _refusing(tool: str, tables: Tables) -> Iterator[FirewallChain]:
    for table, chains in tables.items():
        manager = "ufw" if any(name.startswith("ufw-") for name in chains) else ""
        if "firewalld" in table or "INPUT_ZONES" in chains:
            manager = "firewalld"
        for name, chain in chains.items():
            last = chain.rules[-1] if chain.rules else ""
            refusal = f"last rule: {last}" if _REFUSES.match(last) else ""
            if chain.policy in {"drop", "reject"}:
                refusal = f"policy {chain.policy}"
            if chain.incoming and refusal:
                rules = _reached(chains, name)
                accepts = tuple(rule for rule in rules if _ACCEPT.search(rule) and not _NOT_NEW.search(rule))
                yield FirewallChain(
                    name=f"{tool} {table} {name}", refusal=refusal, accepts=accepts[:MAX_ACCEPTS], manager=manager
                )


def _reached(chains: dict[str, _Chain], first: str) -> Iterator[str]:
    """Yield the rules of a chain and of all chains that it can jump to."""
    todo, seen = [first], {first}
    while todo:
        for rule in chains[todo.pop(0)].rules:
            yield rule
            for name in _JUMP.findall(rule):
                if name in chains and name not in seen:
                    seen.add(name)
                    todo.append(name)


def _joined(text: str) -> Iterator[str]:
    """Yield lines without indentation; a list in braces over several lines becomes one line, and sets are left out."""
    line = ""
    for part in text.splitlines():
        line = f"{line} {part.strip()}".strip()
        opens = line.endswith("{") and _TABLE.match(line) is None and _CHAIN.match(line) is None
        if line.count("{") > line.count("}") and (opens or not line.endswith("{")):
            continue
        if line and not line.startswith(("set ", "map ", "flowtable ", "ct helper ")):
            yield line
        line = ""


def _parse_iptables(text: str) -> Tables:
    """Return the filter table's chains from the output of iptables-save."""
    chains: dict[str, _Chain] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif table == "filter" and line.startswith(":"):
            name, policy, *_ = [*line[1:].split(), "-"]
            chains[name] = _Chain(incoming=name == "INPUT", policy=policy.lower())
        elif table == "filter" and line.startswith("-A "):
            _, name, rule = [*line.split(" ", 2), ""][:3]
            chains.setdefault(name, _Chain()).rules.append(rule)
    return {"filter": chains}
