"""Makes nodes and fleets for tables, and asks one rule by its kind, as the engine does."""

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.node import Fleet, Launcher, Node, NodeProcess
from ddpdoctor.rules.engine import fleet_facts, judge
from ddpdoctor.rules.registry import rules_of


def process(rank=None, *, local_rank=None, pid=100, cpus=(0, 1), other_names=(), under_wrap=False, **variables):
    return NodeProcess(
        rank=rank, local_rank=rank if local_rank is None else local_rank, pid=pid, variables=variables,
        other_names=tuple(other_names), cpus=tuple(cpus), under_wrap=under_wrap,
    )  # fmt: skip


def node(host="node0", *, processes=(), index=0, **sections):
    return Node(host=host, index=index, processes=tuple(processes) or (process(),), **sections)


def fleet(*nodes, launcher=Launcher.NONE, world_size=None, nnodes=None, missing=()):
    return Fleet(nodes=nodes, launcher=launcher, world_size=world_size, nnodes=nnodes, missing=tuple(missing))


def judge_fleet(facts, rules):
    return judge(rules, fleet_facts(facts))


def ask(kind, facts):
    """Return the check and the findings of one rule; ``facts`` is a node or a fleet."""
    (rule,) = [rule for rule in rules_of("environment") if rule.kind == kind]
    judged = judge_fleet(facts if isinstance(facts, Fleet) else fleet(facts), [rule])
    (check,) = judged.checks
    assert check.outcome is not Outcome.CRASHED, check.reason
    return check, judged.findings


def failed(*severities):
    """Return how a check comes out that found problems of these severities: with notes alone it has passed."""
    return Outcome.PASSED if set(severities) == {Severity.INFO} else Outcome.FAILED
