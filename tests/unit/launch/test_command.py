"""Splitting a command line: whose is which word."""

import pytest

from ddpdoctor.launch.command.command_line import SplitCommand, split_command
from ddpdoctor.launch.command.torchrun_table import TORCHRUN_OPTIONS, ask_torchrun
from ddpdoctor.model.errors import UserError

OWN = {"--hang-timeout": True, "--on-hang": True, "--quiet": False, "--help": False}


def refuse_to_ask():
    raise AssertionError("torchrun was asked about an option that is in the table")


def split(line, ask=refuse_to_ask):
    return split_command(line.split(), OWN, ask)


def expect(script, *, own="", torchrun="", args="", is_module=False, no_python=False, is_command=False):
    return SplitCommand(
        own=tuple(own.split()),
        torchrun=tuple(torchrun.split()),
        script=script,
        is_module=is_module,
        no_python=no_python,
        script_args=tuple(args.split()),
        is_command=is_command,
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", expect("train.py")),
        ("train.py --epochs 10 pos", expect("train.py", args="--epochs 10 pos")),
        ("train.py --help", expect("train.py", args="--help")),
        ("train.py --quiet --tee 3", expect("train.py", args="--quiet --tee 3")),
        ("train.py -- --x", expect("train.py", args="-- --x")),
        ("--quiet train.py", expect("train.py", own="--quiet")),
        ("--hang-timeout 8 train.py", expect("train.py", own="--hang-timeout 8")),
        ("--hang-timeout=8 train.py", expect("train.py", own="--hang-timeout=8")),
        ("--hang_timeout 8 train.py", expect("train.py", own="--hang-timeout 8")),
        ("--hang_timeout=a_b train.py", expect("train.py", own="--hang-timeout=a_b")),
        ("--nproc-per-node 4 train.py", expect("train.py", torchrun="--nproc-per-node 4")),
        ("--nproc_per_node 4 train.py", expect("train.py", torchrun="--nproc_per_node 4")),
        ("--nproc_per_node=4 train.py", expect("train.py", torchrun="--nproc_per_node=4")),
        ("--standalone train.py --standalone", expect("train.py", torchrun="--standalone", args="--standalone")),
        ("-r 3 -t 0:1,1:2 train.py", expect("train.py", torchrun="-r 3 -t 0:1,1:2")),
        ("-r3 -t=3 train.py", expect("train.py", torchrun="-r3 -t=3")),
        ("--role -x train.py", expect("train.py", torchrun="--role -x")),
        ("-m pkg.train --lr 0.1", expect("pkg.train", is_module=True, args="--lr 0.1")),
        ("--module pkg.train -m", expect("pkg.train", is_module=True, args="-m")),
        (
            "--nnodes 2 -m --quiet --tee 3 pkg",
            expect("pkg", is_module=True, own="--quiet", torchrun="--nnodes 2 --tee 3"),
        ),
        ("--no_python ./run.sh a", expect("./run.sh", no_python=True, args="a")),
        ("-- torchrun --tee 3 t.py", expect("torchrun", args="--tee 3 t.py", is_command=True)),
        ("--quiet -- -odd --x", expect("-odd", own="--quiet", args="--x", is_command=True)),
        ("--hang-timeout 8 -- make -- x", expect("make", own="--hang-timeout 8", args="-- x", is_command=True)),
        ("--nproc 4 t.py", expect("t.py", torchrun="--nproc-per-node 4")),
        ("--nproc_per=4 t.py", expect("t.py", torchrun="--nproc-per-node=4")),
        ("--max-rest 1 --mod pkg", expect("pkg", torchrun="--max-restarts 1", is_module=True)),
        ("--hang 8 t.py", expect("t.py", own="--hang-timeout 8")),
        ("- x", expect("-", args="x")),
        ("--help", expect("", own="--help")),
        ("--tee 3 -h train.py", expect("", own="--help", torchrun="--tee 3")),
        ("--rdzv-conf a=1,b=2 t.py", expect("t.py", torchrun="--rdzv-conf a=1,b=2")),
    ],
)
def test_every_word_goes_to_its_owner(line, expected):
    assert split(line) == expected


@pytest.mark.parametrize("line", ["", "--quiet", "--tee 3", "-m"])
def test_a_missing_script_is_an_error(line):
    with pytest.raises(UserError, match="no script"):
        split(line)


def test_a_missing_command_is_an_error():
    with pytest.raises(UserError, match="no command"):
        split("--quiet --")


@pytest.mark.parametrize("line", ["--tee 3 -- torchrun t.py", "-m -- pkg", "--no-python -- ./run.sh"])
def test_torchruns_options_before_a_command_are_an_error(line):
    with pytest.raises(UserError, match="is an option of torchrun") as error:
        split(line)
    assert error.value.status == 2


@pytest.mark.parametrize(("line", "meant"), [("--r 3 t.py", "--rdzv-backend"), ("--on t.py", "--on-hang needs")])
def test_an_abbreviation_that_could_be_two_options_names_them(line, meant):
    with pytest.raises(UserError, match=meant):
        split_command(line.split()[:1], OWN, refuse_to_ask)


@pytest.mark.parametrize("line", ["--hang-timeout", "--nnodes", "-r"])
def test_a_missing_value_is_an_error_that_names_the_option(line):
    with pytest.raises(UserError, match=f"{line} needs a value"):
        split(line)


@pytest.mark.parametrize("line", ["--quiet=1 t.py", "--standalone=1 t.py", "-mpkg"])
def test_a_value_for_a_flag_is_an_error(line):
    with pytest.raises(UserError, match="takes no value"):
        split(line)


def test_an_option_of_a_newer_torchrun_is_asked_for_its_arity():
    newer = {"--brand-new": True, "--new-flag": False}
    found = split("--brand_new 1 --new-flag train.py x", ask=lambda: newer)
    assert found == expect("train.py", torchrun="--brand_new 1 --new-flag", args="x")


def test_an_option_that_nobody_knows_is_named_as_it_was_typed():
    with pytest.raises(UserError, match="--bogus_thing") as error:
        split("--bogus_thing=2 train.py", ask=dict)
    assert error.value.status == 2


def test_the_table_agrees_with_the_installed_torchrun():
    pytest.importorskip("torch")
    asked = {name: takes for name, takes in ask_torchrun().items() if name not in {"-h", "--help"}}
    assert {name: TORCHRUN_OPTIONS.get(name) for name in asked} == asked
