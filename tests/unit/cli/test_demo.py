"""The demo's scripts: complete, described, with one marked fault each."""

import pytest

from ddpdoctor.cli.demo import FAULTS, describe, read_script


@pytest.mark.parametrize("fault", FAULTS)
def test_each_script_is_valid_and_marks_its_fault_once(fault):
    source = read_script(fault)
    compile(source, fault, "exec")
    assert source.count("# the fault") == 1
    assert describe(fault).endswith(".")
    assert len(describe(fault)) < 110
