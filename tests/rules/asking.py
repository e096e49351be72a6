"""Asks rules as the verbs do: facts in, findings and checks out."""

from ddpdoctor.rules.engine import judge
from ddpdoctor.rules.registry import find_rule, rules_of


def judge_about(family, *facts):
    """Ask all rules of a family about these facts."""
    return judge(rules_of(family), {type(one): [one] for one in facts})


def ask(name, *facts):
    """Ask one rule, by its code or kind; without facts there is nothing to ask it about."""
    return judge([find_rule(name)], {type(one): [one] for one in facts})


def asking(name):
    """Return a function that asks one rule about the facts that it is given."""
    return lambda *facts: ask(name, *facts)
