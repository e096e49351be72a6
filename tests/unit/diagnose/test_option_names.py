"""What rules say of variables is said of the options that were typed."""

from ddpdoctor.diagnose.rendezvous.judging import as_typed
from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.launch import NodeOptions

FOUND = Finding(
    code="DD206",
    kind="master-loopback",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    ranks=(),
    summary="PET_MASTER_ADDR is localhost on 2 nodes",
    evidence=("2 nodes: PET_NNODES is 2", "PET_MASTER_ADDRESS is something else"),
    fix="export PET_MASTER_ADDR=node0 on all nodes",
)


def test_options_have_their_own_names():
    (found,) = as_typed([FOUND], NodeOptions(nnodes="2", master_addr="localhost"))
    assert found.summary == "--master-addr is localhost on 2 nodes"
    assert found.evidence == ("2 nodes: --nnodes is 2", "PET_MASTER_ADDRESS is something else")
    assert found.fix == "--master-addr=node0 on all nodes"


def test_variables_that_an_operator_gave_keep_theirs():
    assert as_typed([FOUND], NodeOptions()) == (FOUND,)
    (found,) = as_typed([FOUND], NodeOptions(nnodes="2"))
    assert found.summary == FOUND.summary
