"""DD211 and DD212: whether the interfaces that variables name exist, and whether those in use can carry data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import need
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped, unknown
from ddpdoctor.rules.environment.processes import ranks_of
from ddpdoctor.rules.interface_choice import best_interface, choose, export, is_ignored, parse_gloo_names
from ddpdoctor.rules.nccl_list import MARKS, parse_nccl_list
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.settings import find_setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.network import Interface, Network
    from ddpdoctor.model.node import Node, NodeProcess
    from ddpdoctor.rules.settings import Setting

NCCL, GLOO, TENSORPIPE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
EXACT = (GLOO, TENSORPIPE)


@rule(
    "DD211", "ifname-exists", Severity.ERROR, "A variable names a network interface that does not exist",
    after=("hostname-unresolvable",),
    group=CheckGroup.NETWORK, needs=("network", "conf_files"),
    reads="NCCL_SOCKET_IFNAME (also in NCCL's files), GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME, /sys/class/net",
)  # fmt: skip
def check_ifname_exists(node: Node) -> Answer:
    """Report interface variables that match no interface of this machine."""
    network = need(node.network)
    if not network.interfaces:
        return unknown("the interfaces of this machine could not be read")
    found = list(_settings(node))
    if not found:
        return skipped("none of NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME is set")
    problems = [problem for process, setting in found for problem in _judge(network, process, setting)]
    there = ", ".join(one.name for one in network.interfaces)
    return judged(problems, f"{', '.join(dict.fromkeys(str(one) for _, one in found))}; there are {there}")


def _settings(node: Node) -> Iterator[tuple[NodeProcess, Setting]]:
    """Yield the settings of a node's processes, each value once."""
    seen = set()
    for process in node.processes:
        for name in (NCCL, GLOO, TENSORPIPE):
            setting = find_setting(node, process, name)
            if setting is not None and not is_ignored(setting.value) and setting not in seen:
                if name in EXACT and setting.path is not None:
                    continue  # only NCCL reads those files
                seen.add(setting)
                yield process, setting


def _judge(network: Network, process: NodeProcess, setting: Setting) -> Iterator[Problem]:
    if setting.name == NCCL:
        yield from _judge_nccl(network, process, setting)
        return
    names = parse_gloo_names(setting.value) if setting.name == GLOO else (setting.value,)
    there = {one.name for one in network.interfaces}
    wrong = [name for name in names if name not in there]
    if wrong:
        yield Problem(
            summary=f"{setting.name}={setting.value}: {_why_not(wrong[0], setting, there)}",
            evidence=(f"interfaces: {', '.join(one.name for one in network.interfaces)}",),
            fix=export(setting.name, network),
            ranks=ranks_of([process]),
        )


def _why_not(name: str, setting: Setting, there: set[str]) -> str:
    """Say why Gloo or TensorPipe cannot use a name."""
    library = "Gloo" if setting.name == GLOO else "TensorPipe"
    if name[:1] and name[0] in MARKS:
        return f"{name[0]} is NCCL syntax, but {library} reads it as part of the name"
    if not name.strip():
        return "the list has an empty name"
    if name.strip() in there:
        return f"{library} reads the space as part of the name"
    if setting.name == TENSORPIPE and "," in name:
        return "TensorPipe accepts one name, not a list"
    longer = sorted(one for one in there if one.startswith(name))
    if longer:
        return f"{library} needs the full name, and {name} is only a prefix of {longer[0]}"
    return f"there is no interface {name}"


def _judge_nccl(network: Network, process: NodeProcess, setting: Setting) -> Iterator[Problem]:
    wanted = parse_nccl_list(setting.value)
    fitting = [one.name for one in network.interfaces if wanted.takes(one.name)]
    evidence = (f"interfaces: {', '.join(one.name for one in network.interfaces)}",)
    if not fitting:
        what = "it excludes every interface" if wanted.exclude else "no interface has such a name"
        yield Problem(
            summary=f'{setting}: {what}, so NCCL fails with "no socket interface found"',
            evidence=evidence,
            fix=_nccl_fix(network, setting),
            ranks=ranks_of([process]),
            kind=setting.kind,
        )
    elif wanted.marked:
        yield Problem(
            summary=(
                f"{setting}: NCCL reads ^ and = only before the first name, so {wanted.marked[0]} is read as a name"
            ),
            evidence=(*evidence, f"it currently matches: {', '.join(fitting)}"),
            fix=f"export {NCCL}={_with_marks_once(setting.value)}",
            severity=Severity.WARNING,
            ranks=ranks_of([process]),
            kind=setting.kind,
        )


def _with_marks_once(text: str) -> str:
    """Return "^docker0,lo" for "^docker0,^lo"."""
    first, *others = text.split(",")
    return ",".join([first, *(other.lstrip(MARKS) for other in others)])


def _nccl_fix(network: Network, setting: Setting) -> str:
    best = best_interface(network) or "INTERFACE"
    return f"put {NCCL}={best} into {setting.path}" if setting.path else f"export {NCCL}={best}"


@rule(
    "DD212", "iface-up", Severity.ERROR, "An interface that NCCL or Gloo would use is down or has no address",
    after=("ifname-exists",),
    group=CheckGroup.NETWORK, needs=("network", "names", "conf_files"),
    reads=(
        "flags, operstate and carrier in /sys/class/net, addresses, the host name's address, variables of NCCL and "
        "Gloo"
    ),
)  # fmt: skip
def check_iface_up(node: Node) -> Answer:
    """Report interfaces that the libraries would use, or are set to use, but that cannot carry data."""
    network = need(node.network)
    if not network.interfaces:
        return unknown("the interfaces of this machine could not be read")
    choice = choose(node, network)
    problems = [*_nccl_down(node, network, others=bool(choice.nccl)), *_gloo_down(node, network)]
    if not _text(node, GLOO):
        idle = [pick.interface for pick in choice.gloo or () if not pick.interface.running]
        problems += [_down("Gloo", one, network, "the host name's address is on it") for one in idle]
    return judged(problems, str(choice))


def _text(node: Node, name: str) -> str:
    setting = find_setting(node, node.first, name)
    return "" if setting is None or is_ignored(setting.value) else setting.value


def _gloo_down(node: Node, network: Network) -> Iterator[Problem]:
    by_name = {one.name: one for one in network.interfaces}
    named = [by_name[name] for name in parse_gloo_names(_text(node, GLOO)) if name in by_name]
    for interface in named:
        if not interface.addresses or not interface.running:
            yield _down("Gloo", interface, network, f"{GLOO}={_text(node, GLOO)}")


def _nccl_down(node: Node, network: Network, *, others: bool) -> Iterator[Problem]:
    """Yield unusable interfaces that NCCL_SOCKET_IFNAME names in full, or all that match if no usable one is left."""
    wanted = parse_nccl_list(_text(node, NCCL))
    if wanted.exclude or not wanted.entries:
        return
    fitting = [one for one in network.interfaces if wanted.takes(one.name)]
    unusable = [one for one in fitting if not one.addresses or not one.running]
    named = [one for one in unusable if wanted.names(one.name)] if others else unusable
    for interface in named:
        yield _down(
            "NCCL", interface, network, f"{NCCL}={_text(node, NCCL)}", severity=Severity.WARNING if others else None
        )


def _down(
    library: str, interface: Interface, network: Network, why: str, *, severity: Severity | None = None
) -> Problem:
    state = _state(interface)
    name = interface.name
    others = best_interface(network)
    variable = NCCL if library == "NCCL" else GLOO
    mend = f"ip link set dev {name} up" if not interface.up else f"ip address show dev {name}"
    return Problem(
        summary=f"{library} would use {name}, which {state}",
        evidence=(f"{name}: {_facts(interface)}", why),
        fix=mend + (f", or export {variable}={others}" if others not in {None, name} else ""),
        severity=severity,
    )


def _state(interface: Interface) -> str:
    if not interface.up:
        return "is down"
    if interface.carrier is False or not interface.running:
        return "has no link"
    return "has no address"


def _facts(interface: Interface) -> str:
    carrier = {True: "carrier", False: "no carrier", None: "unknown carrier"}[interface.carrier]
    addresses = ", ".join(interface.addresses) or "no address"
    return f"{'up' if interface.up else 'down'}, state {interface.operstate}, {carrier}, {addresses}"
