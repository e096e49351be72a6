"""Known errors: real messages of torch and Python are distinguished, those of other code are left alone."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpdoctor.logs.lines import condense
from ddpdoctor.model.known_errors import FAULTS, find_known, read_known_errors
from tests.golden import words

DATA = Path(__file__).parents[1] / "data"


def raised(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of whatever type
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it did not raise")


def env_init():
    held = {name: os.environ.pop(name, None) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    try:
        dist.init_process_group("gloo")
    finally:
        os.environ.update({name: value for name, value in held.items() if value is not None})


def taken_port():
    first = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.TCPStore("127.0.0.1", first.port, 1, is_master=True, wait_for_workers=False)


def changed_in_place():
    weight = torch.ones(2, requires_grad=True)
    held = torch.ones(2)
    product = weight * held
    held.add_(1)
    product.sum().backward()


def other_sizes():
    torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 2).state_dict())


def prefixed():
    model = torch.nn.Linear(2, 2)
    model.load_state_dict({f"module.{name}": tensor for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (env_init, "environment variable RANK"),
        (dist.get_rank, "Default process group has not"),
        (taken_port, "The server socket has failed"),
        (lambda: torch.nn.BatchNorm1d(3)(torch.ones(1, 3)), "Expected more than 1 value"),
        (changed_in_place, "one of the variables needed"),
        (lambda: pickle.dumps(lambda: None), "Can't pickle local"),
        (other_sizes, "size mismatch for"),
        (prefixed, "Error(s) in loading state_dict"),
    ],
)  # fmt: skip
def test_real_errors(call, shown):
    text = raised(call)
    known = find_known(text)
    assert known is not None, text
    assert known.shown.startswith(shown), text


def test_each_has_a_source_and_can_be_distinguished_from_those_before_it():
    rows = read_known_errors()
    assert len(rows) >= 200
    assert all(known.source and known.fix and known.means and known.fault in FAULTS.values() for known in rows)
    assert len({known.shown for known in rows}) == len({known.pattern for known in rows}) == len(rows)
    natures = {"own", "peer-lost", "timed-out", "stopped", "follows", "link", "note"}
    assert {known.nature for known in rows} <= natures
    assert all(known.nature != "own" for known in rows if known.fault == FAULTS["peer"])
    assert all(len(condense(mark.encode())) > 1 for known in rows for mark in known.marks)


PASTED = [line.split("\t") for line in (DATA / "known_errors.tsv").read_text(encoding="utf-8").splitlines()[1:]]
"""Lines in the forms that people paste, with invented values."""


def test_pasted_lines_are_known_and_a_reader_of_logs_would_see_them():
    for text, shown, nature in PASTED:
        known = find_known(text)
        assert known is not None, text
        assert shown in known.shown, text
        assert known.nature == nature, text
        assert nature == "note" or any(mark in text for mark in ("rror", "RROR", "xception", *known.marks)), text


def known(text):
    found = find_known(text)
    return found and f"{found.shown} ({found.nature}), ranks {found.ranks(text)}"


test_words = words(__name__, known=known)
