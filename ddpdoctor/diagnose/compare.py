"""Compares two runs: the time of a step in each, and what differs."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.diagnose.report import make_report
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Severity, now
from ddpdoctor.model.steps import Budget, SpeedSettings
from ddpdoctor.model.tuning import (
    ComparedRun,
    RunDifference,
    RunDifferences,
    RunSpeed,
    SpeedComparison,
    Topic,
    UnequalSetting,
)
from ddpdoctor.model.words import format_size
from ddpdoctor.rules.speed.comparing import compare_phases, compare_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.findings import Report

    Kind = TypeVar("Kind")

UNSET = "not set"
# By field of ``SpeedSettings``: its name in the report.
SETTINGS = {
    "rows": "rows of a rank's batch",
    "reductions": "reductions per step",
    "threads": "torch threads per rank",
    "cores": "cores",
    "workers": "loader workers per rank",
    "gradient_bytes": "gradients",
    "buckets": "buckets",
    "bucket_cap_bytes": "bucket_cap_mb",
    "finds_unused": "find_unused_parameters",
    "static_graph": "static_graph",
    "bucket_view": "gradient_as_bucket_view",
    "syncs_buffers": "broadcast_buffers",
}
_MIB = 2**20


def compare_reports(first: tuple[str, Report], second: tuple[str, Report]) -> Report:
    """Return the report that compares two named runs. Raises ``UserError`` if one of them has no time budget."""
    budgets = [_read_budget(name, report) for name, report in (first, second)]
    sides = [dict(settings_of_run(report)) for _, report in (first, second)]
    unequal = []
    for name in dict.fromkeys((*sides[0], *sides[1])):
        a, b = (side.get(name, UNSET) for side in sides)
        if a != b and (name in sides[0]) + (name in sides[1]) >= (1 if name.isupper() else 2):
            unequal.append(UnequalSetting(name=name, first=a, second=b))
    speeds = [_run_speed(*side, budget) for side, budget in zip((first, second), budgets, strict=True)]
    step, phases = compare_steps(*budgets), compare_phases(*budgets)
    comparison = SpeedComparison(first=speeds[0], second=speeds[1], step=step, phases=phases, unequal=tuple(unequal))
    command = ("ddpdoctor", "report", first[0], "--compare", second[0])
    return make_report(command=command, started_at=now(), findings=(), checks=(), data={"comparison": comparison})


def _read_budget(name: str, report: Report) -> Budget:
    said = report.data.get("speed")
    if report.job is None or not isinstance(said, dict):
        raise UserError(
            f"{name} has no training steps: it is not a run of `ddpdoctor wrap`",
            help="Compare two run folders that `ddpdoctor wrap` wrote.",
        )
    if said.get("budget") is None:
        raise UserError(
            f"{name} has no time budget: {said.get('reason', 'its report has no reason')}",
            help="Compare runs that were recorded for at least 20 training steps.",
        )
    budget = _decoded(Budget, name, said["budget"])
    if not budget.blocks_ms or not budget.wall_ms or not all(row.blocks_ms for row in budget.phases):
        raise UserError(
            f"{name} has no variation of its steps, so a difference cannot be told from noise",
            help="In a run folder, remove report.json: the budget is then made from what the ranks recorded.",
        )
    return budget


def _decoded(kind: type[Kind], name: str, plain: Any) -> Kind:
    try:
        return decode(kind, plain)
    except (WrongValue, TypeError) as error:
        raise UserError(f"{name}: the time budget in the report cannot be read: {error}") from error


def _run_speed(name: str, report: Report, budget: Budget) -> RunSpeed:
    assert report.job is not None
    return RunSpeed(
        name=name,
        wall_ms=budget.wall_ms,
        count=budget.count,
        status=report.job.status.value,
        ranks=report.job.world_size,
        samples_per_s=budget.samples_per_s,
        command=shlex.join(("ddpdoctor", *report.command[1:])) if report.command else "",
    )


def settings_of_run(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the settings in a report, by name. Raises ``UserError`` if they are damaged."""
    run = report.data.get("run") or {}
    job = report.job
    known = {
        "ranks": job and job.world_size,
        "nodes": job and job.nnodes,
        "torch": run.get("torch_version"),
        "TORCH_DISTRIBUTED_DEBUG": run.get("debug_level"),
    }
    yield from ((name, str(value)) for name, value in known.items() if value is not None)
    yield from ((str(name), str(value)) for name, value in (run.get("environment") or {}).items())
    plain = (report.data.get("speed") or {}).get("settings")
    if plain is not None:
        settings = _decoded(SpeedSettings, "the settings", plain)
        for field in fields(settings):
            if (value := getattr(settings, field.name)) is not None:
                if isinstance(value, bool):
                    words = str(value)
                elif field.name == "gradient_bytes":
                    words = format_size(int(value))
                else:
                    words = f"{value / _MIB:g}" if field.name == "bucket_cap_bytes" else f"{value:g}"
                yield SETTINGS[field.name], words


LEAST_CHANGE = 0.10  # our choice: medians of two healthy runs differ by a few percent, and bandwidths by up to ten
# Keys of a node's facts that are versions.
VERSIONS = frozenset({
    "torch_version", "version", "nccl", "nccl_loaded", "cuda", "python", "driver", "kernel", "ofed", "image",
})  # fmt: skip
# Keys of a node's facts that differ between any two runs, or name the node.
VOLATILE = frozenset({
    "age_s", "available", "available_bytes", "boot_id", "clock", "free", "free_bytes", "host", "index", "inode",
    "kernel_log", "load", "memory_available_bytes", "names", "offset_s", "pid", "port", "power_w", "processes", "rank",
    "ranks", "stuck_processes", "temperature_c", "time_ns", "uptime_s", "used", "used_bytes", "user_processes",
    "utilization", "uuid",
})  # fmt: skip
ONE_SIDED = frozenset({Topic.VERDICT, Topic.VARIABLE})  # topics in which a side without a value is itself a difference
# Options that change nothing in a run.
OUTPUTS = frozenset({"--master-port", "--report-dir", "--output", "-o", "--plot", "--html", "--format"})
COMMAND = (Topic.SETTING, "command line")
MAX_TEXT = 1000


def diff_reports(first: tuple[str, Report], second: tuple[str, Report]) -> Report:
    sides = [dict(_facts(replace(report, data=encode(report.data)))) for _, report in (first, second)]
    topics = [{topic for topic, _ in side} for side in sides]
    differences = []
    # Another script tells more than all else, but other options less than what they change. What only makes a library
    # print more is never the cause, and the pace is a symptom.
    scripts = [{word for word in str(side.get(COMMAND)).split() if word.endswith(".py")} for side in sides]
    order = {topic: at for at, topic in enumerate(Topic)}
    keys = sorted({**sides[0], **sides[1]}, key=lambda key: (order[key[0]], key == COMMAND))
    keys.sort(key=lambda key: key[0] is Topic.PACE or "DEBUG" in key[1])
    keys.sort(key=lambda key: (key[0] is not Topic.VERDICT, key != COMMAND or scripts[0] == scripts[1]))
    for key in keys:
        topic, name = key
        a, b = (side.get(key) for side in sides)
        in_both = all(key in side for side in sides)
        if isinstance(a, float) and isinstance(b, float):  # measured numbers must differ by more than the noise
            differ = abs(a - b) > LEAST_CHANGE * max(abs(a), abs(b))
        else:
            differ = bool(a != b)
        if differ if in_both and topic is not Topic.VERDICT else not in_both and topic in ONE_SIDED:
            differences.append(RunDifference(topic=topic, name=name, first=_value_words(a), second=_value_words(b)))
    found = RunDifferences(
        first=_compared_run(*first),
        second=_compared_run(*second),
        differences=tuple(differences),
        compared=_names(topics[0] & topics[1]),
        not_compared=_names((topics[0] ^ topics[1]) - ONE_SIDED),
    )
    return make_report(
        command=("ddpdoctor", "diff", first[0], second[0]), started_at=now(), findings=(), checks=(),
        data={"run_differences": found},
    )  # fmt: skip


def _names(topics: set[Topic]) -> tuple[str, ...]:
    return tuple(topic.value for topic in Topic if topic in topics)


def _compared_run(name: str, report: Report) -> ComparedRun:
    verdict = report.verdict
    ended = report.job.status.value if report.job is not None else ""
    said = f"{verdict.code} {verdict.kind}" if verdict is not None else "no problem found"
    command = shlex.join(("ddpdoctor", *report.command[1:])) if report.command else ""
    return ComparedRun(name=name, ended=", ".join(filter(None, (ended, said))), command=command)


def _value_words(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _facts(report: Report) -> Iterator[tuple[tuple[Topic, str], Any]]:
    for finding in report.findings:
        if finding.severity is not Severity.INFO:
            yield (Topic.VERDICT, f"{finding.code} {finding.kind}"), finding.summary
    if report.command:
        words = []
        rest = iter(report.command[1:])
        for word in rest:
            name, has_value, _ = word.partition("=")
            if name not in OUTPUTS:
                words.append(word)
            elif not has_value:
                next(rest, "")
        yield COMMAND, shlex.join(words)
    for name, value in settings_of_run(report):
        topic = Topic.VERSION if name == "torch" else Topic.VARIABLE if name.isupper() else Topic.SETTING
        yield (topic, name), value
    yield from _machine_facts(report)
    consistency = report.data.get("consistency")
    streams = consistency.get("streams") or () if isinstance(consistency, dict) else ()
    counts: dict[int, int] = {}
    for stream in streams:
        if stream.get("model") and "parameter" in stream.get("kinds", ()) and stream.get("clock") == "end":
            counts[stream["model"]] = stream.get("tensors", 0)
    yield from (((Topic.MODEL, f"tensors of model {number}"), count) for number, count in counts.items())
    for key in ("shares", "drawn"):
        part = report.data.get(key)
        if isinstance(part, dict):
            yield from (((Topic.DATA, name), value) for name, value in part.items() if isinstance(value, (int, str)))
    yield from _measured_facts(report)


def _machine_facts(report: Report) -> Iterator[tuple[tuple[Topic, str], Any]]:
    hosts = sorted({row.host for row in report.ranks}) or [str(host) for host in report.data.get("hosts") or ()]
    if hosts:
        yield (Topic.MACHINE, "hosts"), ", ".join(hosts)
    nodes = report.data.get("nodes") or ()
    for number, node in enumerate(node for node in nodes if isinstance(node, dict)):
        prefix = f"node {number}: " if len(nodes) > 1 else ""
        for name, value in _flat(node):
            topic = Topic.VERSION if name.rpartition(".")[2] in VERSIONS else Topic.MACHINE
            yield (topic, f"{prefix}{name}"), value
        processes = node.get("processes") or ()
        for name, value in (processes[0].get("variables") or {}).items() if processes else ():
            yield (Topic.VARIABLE, f"{prefix}{name}"), value


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested facts that may be compared, with dotted names."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in VOLATILE:
                yield from _flat(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        if all(not isinstance(item, (dict, list)) for item in value):
            yield name, ", ".join(map(str, value))
        else:
            yield f"{name}.count", len(value)
            for number, item in enumerate(value):
                yield from _flat(item, f"{name}[{number}]")
    elif value is not None:
        yield name, value


def _measured_facts(report: Report) -> Iterator[tuple[tuple[Topic, str], Any]]:
    for curve in report.data.get("curves") or ():
        if isinstance(curve, dict) and isinstance(curve.get("plateau_gb_s"), float):
            yield (Topic.BANDWIDTH, f"{curve.get('collective', 'collective')} in GB/s"), curve["plateau_gb_s"]

    rows = [row for row in report.data.get("steps") or () if isinstance(row, dict)]
    for name, key in (("step in ms", "step_ms"), ("waiting in a step in ms", "waited_ms")):
        values = [float(row[key]) for row in rows if isinstance(row.get(key), (int, float))]
        if values:
            yield (Topic.PACE, name), median(values)
    speed = report.data.get("speed")
    budget = speed.get("budget") if isinstance(speed, dict) else None
    for phase in (budget or {}).get("phases") or ():
        if isinstance(phase, dict) and isinstance(phase.get("critical_ms"), float):
            yield (Topic.PACE, f"{phase.get('phase')} in ms"), phase["critical_ms"]
