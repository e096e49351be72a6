"""Slurm's short forms are expanded, and damaged or absurd ones refused at once."""

import pytest

from ddpdoctor.model.slurm import MAX_ENTRIES, expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ("n1",)),
        ("login.example.org", ("login.example.org",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[1-3,07-09],x", ("n1", "n2", "n3", "n07", "n08", "n09", "x")),
        ("n[08-10]", ("n08", "n09", "n10")),
        ("r[0-1]n[1-2]-ib", ("r0n1-ib", "r0n2-ib", "r1n1-ib", "r1n2-ib")),
        (" gpu-a,gpu-b \n", ("gpu-a", "gpu-b")),
        ("n[5]", ("n5",)),
    ],
)
def test_hosts(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        "a,,b",
        "n[1-",
        "n[]",
        "n[3-1]",
        "n]1",
        "a b",
        "n[a]",
        "n[1-2-3]",
        "n[[1]]",
        "n[" + "9" * 5000 + "]",
    ],
)
def test_malformed_hosts(text):
    with pytest.raises(ValueError, match=r"not a|empty"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["n[1-99999999999]", "r[0-999]n[0-999]", "n[0-40000],m[0-40000]"])
def test_absurd_hosts(text):
    with pytest.raises(ValueError, match=f"more than {MAX_ENTRIES} hosts"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("2(x2),1", (2, 2, 1)), ("8(x3)", (8, 8, 8)), ("1,0,2", (1, 0, 2))]
)
def test_counts(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "a", "2(x", "2(x)", "2(x0)", "2,,1", "-1", "2 (x2)", "9" * 5000])
def test_malformed_counts(text):
    with pytest.raises(ValueError, match="not a list of counts"):
        expand_counts(text)


def test_absurd_counts():
    with pytest.raises(ValueError, match="more than"):
        expand_counts("2(x99999999)")


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ValueError, match=r"\.\.\.$"):
        expand_counts("x" * 10_000)
