"""What `allreduce-bench` was asked for: from texts to a bench's settings, and all that can be wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.cli.durations import parse_duration
from ddpdoctor.cli.sizes import parse_bandwidth, parse_count, parse_share, parse_size
from ddpdoctor.diagnose.bandwidth import Wanted
from ddpdoctor.diagnose.check_env import now
from ddpdoctor.model.amounts import format_size
from ddpdoctor.model.bandwidth import Collective, Mode, Settings
from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.bandwidth.agreement import AUTO
from ddpdoctor.probes.bandwidth.cases import DTYPES, REDOPS
from ddpdoctor.probes.bandwidth.possible import check_possible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.cli.allreduce_bench import Backend, BenchFormat, ModeChoice
    from ddpdoctor.launch.command.options import FailOn

ALL = "all"
MODES = {"latency": (Mode.LATENCY,), "throughput": (Mode.THROUGHPUT,), "both": (Mode.LATENCY, Mode.THROUGHPUT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line as it was typed."""

    collectives: tuple[str, ...]
    min_size: str
    max_size: str
    factor: int
    dtypes: tuple[str, ...]
    op: str
    mode: ModeChoice
    in_place: bool
    cold: bool
    backend: Backend | None
    nproc: int | None
    budget: str
    iterations: int | None
    warmup: int | None
    pairs: bool
    by_node: bool
    compare: Path | None
    fail_below: str | None
    expect: str | None
    reference: str
    model_size: str | None
    format: BenchFormat
    output: Path | None
    plot: Path | None
    report_dir: Path | None
    fail_on: FailOn
    hang_timeout: str
    timeout: str
    command: tuple[str, ...]


def read_settings(asked: Asked) -> Settings:
    """Return what is to be measured; the backend may be open. Raises ``UserError`` that says what is possible."""
    smallest, largest = parse_size(asked.min_size, "--min-size"), parse_size(asked.max_size, "--max-size")
    if smallest > largest:
        raise UserError(
            f"--min-size {format_size(smallest)} is above --max-size {format_size(largest)}",
            help="Give a smallest size that is not above the largest, or leave one of them out.",
        )
    settings = Settings(
        collectives=_read_collectives(asked.collectives),
        dtypes=_choose(asked.dtypes, DTYPES, "--dtype") or ("float32",),
        redop=_choose((asked.op.lower(),), REDOPS, "--op")[0],
        modes=MODES[asked.mode],
        min_size_bytes=smallest,
        max_size_bytes=largest,
        factor=asked.factor,
        backend=asked.backend or AUTO,
        in_place=asked.in_place,
        cold=asked.cold,
        budget_s=parse_duration(asked.budget, "--budget"),
        iterations=asked.iterations,
        warmup=asked.warmup,
        pairs=asked.pairs,
        by_node=asked.by_node,
        hang_timeout_s=parse_duration(asked.hang_timeout, "--hang-timeout"),
    )
    if asked.backend is not None:
        check_possible(settings)
    return settings


def read_wanted(asked: Asked) -> Wanted:
    """Return what the result is held against, the baseline left out. Raises ``UserError``."""
    if asked.fail_below is not None and asked.compare is None:
        raise UserError("--fail-below needs --compare", help="Give the saved run: --compare report.json")
    return Wanted(
        command=asked.command,
        started_at=now(),
        fail_below=None if asked.fail_below is None else parse_share(asked.fail_below, "--fail-below"),
        expect_gb_s=None if asked.expect is None else parse_bandwidth(asked.expect, "--expect"),
        use_reference=asked.reference == "auto",
        model_size=None if asked.model_size is None else parse_count(asked.model_size, "--model-size"),
    )


def read_timeout(asked: Asked) -> float:
    """Return for how long the slowest rank is waited for, in seconds. Raises ``UserError``."""
    return parse_duration(asked.timeout, "--timeout")


def _read_collectives(given: tuple[str, ...]) -> tuple[Collective, ...]:
    names = [collective.value for collective in Collective]
    chosen = _choose(given, (*names, ALL), "--collective") or (Collective.ALL_REDUCE.value,)
    return tuple(Collective) if ALL in chosen else tuple(Collective(name) for name in chosen)


def _choose(given: tuple[str, ...], possible: Sequence[str] | dict[str, int], option: str) -> tuple[str, ...]:
    """Return the names of repeated options and lists with commas, each once. Raises ``UserError`` for others."""
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    for name in names:
        if name not in possible:
            raise UserError(f"{option} {name} is not known", help=f"Possible: {', '.join(possible)}.")
    if given and not names:
        raise UserError(f"{option} is empty", help=f"Possible: {', '.join(possible)}.")
    return tuple(dict.fromkeys(names))
