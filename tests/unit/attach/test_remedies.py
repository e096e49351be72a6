"""Who may not trace is told what helps on this machine."""

import pytest

from ddpdoctor.attach.stacks import find_py_spy, read_stacks, remedy_for_tracing
from ddpdoctor.model.attached import Refusal


@pytest.mark.parametrize(
    ("uid", "scope", "words"),
    [
        pytest.param(1000, "", ("sudo -E", "kubectl debug", "--cap-add SYS_PTRACE"), id="a user without yama"),
        pytest.param(1000, "0", ("sudo -E", "kubectl debug", "--cap-add SYS_PTRACE"), id="a user, open yama"),
        pytest.param(
            1000, "1", ("sudo -E", "ptrace_scope is 1", "sysctl kernel.yama.ptrace_scope=0"), id="children only"
        ),
        pytest.param(0, "1", ("CAP_SYS_PTRACE", "capabilities.add: [SYS_PTRACE]", "kubectl debug"), id="root in a pod"),
        pytest.param(0, "3", ("nobody", "boots"), id="nobody"),
    ],
)
def test_the_remedy_fits_the_machine(uid, scope, words):
    told = remedy_for_tracing(uid, scope)
    assert [word for word in words if word not in told] == []


def test_py_spy_is_there_and_says_that_a_process_is_gone():
    assert find_py_spy() is not None
    threads, refusal = read_stacks(2**22 + 1)
    assert threads is None
    assert isinstance(refusal, Refusal)
    assert refusal.reason
    assert not refusal.remedy
