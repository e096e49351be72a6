"""Reports on files and data: `check-data`, `check-checkpoint`, `check-consistency`; and the pages of rules."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.diagnose.report import check_report, member_rows
from ddpdoctor.model.data import RankShare, SamplingPlan, Shares, share_out
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import GroupState, Job, Life, Rank
from ddpdoctor.model.findings import JobStatus, JobSummary, now
from ddpdoctor.model.saved import Checkpoints, DiffFacts, ReadState
from ddpdoctor.model.trial import Trial
from ddpdoctor.rules.data.shared import Replicas
from ddpdoctor.rules.registry import all_rules, find_rule, rules_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.data import Drawn, RankDraws
    from ddpdoctor.model.findings import Report
    from ddpdoctor.rules.engine import Facts
    from ddpdoctor.rules.registry import Rule

CLOSENESS = 0.5  # the least similarity, on difflib's scale from 0 to 1, at which a name is suggested for an unknown one
LIST_HINT = "`ddpdoctor explain --list` lists them all."


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePage:
    """The page of a rule. ``text`` is the rule's docstring, in Markdown."""

    code: str
    kind: str
    severity: str
    summary: str
    text: str


def read_pages(rules: Iterable[Rule] = ()) -> tuple[RulePage, ...]:
    """Return the pages of these rules, by default of all in the order of their codes."""
    return tuple(
        RulePage(code=rule.code, kind=rule.kind, severity=rule.severity.value, summary=rule.summary, text=rule.page)
        for rule in rules or all_rules()
    )


def read_page(name: str) -> RulePage:
    """Return the page of a rule by its code or kind. Raises ``UserError`` like ``find_page``."""
    rule = find_rule(name)
    return find_page(name, read_pages()) if rule is None else read_pages([rule])[0]


def read_titles(codes: Iterable[str]) -> dict[str, str]:
    """Return the line for lists of each of these rules, by code. An unknown code is left out."""
    rules = {code: find_rule(code) for code in codes}
    return {code: rule.summary for code, rule in rules.items() if rule is not None}


def find_error(text: str) -> tuple[str, dict[str, str]] | None:
    """Return title and labeled texts of a known error, or None for the name of a rule; else raise ``UserError``."""
    from ddpdoctor.model.known_errors import find_known, read_warning

    text = text.strip()
    if find_rule(text) is not None:
        return None
    known = find_known(text)
    if known is None and (warning := read_warning(text)) is not None and warning.fix:
        return "a warning of NCCL", {"means": warning.words, "to do": warning.fix, "source": _NCCL_SOURCE}
    known = known or find_known(text, loose=True)
    if known is not None:
        return known.shown, {
            "means": known.means, "at fault": known.fault, "to do": known.fix, "source": known.source,
        }  # fmt: skip
    if " " in text or text.endswith(("Error", "Exception")):
        raise UserError(
            f"no known error found in this text: {text[:80]}",
            help="`ddpdoctor analyze FILE` reads a whole log, whatever the error is, and names the rank that failed "
            "first; FILE is a log, a folder of logs, or - for standard input.",
        )
    return None


_NCCL_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"


def find_page(name: str, pages: tuple[RulePage, ...]) -> RulePage:
    """Find a page by code or kind, ignoring case. Raises ``UserError`` with near matches if there is none."""
    by_name = {key.lower(): page for page in pages for key in (page.kind, page.code)}
    page = by_name.get(name.lower())
    if page is not None:
        return page
    near = difflib.get_close_matches(name.lower(), by_name, cutoff=CLOSENESS)
    offers = ", ".join(f"{by_name[match].code} ({by_name[match].kind})" for match in near)
    hint = f"Did you mean {offers}? " if offers else ""
    raise UserError(f"unknown rule: {name}", help=hint + LIST_HINT)


def check_codes(given: tuple[str, ...]) -> tuple[str, ...]:
    """Split comma-separated codes and return them in upper case. Raises ``UserError`` for an unknown code."""
    codes = tuple(code.strip().upper() for entry in given for code in entry.split(",") if code.strip())
    for code in codes:
        rule = find_rule(code)
        if rule is None or rule.code != code:
            raise UserError(f"--ignore: unknown code {code}", help=LIST_HINT)
    return codes


DATA_VERB = "check-data"


def plan_report(plan: SamplingPlan, command: tuple[str, ...]) -> Report:
    started_at = now()
    shares = share_out(plan)
    data = {"verb": DATA_VERB, "shares": shares}
    return check_report(rules_of("data"), {Shares: [shares]}, data, command, started_at)


def drawn_report(
    drawn: Drawn, ranks: Sequence[RankDraws], command: tuple[str, ...], started_at: str, accumulation: int
) -> Report:
    # For the rules, the loop trains and may hang.
    replicas = Replicas(
        loaders={rank.rank: (rank.loader,) for rank in ranks if rank.loader is not None},
        size=drawn.world_size,
        world_size=drawn.world_size,
        hosts={rank.rank: rank.host for rank in ranks},
        trained_only=False,
        ended_badly=True,
        drawn=drawn,
    )
    facts: Facts = {Replicas: [replicas]}
    rows = drawn.passes[0].ranks if drawn.passes else ()
    if drawn.batch_size is not None and drawn.passes and all(row.complete for row in rows):
        # The first pass in the form of the arithmetic
        size, batch, samples = drawn.world_size, drawn.batch_size, drawn.samples or sum(row.drawn for row in rows)
        plan = SamplingPlan(samples=samples, world_size=size, batch_size=batch, accumulation=accumulation)
        shares = tuple(
            RankShare(
                rank=row.rank,
                drawn=row.drawn,
                repeated=row.repeated or 0,
                batches=row.batches,
                last_batch=row.last_batch,
                delivered=row.drawn,
            )
            for row in rows
        )
        delivered = sum(row.drawn for row in rows)
        facts = {**facts, Shares: [Shares(plan=plan, ranks=shares, delivered=delivered, unique=drawn.passes[0].unique)]}
    data = {"verb": DATA_VERB, "drawn": drawn}
    return check_report(rules_of("data"), facts, data, command, started_at)


CHECKPOINT_VERB = "check-checkpoint"


def checkpoint_report(seen: Checkpoints, command: tuple[str, ...], started_at: str) -> Report:
    files = []
    for file in seen.files:  # without digests, and without the list of its tensors
        contents = file.contents
        weights = () if contents is None else contents.weights
        files.append({
            "path": file.path,
            "size_bytes": file.size_bytes,
            "form": file.form.value,
            "state": "damaged" if file.damaged and file.state is ReadState.WHOLE else file.state.value,
            "checksums": file.checksums.value,
            "tensors": None if contents is None else len(contents.tensors),
            "parts": [] if contents is None else [part.value for part in contents.parts],
            "weights": [{"key": each.where, "tensors": len(each.tensors)} for each in weights],
            "values_looked_at": file.values is not None,
            "not_finite": None if file.values is None else len(file.values),
        })  # fmt: skip
    data = {"verb": CHECKPOINT_VERB, "files": files}
    return check_report(rules_of("checkpoints"), {Checkpoints: [seen]}, data, command, started_at)


CONSISTENCY_VERB = "check-consistency"


def build_report(trial: Trial, command: tuple[str, ...], started_at: str) -> Report:
    hosts = list(dict.fromkeys(participant.host for participant in trial.participants))
    world_size = len(trial.participants)
    did: dict[str, Any] = {"state": "model built"}
    if trial.consistency is not None:
        did = {"state": "finished", "step": trial.settings.steps}
    same: Any = len({model.digest for model in trial.models}) == 1
    # The trial as a running job, so that the rules for jobs can judge its models and replicas
    everybody = tuple(participant.rank for participant in trial.participants)
    ranks = tuple(
        Rank(
            rank=participant.rank,
            local_rank=participant.local_rank,
            host=participant.host,
            pid=participant.pid,
            attempt=0,
            life=Life.RUNNING,
            recorded=True,
            world_size=world_size,
            initialized=True,
            groups=(GroupState(name=model.group, ranks=everybody, backend="", enqueued=0),),
            models=(model,),
        )
        for participant, model in zip(trial.participants, trial.models, strict=True)
    )
    job = Job(
        now_ns=0,
        hang_timeout_s=trial.settings.limit_s,
        ranks=ranks,
        world_size=world_size,
        nnodes=len(hosts),
        local_ranks_expected=None,
        ended=False,
        consistency=trial.consistency,
    )
    return check_report(
        rules_of("consistency"),
        {Job: [job], Trial: [trial]},
        {
            "verb": CONSISTENCY_VERB,
            "world_size": world_size,
            "hosts": hosts,
            "trial": replace(trial, models=trial.models[:1]) if same else trial,
        },
        command,
        started_at,
        job=JobSummary(world_size=world_size, nnodes=len(hosts), status=JobStatus.FINISHED, exit_status=None),
        ranks=member_rows(trial.participants, lambda _: did),
    )


def build_diff_report(facts: DiffFacts, command: tuple[str, ...], started_at: str) -> Report:
    data = {"verb": CONSISTENCY_VERB, "diff": facts}
    return check_report(rules_of("consistency"), {DiffFacts: [facts]}, data, command, started_at)
