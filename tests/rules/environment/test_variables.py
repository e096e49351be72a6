"""DD111 to DD114 and DD116, over variables of every class."""

import subprocess
from dataclasses import replace

import pytest

from ddpdoctor.collect.software import read_conf_files
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.launch import select_variables
from ddpdoctor.model.node import ConfFile, Launcher, Rdma, RdmaDevice, RdmaPort, Software
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, failed, fleet, node, process
from tests.rules.environment.launches import changed, lookup, names, torchrun_fleet

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
NO_RDMA = Unread(why=Why.ABSENT, reason="there is no RDMA device")


def software(torch="2.13.0+cpu", nccl=None):
    return Software(
        python="3.11.2", executable="/usr/bin/python3", kernel="6.1.0", os_name="Debian GNU/Linux 12", platform="linux",
        wsl=False, container=None, image=None, torch_version=torch, nccl_wheel=nccl, driver=None, driver_is_open=None,
        nvml_libraries=(), ofed=None,
    )  # fmt: skip


def rdma(state):
    port = RdmaPort(
        device="mlx5_0", port=1, state=state, phys_state="LinkUp", link_layer="InfiniBand", rate_gb_s=400.0, gids=(),
        counters={}, counters_later={},
    )  # fmt: skip
    device = RdmaDevice(name="mlx5_0", bus_id=None, board=None, firmware=None, ports=(port,))
    return Rdma(devices=(device,), peermem=True, dmabuf=None, uverbs=(), uverbs_denied=(), rdma_cm=True)


def shell(env, rank=None, *, under_wrap=False):
    """Return a process as the collector would make it of an environment."""
    listed, others = select_variables(env)
    return process(rank, other_names=others, under_wrap=under_wrap, **listed)


def look(kind, env, *, torch="2.13.0+cpu", nccl=None, **more):
    sections = {"software": software(torch, nccl), "rdma": NO_RDMA, **more}
    under_wrap = sections.pop("under_wrap", False)
    return ask(kind, node(processes=[shell(env, under_wrap=under_wrap)], **sections))


def only(kind, env, **more):
    check, findings = look(kind, env, **more)
    assert check.outcome is failed(*(one.severity for one in findings))
    (finding,) = findings
    assert finding.ranks == ()
    return finding


HEALTHY = {
    "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "^docker0,lo", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    "NCCL_P2P_DISABLE": "0", "NCCL_IB_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_P2P_LEVEL": "NVL",
    "NCCL_NET_GDR_LEVEL": "SYS", "NCCL_ALGO": "^NVLS,NVLSTree", "NCCL_BUFFSIZE": "8388608", "NCCL_CROSS_NIC": "1",
    "NCCL_CUMEM_ENABLE": "-2",
    "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p", "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_IB_TIMEOUT": "22", "NCCL_IB_TC": "106", "NCCL_NVLS_ENABLE": "1", "NCCL_TOPO_FILE": "/opt/topo.xml",
    "NCCL_IB_ADDR_RANGE": "10.0.0.0/8", "NCCL_IB_GID_INDEX": "3", "NCCL_SOCKET_NTHREADS": "-2",
    "NCCL_VERSION": "2.21.5-1", "NCCL_HOME": "/usr/lib", "OFI_NCCL_PROTOCOL": "RDMA", "NCCL_FASTRAK_CTRL_DEV": "eth0",
    "NCCL_UCX_TLS": "rc", "NCCL_TUNER_CONFIG_PATH": "/x", "TORCH_DISTRIBUTED_DEBUG": "info",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_FR_BUFFER_SIZE": "20000", "TORCH_NCCL_ENABLE_MONITORING": "True",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0", "TORCH_CPP_LOG_LEVEL": "INFO", "GLOO_SOCKET_IFNAME": "eth0",
    "GLOO_DEVICE_TRANSPORT": "TCP", "CUDA_LAUNCH_BLOCKING": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "4",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "LOGLEVEL": "INFO", "USE_LIBUV": "0", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_HOME": "/cache", "TORCH_CUDA_ARCH_LIST": "9.0", "RCCL_FOO": "1",
    "HCCL_SOCKET_IFNAME": "eth0", "CUDA_HOME": "/usr/local/cuda", "CUDA_VERSION": "12.8", "OMPI_COMM_WORLD_RANK": "0",
}  # fmt: skip
"""What careful people set, and what container images bring along."""


@pytest.mark.parametrize("kind", ["env-unknown", "env-value", "env-deprecated", "env-danger"])
@pytest.mark.parametrize("nccl", [None, "2.27.5"])
def test_a_healthy_environment_passes(kind, nccl):
    check, findings = look(kind, HEALTHY, nccl=nccl)
    assert findings == ()
    assert check.outcome is Outcome.PASSED
    assert check.seen


@pytest.mark.parametrize("kind", ["env-unknown", "env-value", "env-deprecated", "env-danger"])
def test_an_environment_without_such_variables_passes(kind):
    check, findings = look(kind, {"PATH": "/bin", "HOME": "/root", "LANG": "C"})
    assert (check.outcome, findings) == (Outcome.PASSED, ())


# DD111


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_DEBGU", "NCCL_DEBUG"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SOKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBUG_LEVEL", "NCCL_DEBUG"),
        ("NCCL_P2P_DISABLED", "NCCL_P2P_DISABLE"),
        ("NCCL_IB_GID", "NCCL_IB_GID_INDEX"),
        ("NCCL_TIMEOUT", None),
        ("nccl_debug", "NCCL_DEBUG"),
        ("Nccl_Debug", "NCCL_DEBUG"),
        ("NCLL_DEBUG", "NCCL_DEBUG"),
        ("GLOO_SOCKET_IFACE", "GLOO_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFNAM", "GLOO_SOCKET_IFNAME"),
        ("TORCH_NCCL_BLOCKING_WAITS", "TORCH_NCCL_BLOCKING_WAIT"),
        ("TORCH_NCCL_ASYNC_ERROR", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_FR_BUFFERSIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_DISTRIBUTED_DEBUGS", "TORCH_DISTRIBUTED_DEBUG"),
        ("TORCHELASTIC_RUNID", "TORCHELASTIC_RUN_ID"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("NCCL_FOO", None),
        ("NCCL_IB", None),
        ("NCCL_", None),
        ("TORCH_NCCL_QUX", None),
    ],
)
def test_a_name_that_nobody_reads(name, meant):
    finding = only("env-unknown", {name: "hunter2"})
    assert "hunter2" not in repr(finding)
    if meant is None:
        assert (finding.severity, finding.fix) == (INFO, f"unset {name}")
        return
    assert finding.severity is WARNING
    assert finding.summary.endswith(f"did you mean {meant}?")
    assert finding.fix == f'export {meant}="${name}"; unset {name}'


@pytest.mark.parametrize(
    "name",
    [
        "OFI_NCCL_TUNER",
        "NCCL_FASTRAK_X",
        "NCCL_GPUDIRECTTCPX_X",
        "NCCL_NETWORKING_X",
        "NCCL_TUNER_CONFIG_X",
        "NCCL_SHARP_X",
        "NCCL_UCX_X",
        "NCCL_DMABUF_X",
        "NCCL_TESTS_DEVICE",
        "RCCL_DEBUG",
        "HCCL_SOCKET_IFNAME",
        "MCCL_DEBUG",
        "TORCH_HOME",
        "TORCH_LOGS",
        "MY_NCCL_DEBUG",
    ],
)
def test_what_belongs_to_others_is_left_alone(name):
    assert look("env-unknown", {name: "1"})[1] == ()


def test_a_name_that_is_none_for_a_shell_is_taken_away_by_env():
    finding = only("env-unknown", {"NCCL_DEBUG ": "INFO"})
    assert finding.fix == "remove 'NCCL_DEBUG ' from the environment, for example with env -u 'NCCL_DEBUG '"


def test_a_newer_nccl_may_know_what_looks_misspelt():
    finding = only("env-unknown", {"NCCL_DEBUG_LEVELX": "1"}, nccl="2.40.1")
    assert (finding.severity, finding.confidence) == (INFO, Confidence.LOW)
    assert "NCCL 2.40.1 is installed" in finding.evidence[-1]
    assert only("env-unknown", {"NCCL_DEBUG_LEVELX": "1"}, nccl="2.27.5").severity is WARNING


def test_a_variable_that_the_installed_nccl_is_too_old_for():
    finding = only("env-unknown", {"NCCL_PAT_ENABLE": "1"}, nccl="2.21.5")
    assert finding.severity is INFO
    assert finding.summary == "NCCL_PAT_ENABLE=1 has no effect: NCCL reads it since 2.23.4"
    assert look("env-unknown", {"NCCL_PAT_ENABLE": "1"}, nccl="2.23.4")[1] == ()
    assert look("env-unknown", {"NCCL_PAT_ENABLE": "1"})[1] == ()


# DD112


@pytest.mark.parametrize(
    ("setting", "severity", "what", "fix"),
    [
        ("NCCL_RAS_ENABLE=true", WARNING, "reads this as 0 (since 2.32 as not set)", "export NCCL_RAS_ENABLE=1"),
        ("NCCL_P2P_DISABLE=true", WARNING, "reads this as 0", "unset NCCL_P2P_DISABLE"),
        ("NCCL_P2P_DISABLE=no", WARNING, "reads this as 0", "export NCCL_P2P_DISABLE=0"),
        ("NCCL_BUFFSIZE=4M", WARNING, "reads this as 4", "export NCCL_BUFFSIZE=4194304"),
        ("NCCL_BUFFSIZE=8 MiB", WARNING, "reads this as 8", "export NCCL_BUFFSIZE=8388608"),
        ("NCCL_BUFFSIZE=-5", WARNING, "NCCL takes 1 or more", "unset NCCL_BUFFSIZE"),
        ("NCCL_IB_RETRY_CNT=9", WARNING, "NCCL takes 0 to 7", "unset NCCL_IB_RETRY_CNT"),
        ("NCCL_SHM_DISABLE=2", WARNING, "NCCL takes 0 or 1", "unset NCCL_SHM_DISABLE"),
        ("NCCL_DEBUG=verbose", WARNING, "prints nothing, not even warnings", "unset NCCL_DEBUG"),
        ("NCCL_DEBUG=INF0", WARNING, "prints nothing, not even warnings", "export NCCL_DEBUG=INFO"),
        ("NCCL_DEBUG_SUBSYS=INIT,NETWORK", WARNING, "does not know NETWORK", "unset NCCL_DEBUG_SUBSYS"),
        ("NCCL_SOCKET_FAMILY=ipv4", WARNING, "it ignores any other value", "export NCCL_SOCKET_FAMILY=AF_INET"),
        ("NCCL_SOCKET_FAMILY=af_inet6", WARNING, "AF_INET or AF_INET6", "export NCCL_SOCKET_FAMILY=AF_INET6"),
        ("NCCL_P2P_LEVEL=nvl", WARNING, "it ignores any other value", "export NCCL_P2P_LEVEL=NVL"),
        ("NCCL_ALGO=rnig", WARNING, "does not know rnig", "unset NCCL_ALGO"),
        ("NCCL_ALGO=allreduce:ring;bcast:tree", WARNING, "no collective bcast", "unset NCCL_ALGO"),
        ("NCCL_PROTO=LL256", WARNING, "does not know LL256", "unset NCCL_PROTO"),
        ("NCCL_DEBUG_FILE=~/nccl.%h.%p", WARNING, "is not expanded", "unset NCCL_DEBUG_FILE"),
        ('NCCL_SOCKET_IFNAME="eth0"', WARNING, "quotation marks are part", "export NCCL_SOCKET_IFNAME=eth0"),
        ("NCCL_IB_HCA=mlx5_0\r", WARNING, "trailing whitespace", "export NCCL_IB_HCA=mlx5_0"),
        ("NCCL_IB_HCA=mlx5_0 # both", WARNING, "the comment is part", "export NCCL_IB_HCA=mlx5_0"),
        ("NCCL_COMM_ID=node0", WARNING, "host:port", "unset NCCL_COMM_ID"),
        ("NCCL_IB_ADDR_RANGE=ten", WARNING, "a range of addresses", "unset NCCL_IB_ADDR_RANGE"),
        ("TORCH_DISTRIBUTED_DEBUG=VERBOSE", ERROR, "when it is imported", "unset TORCH_DISTRIBUTED_DEBUG"),
        ("TORCH_DISTRIBUTED_DEBUG=INF", ERROR, "must be OFF, INFO, or DETAIL", "export TORCH_DISTRIBUTED_DEBUG=INFO"),
        ("TORCH_DISTRIBUTED_DEBUG=", ERROR, "must be OFF, INFO, or DETAIL", "unset TORCH_DISTRIBUTED_DEBUG"),
        ("TORCH_NCCL_PROPAGATE_ERROR=on", ERROR, "Invalid value for", "export TORCH_NCCL_PROPAGATE_ERROR=1"),
        ("TORCH_NCCL_PROPAGATE_ERROR=", ERROR, "Invalid value for", "unset TORCH_NCCL_PROPAGATE_ERROR"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=on", ERROR, "integer", "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=7", WARNING, "0 to 3", "unset TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_FR_BUFFER_SIZE=lots", ERROR, "integer", "unset TORCH_FR_BUFFER_SIZE"),
        ("TORCH_SHOW_CPP_STACKTRACES=yes", WARNING, "takes 0 or 1", "export TORCH_SHOW_CPP_STACKTRACES=1"),
        ("TORCH_DIST_INIT_BARRIER=true", ERROR, "ValueError", "export TORCH_DIST_INIT_BARRIER=1"),
        ("USE_LIBUV=true", WARNING, "takes only 1 as on", "export USE_LIBUV=1"),
        ("LOGLEVEL=debug", WARNING, "Unknown level", "export LOGLEVEL=DEBUG"),
        ("GLOO_DEVICE_TRANSPORT=tcp", ERROR, "unsupported gloo device", "export GLOO_DEVICE_TRANSPORT=TCP"),
        ("CUDA_DEVICE_ORDER=pci_bus_id", WARNING, "FASTEST_FIRST", "export CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ("CUDA_DEVICE_MAX_CONNECTIONS=64", WARNING, "CUDA takes 1 to 32", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
        ("OMP_NUM_THREADS=0", WARNING, "a number of at least 1", "unset OMP_NUM_THREADS"),
        ("OMP_NUM_THREADS=auto", WARNING, "uses all CPUs", "unset OMP_NUM_THREADS"),
        ("TORCHELASTIC_USE_AGENT_STORE=true", WARNING, "True or False", "unset TORCHELASTIC_USE_AGENT_STORE"),
    ],
)  # fmt: skip
def test_a_value_that_its_reader_does_not_take(setting, severity, what, fix):
    name, _, value = setting.partition("=")
    finding = only("env-value", {name: value})
    assert finding.severity is severity
    assert what in finding.summary
    assert finding.fix == fix
    assert finding.evidence[0].startswith(f"{name}=")


@pytest.mark.parametrize(
    "setting",
    [
        "NCCL_P2P_DISABLE= 1",
        "NCCL_P2P_DISABLE=0x1",
        "NCCL_P2P_DISABLE=",
        "NCCL_BUFFSIZE=010",
        "NCCL_DEBUG=info",
        "NCCL_DEBUG_SUBSYS=^INIT,coll",
        "NCCL_ALGO=allreduce:tree,ring;broadcast:ring",
        "NCCL_ALGO=NVLS_TREE",
        "NCCL_PROTO=^LL128",
        "NCCL_P2P_LEVEL=5",
        "NCCL_P2P_LEVEL=PXN",
        "NCCL_COMM_ID=[fe80::1]:29500",
        "NCCL_SOCKET_IFNAME='",  # one mark alone encloses nothing
        "TORCH_DISTRIBUTED_DEBUG=detail",
        "NCCL_IB_TC=106 # lossless",
        "TORCH_NCCL_PROPAGATE_ERROR=Yes",
        "TORCH_FR_BUFFER_SIZE=12abc",
        "OMP_NUM_THREADS=4,2",
        "USE_LIBUV=false",
        "PYTORCH_CUDA_ALLOC_CONF=a:b",
        "NCCL_IB_GID_INDEX=-1",
        "RANK=x",
        "NCCL_LL_THRESHOLD=many",
    ],
)
def test_a_value_that_its_reader_takes(setting):
    name, _, value = setting.partition("=")
    assert look("env-value", {name: value})[1] == ()


def test_a_long_value_is_cut_where_it_is_shown():
    finding = only("env-value", {"NCCL_DEBUG": "x" * 500})
    assert "x" * 61 not in finding.summary


# DD113


@pytest.mark.parametrize(
    ("name", "versions", "severity", "words", "fix"),
    [
        ("NCCL_MAX_NRINGS", {}, WARNING, "use NCCL_MAX_NCHANNELS",
         'export NCCL_MAX_NCHANNELS="$NCCL_MAX_NRINGS"; unset NCCL_MAX_NRINGS'),
        ("NCCL_BLOCKING_WAIT", {}, WARNING, "use TORCH_NCCL_BLOCKING_WAIT",
         'export TORCH_NCCL_BLOCKING_WAIT="$NCCL_BLOCKING_WAIT"; unset NCCL_BLOCKING_WAIT'),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", {"torch": "2.9.0"}, WARNING, "TORCH_FR_BUFFER_SIZE", None),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", {"torch": "2.8.0"}, INFO, "is no longer needed", None),
        ("NCCL_LL_THRESHOLD", {}, WARNING, "NCCL 2.4.8 was the last version that read it", "unset NCCL_LL_THRESHOLD"),
        ("NCCL_SYM_CTAS", {"nccl": "2.31.2"}, WARNING, "has no effect: NCCL 2.30.4 was", "unset NCCL_SYM_CTAS"),
        ("NCCL_SYM_CTAS", {}, INFO, "is obsolete: NCCL 2.30.4 was the last", "unset NCCL_SYM_CTAS"),
        ("ENABLE_NCCL_HEALTH_CHECK", {}, WARNING, "torch 2.2 was the last", "unset ENABLE_NCCL_HEALTH_CHECK"),
        ("TORCH_DISTRIBUTED_TIMEOUTS", {}, WARNING, "nothing ever read it", "unset TORCH_DISTRIBUTED_TIMEOUTS"),
        ("NCCL_CHECKS_DISABLE", {}, WARNING, "the documentation", "unset NCCL_CHECKS_DISABLE"),
    ],
)  # fmt: skip
def test_a_name_that_is_out_of_use(name, versions, severity, words, fix):
    finding = only("env-deprecated", {name: "1"}, **versions)
    assert finding.severity is severity
    assert words in finding.summary
    assert fix is None or finding.fix == fix


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("NCCL_SYM_CTAS", {"nccl": "2.27.5"}),
        ("NCCL_WORK_FIFO_DEPTH", {"nccl": "2.21.5"}),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", {"torch": "2.8.0"}),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", {"torch": "2.6.0+cu124"}),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", {"torch": "2.7.1"}),
        ("NCCL_GRAPH_MIXING_SUPPORT", {"nccl": "2.32.3"}),
    ],
)
def test_a_name_that_is_right_for_the_installed_version(name, versions):
    assert look("env-deprecated", {name: "1"}, **versions)[1] == ()


def test_every_name_out_of_use_is_found_where_the_newest_versions_are_installed():
    from ddpdoctor.model.launch import read_variables

    names = [row.name for row in read_variables().values() if row.kind in {"deprecated", "removed", "bogus"}]
    _, findings = look("env-deprecated", dict.fromkeys(names, "1"), torch="2.13.0", nccl="2.32.3")
    assert len(findings) == len(names)


# DD114


@pytest.mark.parametrize(
    ("setting", "severity", "words"),
    [
        ("NCCL_P2P_DISABLE=1", WARNING, "through host memory"),
        ("NCCL_P2P_LEVEL=LOC", WARNING, "as with NCCL_P2P_DISABLE=1"),
        ("NCCL_P2P_LEVEL=0", WARNING, "as with NCCL_P2P_DISABLE=1"),
        ("NCCL_SHM_DISABLE=1", WARNING, "over the network"),
        ("NCCL_NET_GDR_LEVEL=LOC", INFO, "GPUDirect RDMA is off"),
        ("NCCL_ALGO=Ring", WARNING, "no longer chooses the algorithm"),
        ("NCCL_ALGO=allreduce:tree", WARNING, "no longer chooses the algorithm"),
        ("NCCL_PROTO=LL128", WARNING, "can corrupt data"),
        ("NCCL_COMM_ID=10.0.0.1:4000", WARNING, "can fail or hang"),
        ("NCCL_DEBUG=trace", INFO, "floods"),
        ("NCCL_CHECK_POINTERS=1", INFO, "every pointer"),
        ("NCCL_NVLS_ENABLE=0", INFO, "NVLink SHARP is off"),
        ("NCCL_MULTI_RANK_GPU_ENABLE=1", WARNING, "several ranks may share a GPU"),
        ("TORCH_DISTRIBUTED_DEBUG=DETAIL", WARNING, "second Gloo group"),
        ("TORCH_NCCL_BLOCKING_WAIT=true", WARNING, "stops the CPU"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0", WARNING, "hangs for ever"),
        ("TORCH_NCCL_ENABLE_MONITORING=0", INFO, "hangs for ever"),
        ("TORCH_NCCL_NAN_CHECK=1", INFO, "searched for NaN"),
        ("TORCH_FR_BUFFER_SIZE=0", INFO, "flight recorder is off"),
        ("TORCH_USE_CUDA_DSA=1", WARNING, "assertions"),
        ("CUDA_LAUNCH_BLOCKING=1", WARNING, "nothing overlaps"),
        ("CUDA_DEVICE_WAITS_ON_EXCEPTION=1", WARNING, "looks like a hang"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING=1", WARNING, "cudaMalloc"),
        ("TORCHELASTIC_USE_AGENT_STORE=True", WARNING, "rank 0 now starts no store"),
        ("NCCL_IB_DISABLE=1", INFO, "not needed here"),
    ],
)
def test_a_leftover_that_does_harm(setting, severity, words):
    name, _, value = setting.partition("=")
    finding = only("env-danger", {name: value})
    assert finding.severity is severity
    assert words in finding.summary
    assert finding.fix == f"unset {name}"
    assert finding.evidence == (f"{name}={value} is set in the environment",)


@pytest.mark.parametrize(
    "setting",
    [
        "NCCL_P2P_DISABLE=0",
        "NCCL_P2P_DISABLE=",
        "NCCL_P2P_DISABLE=true",
        "NCCL_P2P_LEVEL=SYS",
        "NCCL_IB_DISABLE=0",
        "NCCL_ALGO=^NVLS",
        "NCCL_ALGO=",
        "NCCL_DEBUG=INFO",
        "NCCL_NVLS_ENABLE=2",
        "NCCL_NVLS_ENABLE=",
        "CUDA_LAUNCH_BLOCKING=0",
        "TORCH_DISTRIBUTED_DEBUG=INFO",
        "TORCH_NCCL_BLOCKING_WAIT=0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=3",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=0",
        "NCCL_DEBUG_FILE=/tmp/nccl.log",
        "TORCHELASTIC_USE_AGENT_STORE=False",
    ],
)
def test_the_harmless_value_of_a_dangerous_variable(setting):
    name, _, value = setting.partition("=")
    assert look("env-danger", {name: value})[1] == ()


def test_every_dangerous_row_can_be_found():
    from ddpdoctor.model.launch import read_variables

    tries = ("0", "1", "True", "LOC", "TRACE", "DETAIL", "Ring", "/tmp/nccl.log")
    for row in read_variables().values():
        if row.kind == "danger":
            assert any(look("env-danger", {row.name: value})[1] for value in tries), row.name


def test_what_wrap_sets_is_no_danger():
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "DDPDOCTOR_RUN": "/tmp/run"}
    assert look("env-danger", env, under_wrap=True)[1] == ()
    assert only("env-danger", {**env, "CUDA_LAUNCH_BLOCKING": "1"}, under_wrap=True).summary.startswith("CUDA_LAUNCH")


def test_infiniband_switched_off_is_left_to_its_own_check_where_a_port_is_active():
    assert look("env-danger", {"NCCL_IB_DISABLE": "1"}, rdma=rdma("ACTIVE"))[1] == ()
    finding = only("env-danger", {"NCCL_IB_DISABLE": "1"}, rdma=rdma("DOWN"))
    assert (finding.severity, "TCP sockets" in finding.summary) == (WARNING, True)


@pytest.mark.parametrize(
    ("env", "severity"),
    [
        ({"NCCL_DEBUG_FILE": "/tmp/nccl.log", "NCCL_DEBUG": "INFO"}, WARNING),
        ({"NCCL_DEBUG_FILE": "/tmp/nccl.%h.log", "NCCL_DEBUG": "warn"}, WARNING),
        ({"NCCL_DEBUG_FILE": "/tmp/nccl.log"}, INFO),
        ({"NCCL_DEBUG_FILE": "/tmp/nccl.%p.log", "NCCL_DEBUG": "INFO"}, None),
        ({"NCCL_DEBUG_FILE": "/dev/stderr", "NCCL_DEBUG": "INFO"}, None),
    ],
)
def test_one_log_file_for_all_ranks_of_a_node(env, severity):
    ranks = [shell({**env, "LOCAL_WORLD_SIZE": "2"}, rank) for rank in (0, 1)]
    _, findings = ask("env-danger", node(processes=ranks, rdma=NO_RDMA))
    assert [(finding.severity, finding.ranks) for finding in findings] == ([(severity, (0, 1))] if severity else [])


def test_equal_findings_of_ranks_are_one_and_others_are_apart():
    values = ("1", "1", "0", "1")
    ranks = [shell({"NCCL_P2P_DISABLE": value}, rank) for rank, value in enumerate(values)]
    (finding,) = ask("env-danger", node(processes=ranks, rdma=NO_RDMA))[1]
    assert finding.ranks == (0, 1, 3)


def test_what_was_meant_is_a_name_that_the_installed_nccl_has():
    assert "did you mean NCCL_DEBUG?" in only("env-unknown", {"NCCL_DEBUG_LEVEL": "1"}, nccl="2.27.5").summary
    assert "NCCL_DEBUG_LEVELS" in only("env-unknown", {"NCCL_DEBUG_LEVEL": "1"}, nccl="2.32.3").summary


def test_without_knowledge_of_the_machine_the_environment_is_judged_all_the_same():
    _, findings = ask("env-danger", node(processes=[shell({"NCCL_IB_DISABLE": "1"})]))
    assert [finding.severity for finding in findings] == [WARNING]


# DD116

ETCD = {"PET_RDZV_BACKEND": "etcd-v2", "PET_RDZV_ENDPOINT": "etcd0.cluster:2379", "http_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("env", "notes"),
    [
        (ETCD, 1),
        ({**ETCD, "no_proxy": "localhost,127.0.0.1"}, 1),
        ({**ETCD, "no_proxy": "localhost,etcd0.cluster"}, 0),
        ({**ETCD, "NO_PROXY": ".cluster"}, 0),
        ({**ETCD, "no_proxy": "*"}, 0),
        ({**ETCD, "no_proxy": "luster"}, 1),
        ({**ETCD, "http_proxy": ""}, 0),
        ({**ETCD, "PET_RDZV_BACKEND": "c10d"}, None),
        ({"http_proxy": "http://proxy:3128", "MASTER_ADDR": "node0"}, None),
        ({}, None),
    ],
)
def test_a_proxy_in_the_way_of_etcd(env, notes):
    check, findings = look("proxy-env", env)
    assert check.outcome is (Outcome.SKIPPED if notes is None else Outcome.PASSED)
    assert [finding.severity for finding in findings] == [Severity.INFO] * (notes or 0)


def test_the_way_round_a_proxy_is_ready_to_paste():
    finding = only("proxy-env", ETCD)
    assert finding.severity is INFO
    assert finding.summary.startswith("http_proxy is set, but no_proxy does not include etcd0.cluster")
    assert finding.fix == 'export no_proxy="${no_proxy:+$no_proxy,}etcd0.cluster"; export NO_PROXY="$no_proxy"'


# DD115, over files of every kind of fault.


def conf(path="/etc/nccl.conf", *, variables=None, **more):
    values = variables or {}
    fields = {"hidden_by_env": (), "hidden_by_file": (), "bad_lines": (), **more}
    return ConfFile(path=path, variables=values, lines={name: i for i, name in enumerate(values, 1)}, **fields)


def look_at_files(*files, nccl=None, processes=(), **more):
    sections = {"software": software(nccl=nccl), "rdma": NO_RDMA, **more}
    return ask("nccl-conf", node(processes=processes, conf_files=files, **sections))


def only_in_files(*files, **more):
    check, findings = look_at_files(*files, **more)
    assert check.outcome is failed(*(one.severity for one in findings))
    (finding,) = findings
    assert (finding.kind, finding.ranks) == ("nccl-conf", ())
    return finding


def test_no_file_is_skipped():
    check, findings = look_at_files()
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())
    assert check.reason.startswith("there is no /etc/nccl.conf or ~/.nccl.conf")


def test_files_that_were_not_read_are_no_healthy_ones():
    unread = Unread(why=Why.TIMEOUT, reason="conf_files did not answer within 2 s")
    check, _ = ask("nccl-conf", node(conf_files=unread))
    assert check.outcome is Outcome.INCONCLUSIVE


def test_a_healthy_file_passes_and_is_shown():
    check, findings = look_at_files(conf(variables={"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"}))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "/etc/nccl.conf sets NCCL_DEBUG, NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("name", "value", "severity", "words", "fix"),
    [
        ("NCCL_P2P_DISABLE", "1", WARNING, "through host memory", "sed -i 1d /etc/nccl.conf"),
        ("NCCL_DEBUGS", "", WARNING, "did you mean NCCL_DEBUG?", "sed -i '1s/^[^=]*/NCCL_DEBUG/' /etc/nccl.conf"),
        ("NCCL_QUX_QUX", "", INFO, "no known name is similar", "sed -i 1d /etc/nccl.conf"),
        ("NCCL_SOCKET_FAMILY", "ipv4", WARNING, "AF_INET or AF_INET6",
         r"sed -i '1c\NCCL_SOCKET_FAMILY=AF_INET' /etc/nccl.conf"),
        ("NCCL_MAX_NRINGS", "4", WARNING, "old name", "sed -i '1s/^[^=]*/NCCL_MAX_NCHANNELS/' /etc/nccl.conf"),
        ("NCCL_LL_THRESHOLD", "4", WARNING, "has no effect", "sed -i 1d /etc/nccl.conf"),
        ("NCCL_IB_HCA", '"mlx5_0"', WARNING, "quotation marks", r"sed -i '1c\NCCL_IB_HCA=mlx5_0' /etc/nccl.conf"),
        ("NCCL_IB_HCA", "mlx5_0\r", WARNING, "whitespace", r"sed -i '1c\NCCL_IB_HCA=mlx5_0' /etc/nccl.conf"),
        ("NCCL_DEBUG", "INFO # now", WARNING, "prints nothing", r"sed -i '1c\NCCL_DEBUG=INFO' /etc/nccl.conf"),
        ("NCCL_IB_HCA", "mlx5_0 # old", WARNING, "the comment", r"sed -i '1c\NCCL_IB_HCA=mlx5_0' /etc/nccl.conf"),
    ],
)  # fmt: skip
def test_every_class_of_flaw_has_the_files_own_kind(name, value, severity, words, fix):
    finding = only_in_files(conf(variables={name: value}))
    assert finding.severity is severity
    assert words in finding.summary
    assert finding.fix == fix
    assert finding.evidence[0].startswith(name)
    assert "is in line 1 of /etc/nccl.conf; the environment does not show it" in finding.evidence[0]


def test_infiniband_switched_off_in_a_file_is_the_files_finding_even_where_a_port_is_active():
    finding = only_in_files(conf(variables={"NCCL_IB_DISABLE": "1"}), rdma=rdma("ACTIVE"))
    assert (finding.severity, "TCP sockets" in finding.summary) == (WARNING, True)


def test_what_the_environment_or_an_earlier_file_hides_is_not_reported():
    user = conf("/root/.nccl.conf", variables={"NCCL_DEBUG": "WARN"})
    system = conf(
        variables={"NCCL_DEBUG": "verbose", "NCCL_P2P_DISABLE": "1"},
        hidden_by_env=("NCCL_P2P_DISABLE",),
        hidden_by_file=("NCCL_DEBUG",),
    )
    assert look_at_files(user, system)[1] == ()


def test_what_is_none_of_nccls_is_neither_reported_nor_shown():
    check, findings = look_at_files(conf(variables={"API_TOKEN": "", "OFI_NCCL_PROTOCOL": ""}))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_lines_that_nccl_cannot_read():
    finding = only_in_files(conf(bad_lines=(3,)))
    assert finding.severity is WARNING
    assert finding.summary == "line 3 of /etc/nccl.conf is not NAME=VALUE from the first column, so it has no effect"
    assert only_in_files(conf(bad_lines=(3, 5))).summary.startswith("each of the lines 3, 5 of")


def test_a_name_that_is_set_twice():
    finding = only_in_files(conf(repeated_lines=(4,)))
    assert finding.summary == "line 4 of /etc/nccl.conf repeats an earlier setting, so it has no effect"


def test_a_file_that_is_asked_for_and_not_there():
    finding = only_in_files(conf("/opt/nccl.conf", unread="there is no such file"))
    assert finding.summary == "NCCL does not read /opt/nccl.conf: there is no such file"
    assert finding.fix == "ls -l /opt/nccl.conf, or unset NCCL_CONF_FILE"


@pytest.mark.parametrize(
    ("nccl", "read_by_home", "read_by_database"),
    [
        ("2.27.5", False, True),
        ("2.29.7", False, True),
        ("2.30.3", True, False),
        ("2.32.3", True, False),
        (None, True, True),
    ],
)
def test_which_home_counts_is_a_matter_of_the_version(nccl, read_by_home, read_by_database):
    by_home = conf("/tmp/home/.nccl.conf", variables={"NCCL_P2P_DISABLE": "1"}, since="2.30.3")
    by_database = conf("/root/.nccl.conf", variables={"NCCL_SHM_DISABLE": "1"}, until="2.29.7")
    summaries = [finding.summary for finding in look_at_files(by_home, by_database, nccl=nccl)[1]]
    assert any(summary.startswith("NCCL_P2P_DISABLE=1") for summary in summaries) is read_by_home
    assert any(summary.startswith("NCCL_SHM_DISABLE=1") for summary in summaries) is read_by_database
    assert (
        any(summary.startswith("NCCL does not read /tmp/home/.nccl.conf") for summary in summaries) is not read_by_home
    )
    unread = any(summary.startswith("NCCL does not read /root/.nccl.conf") for summary in summaries)
    assert unread is not read_by_database


def test_the_flaws_are_judged_by_the_processes_own_scene():
    ranks = [process(rank, LOCAL_WORLD_SIZE="2", NCCL_DEBUG="INFO") for rank in (0, 1)]
    finding = only_in_files(conf(variables={"NCCL_DEBUG_FILE": "/tmp/nccl.log"}), processes=ranks)
    assert "overwrites the others' lines" in finding.summary


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("export NCCL_DEBUG = WARN\n", "NCCL_DEBUG=WARN\n"),
        ("# ours\n  NCCL_DEBUG=WARN\n", "# ours\nNCCL_DEBUG=WARN\n"),
        ("NCCL_SOCKET_FAMILY=ipv4\n", "NCCL_SOCKET_FAMILY=AF_INET\n"),
        ("NCCL_DEBUGS=WARN\nNCCL_IB_TC=106\n", "NCCL_DEBUG=WARN\nNCCL_IB_TC=106\n"),
        ("NCCL_IB_TC=106\nNCCL_SHM_DISABLE=1\n", "NCCL_IB_TC=106\n"),
        ("NCCL_IB_TC=106\nNCCL_IB_TC=104\n", "NCCL_IB_TC=106\n"),
        ("NCCL_IB_HCA='mlx5_0'\n", "NCCL_IB_HCA=mlx5_0\n"),
    ],
)
def test_the_command_of_the_finding_mends_the_file(tmp_path, text, mended):
    path = tmp_path / "nccl conf"
    path.write_text(text, encoding="utf-8")
    system = System(env={"NCCL_CONF_FILE": str(path)})
    plan = ReadingPlan(sections=frozenset())
    files = tuple(file for file in read_conf_files(system, plan) if file.path == str(path))
    finding = only_in_files(*files)
    subprocess.run(finding.fix, shell=True, check=True, timeout=200)
    assert path.read_text(encoding="utf-8") == mended
    files = tuple(file for file in read_conf_files(system, plan) if file.path == str(path))
    assert look_at_files(*files)[1] == ()


# DD234 and DD235: healthy, each failing form, missing facts, near misses.


FOUR = torchrun_fleet()


def test_one_process_has_nobody_to_agree_with():
    assert ask("ws-same", fleet(node(processes=[process(0, WORLD_SIZE="2")])))[0].outcome is Outcome.SKIPPED
    single = fleet(node(processes=[process(0)]), launcher=Launcher.SLURM, world_size=2, missing=(1,))
    assert ask("ws-same", single)[0].outcome is Outcome.SKIPPED


@pytest.mark.parametrize(
    "facts",
    [
        FOUR,
        torchrun_fleet(NCCL_ALGO="Ring"),
        changed(FOUR, 3, NCCL_SOCKET_IFNAME="eth1"),
        changed(FOUR, 3, CUDA_VISIBLE_DEVICES="3"),
        changed(FOUR, 3, NCCL_DEBUG="INFO"),
        changed(FOUR, 3, NCCL_DEBUG_FILE="/tmp/3"),
        changed(FOUR, 3, LOCAL_WORLD_SIZE="1"),
        changed(FOUR, 3, NCCL_IB_HCA="mlx5_3"),
    ],
)
def test_agreement(facts):
    check, findings = ask("ws-same", facts)
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert "WORLD_SIZE=4, MASTER_ADDR=node0, MASTER_PORT=40123" in check.seen


@pytest.mark.parametrize(
    ("facts", "severity", "summary", "fix"),
    [
        (changed(FOUR, 3, WORLD_SIZE="3"), Severity.ERROR,
         "WORLD_SIZE is 3 on rank 3, 4 on 3 others: the ranks wait for different numbers of ranks", "WORLD_SIZE=4"),
        (changed(FOUR, 2, MASTER_PORT="1"), Severity.ERROR, "MASTER_PORT is 1 on rank 2, 40123 on 3", "=40123"),
        (changed(FOUR, 2, MASTER_ADDR=None), Severity.ERROR, "MASTER_ADDR is unset on rank 2, node0 on", "=node0"),
        (changed(FOUR, 3, NCCL_ALGO="Ring"), Severity.ERROR, "NCCL_ALGO is Ring on rank 3, unset on 3 others",
         "unset NCCL_ALGO on all ranks"),
        (changed(FOUR, 1, NCCL_BUFFSIZE="1048576"), Severity.WARNING, "NCCL_BUFFSIZE is 1048576 on rank 1", "unset"),
        (changed(FOUR, 1, TORCH_DISTRIBUTED_DEBUG="DETAIL"), Severity.ERROR, "DEBUG is DETAIL on rank 1", "unset"),
        (changed(FOUR, 1, TORCH_DISTRIBUTED_DEBUG="INFO"), Severity.INFO, "TORCH_DISTRIBUTED_DEBUG is INFO", "unset"),
    ],
)  # fmt: skip
def test_disagreement(facts, severity, summary, fix):
    check, (finding,) = ask("ws-same", facts)
    assert (check.outcome, finding.severity, finding.confidence) == (failed(severity), severity, Confidence.HIGH)
    assert summary in finding.summary
    assert fix in finding.fix


def test_without_a_majority_nobody_is_to_blame():
    halves = changed(changed(FOUR, 2, WORLD_SIZE="2"), 3, WORLD_SIZE="2")
    _, (finding,) = ask("ws-same", halves)
    assert finding.confidence is Confidence.LOW
    assert finding.ranks == (0, 1, 2, 3)


def with_names(facts, *sections):
    nodes = tuple(replace(each, names=section) for each, section in zip(facts.nodes, sections, strict=True))
    return replace(facts, nodes=nodes)


OTHER_NAME = changed(changed(FOUR, 2, MASTER_ADDR="node0.cluster"), 3, MASTER_ADDR="node0.cluster")


def test_two_spellings_of_one_host_agree():
    first = names("node0", "10.0.0.1", master=lookup("node0", "10.0.0.1"))
    second = names("node1", "10.0.0.2", master=lookup("node0.cluster", "10.0.0.1"))
    assert ask("ws-same", with_names(OTHER_NAME, first, second))[1] == ()


def test_two_names_of_two_hosts_do_not():
    first = names("node0", "10.0.0.1", master=lookup("node0", "10.0.0.1"))
    second = names("node1", "10.0.0.2", master=lookup("node0.cluster", "10.0.0.9"))
    _, (finding,) = ask("ws-same", with_names(OTHER_NAME, first, second))
    assert "MASTER_ADDR is" in finding.summary


def test_localhost_on_the_first_node_means_the_same():
    facts = changed(changed(FOUR, 0, MASTER_ADDR="localhost"), 1, MASTER_ADDR="localhost")
    assert ask("ws-same", facts)[1] == ()


def test_localhost_on_another_node_does_not():
    facts = changed(changed(FOUR, 2, MASTER_ADDR="localhost"), 3, MASTER_ADDR="localhost")
    assert len(ask("ws-same", facts)[1]) == 1


def conf_agreement(path, **variables):
    return ConfFile(path=path, variables=variables, hidden_by_env=(), hidden_by_file=(), bad_lines=())


def test_a_file_of_one_host_counts():
    nodes = (replace(FOUR.nodes[0], conf_files=(conf_agreement("/etc/nccl.conf", NCCL_ALGO="Tree"),)), FOUR.nodes[1])
    _, (finding,) = ask("ws-same", replace(FOUR, nodes=nodes))
    assert "NCCL_ALGO is Tree on ranks 0 and 1" in finding.summary
    assert finding.evidence == ("/etc/nccl.conf of node0 sets NCCL_ALGO",)


def test_the_environment_wins_over_files():
    facts = torchrun_fleet(NCCL_ALGO="Ring")
    nodes = (replace(facts.nodes[0], conf_files=(conf_agreement("/etc/nccl.conf", NCCL_ALGO="Tree"),)), facts.nodes[1])
    assert ask("ws-same", replace(facts, nodes=nodes))[1] == ()


def by_node(*variables):
    return fleet(
        *(node(f"node{i}", index=i, processes=[process(i, **given)]) for i, given in enumerate(variables)),
        launcher=Launcher.SLURM, world_size=len(variables),
    )  # fmt: skip


GIVEN = {"PET_RDZV_ID": "7", "PET_NNODES": "3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "node0:29400"}


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (fleet(node(processes=[process(None, **GIVEN)])), Outcome.SKIPPED),
        (by_node({}, {}), Outcome.SKIPPED),
        (by_node(GIVEN, GIVEN), Outcome.PASSED),
        (FOUR, Outcome.PASSED),
        (changed(FOUR, 2, PET_NNODES="5"), Outcome.PASSED),
        (by_node(GIVEN | {"PET_NODE_RANK": "0"}, GIVEN | {"PET_NODE_RANK": "1"}), Outcome.PASSED),
    ],
)
def test_one_rendezvous(facts, outcome):
    check, findings = ask("rdzv-id-same", facts)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("PET_RDZV_ID", "9", "export PET_RDZV_ID=7 on all nodes"),
        ("PET_NNODES", "2", "export PET_NNODES=3 on all nodes"),
        ("PET_RDZV_ENDPOINT", "node2:29400", "export PET_RDZV_ENDPOINT=node0:29400 on all nodes"),
        ("PET_RDZV_BACKEND", "static", "export PET_RDZV_BACKEND=c10d on all nodes"),
    ],
)
def test_another_rendezvous(name, value, fix):
    check, (finding,) = ask("rdzv-id-same", by_node(GIVEN, GIVEN, GIVEN | {name: value}))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert finding.summary.startswith(f"{name} is {value} on node2, {GIVEN[name]} on 2 others: these nodes never meet")
    assert finding.fix == fix
    assert (finding.hosts, finding.ranks) == (("node2",), (2,))


def test_two_nodes_without_a_majority():
    _, (finding,) = ask("rdzv-id-same", by_node(GIVEN, GIVEN | {"PET_RDZV_ID": "8"}))
    assert finding.confidence is Confidence.LOW
    assert finding.hosts == ("node0", "node1")


def test_many_different_values_are_counted():
    each = by_node(*(GIVEN | {"PET_RDZV_ID": str(number)} for number in range(100)))
    _, (finding,) = ask("rdzv-id-same", each)
    start = "PET_RDZV_ID has 100 different values, such as 0 on node0, 1 on node1: these nodes never meet"
    assert finding.summary.startswith(start)
