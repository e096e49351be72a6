"""Jobs whose ranks made different calls, as torch's own checks and Gloo tell, and what these do not tell."""

import pytest

from tests.evidence_texts import closed_by, interleaved, raised, steps, text
from tests.rules.evidence.truths import Truth, hold


def call(rank: int, op: str = "ALLREDUCE", seq: int = 3, shape: str = "4", dtype: str = "Float") -> str:
    return f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber={seq}, OpType={op}, TensorShape=[{shape}], TensorDtypes={dtype}, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu))"


def error(one: str, other: str, aspect: str) -> str:
    return f"RuntimeError: Detected mismatch between collectives on ranks. {one}, but {other}.Collectives differ in the following aspects: \t {aspect}"


@pytest.mark.parametrize(
    ("odd", "aspect"),
    [
        ({"dtype": "Double"}, "Tensor Tensor dtypes: Floatvs Double"),
        ({"op": "BROADCAST"}, "Op type: ALLREDUCEvs BROADCAST"),
        ({"shape": "5"}, "Tensor Tensor shapes: 4vs 5"),
        ({"shape": "2, 4"}, "Tensor Tensor shapes: 4vs 24"),
        ({"seq": 4}, "Sequence number: 3vs 4"),
    ],
)
def test_each_rank_names_one_other(tmp_path, odd, aspect):
    """Rank 1 is the odd one; the others name it, and it names rank 0."""
    calls = [call(rank, **(odd if rank == 1 else {})) for rank in range(4)]
    logs = [raised(error(calls[rank], calls[0 if rank == 1 else 1], aspect), rank) for rank in range(4)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("mismatch",), ranks=(1,), not_ranks=(0, 2, 3)))


def test_old_torch_names_only_itself(tmp_path):
    """torch 2.0: of one rank's text alone nothing can be told."""
    words = "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running inconsistent collective: CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float))"
    hold(tmp_path, text(raised(words, 1)), Truth(collect=("other ranks",)))


def test_the_rank_that_gloo_aborts_is_no_culprit(tmp_path):
    """The one with the larger tensor sees its peer close the connection."""
    log = [
        *steps(3),
        "[rank0]: terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "[rank0]:   what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
    ]
    hold(
        tmp_path,
        interleaved(log, closed_by(1)),
        Truth(kinds=("mismatch",), not_ranks=(0,), says=("a rank: a collective of 8 bytes",)),
    )


def test_a_model_with_other_parameters(tmp_path):
    words = "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {} params."
    logs = [raised(words.format(rank, 212, 2, 214), rank) for rank in (0, 1, 3)] + [
        raised(words.format(2, 214, 0, 212), 2)
    ]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("mismatch",), ranks=(2,)))


@pytest.mark.parametrize("count", ["0", "94103012345"])
def test_parameters_of_a_rank_that_is_gone(tmp_path, count):
    """It is no difference: rank 0 had ended."""
    words = "RuntimeError: DDP expects same model across all ranks, but Rank {} has 212 params, while rank 0 has inconsistent {} params."
    logs = [raised(words.format(rank, count), rank) for rank in (1, 2, 3)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("crash",), ranks=(0,), confidence=("low",), or_cannot_tell=True))


def test_a_port_in_use_in_old_words(tmp_path):
    words = "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use). The server socket has failed to bind to 0.0.0.0:29500 (errno: 98 - Address already in use)."
    hold(tmp_path, text(raised(words, None)), Truth(kinds=("port-free",), says=("29500",)))


def test_a_name_that_cannot_be_resolved(tmp_path):
    words = "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (n000, 29500). The IPv6 network addresses of (n000, 29500) cannot be retrieved (gai error: -2 - Name or service not known)."
    hold(tmp_path, text(raised(words, None)), Truth(kinds=("transport",), ranks=(), says=("n000", "name")))


def test_detail_of_two_ranks_names_both(tmp_path):
    def call(rank, shape):
        return f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[{shape}], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default)))"

    def error(one, other):
        return f"RuntimeError: Detected mismatch between collectives on ranks. {one}, but {other}.Collectives differ in the following aspects: \t Tensor Tensor shapes: 195812480vs 51123456"

    one, other = call(0, "195812480"), call(1, "51123456")
    truth = Truth(kinds=("mismatch",), ranks=(0, 1), confidence=("low", "medium"))
    hold(tmp_path, interleaved(raised(error(one, other), 0), raised(error(other, one), 1)), truth)


def test_a_port_in_use(tmp_path):
    words = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    hold(tmp_path, text(raised(words, None)), Truth(kinds=("port-free",), says=("29500",)))
