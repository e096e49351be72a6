"""Makes facts: small jobs whose ranks sit in calls, sleep, fail or end; and asks rules as the verbs do."""

from array import array
from dataclasses import replace

from ddpdoctor.model.facts import (
    BeforeCall,
    Call,
    CallLog,
    Child,
    EndedByThread,
    GroupState,
    Helper,
    HelperError,
    Job,
    Life,
    ModelSeen,
    NodeSeen,
    NodesSeen,
    Presence,
    Raised,
    Rank,
)
from ddpdoctor.model.launch import Connecting
from ddpdoctor.model.stacks import Frame, Stack, StackSample
from ddpdoctor.rules.engine import judge
from ddpdoctor.rules.registry import find_rule, rules_of

S = 1_000_000_000
NOW = 1000 * S
TIMEOUT_S = 10.0
LONG_AGO = NOW - 60 * S
TORCH = "/usr/lib/python3/site-packages/torch"
C10D = Frame(file=f"{TORCH}/distributed/distributed_c10d.py", line=3000, function="all_reduce", user=False)
AUTOGRAD = Frame(file=f"{TORCH}/autograd/graph.py", line=800, function="_engine_run_backward", user=False)
QUEUE = Frame(file="/usr/lib/python3.11/queue.py", line=171, function="get", user=False)
LOCK = Frame(file="/usr/lib/python3.11/threading.py", line=324, function="wait", user=False)


def line(number, function="main", file="/home/me/train.py"):
    return Frame(file=file, line=number, function=function, user=True)


def stack(*frames, main=True, daemon=False, thread="MainThread"):
    return Stack(thread=thread, is_main=main, is_daemon=daemon, frames=frames)


def sample(*stacks, by="sampler"):
    return StackSample(time_ns=NOW, by=by, stacks=stacks)


def call(op="all_reduce", seq=None, site=20, *, index=100, open_=True, **more):
    fields = {
        "api": op, "group": "0", "dtype": "torch.float32", "shape": (16,), "tensors": 1, "peer": None, "redop": None,
        "started_ns": LONG_AGO, "ended_ns": None if open_ else LONG_AGO + S, "is_async": False, "failed": False,
        "thread_is_main": True,
    }  # fmt: skip
    fields.update(more)
    return Call(index=index, op=op, seq=seq, site=line(site) if isinstance(site, int) else site, **fields)


def phase(op, site=30, **more):
    return call(op, None, site, dtype=None, shape=None, tensors=0, **more)


def backwards(count, start=1, last=6):
    """Return the ended calls of so many training steps, of which the last reduced under the number ``last``."""
    found = []
    for i in range(count):
        begun = last - count + i
        found.append(phase("ddp_forward", 29, index=start + 2 * i, open_=False, begun=begun))
        found.append(phase("backward", 30, index=start + 2 * i + 1, open_=False, begun=begun))
    return tuple(found)


def pack_calls(calls):
    """Return calls packed; packed ones as they are."""
    if isinstance(calls, CallLog):
        return calls
    places = {}
    which = array("L", [places.setdefault(call.kind, len(places)) for call in calls])
    known = ((call.seq, call.begun, call.awaits) for call in calls)
    columns = (
        which,
        array("Q", [call.index for call in calls]),
        array("q", [next((one for one in numbers if one is not None), -1) for numbers in known]),
        array("Q", [call.started_ns for call in calls]),
        array("Q", [call.ended_ns or 0 for call in calls]),
    )
    return CallLog(tuple(places), columns)


def group(enqueued, world, name="0", ranks=None):
    return GroupState(
        name=name, ranks=tuple(range(world)) if ranks is None else ranks, backend="gloo", enqueued=enqueued
    )


def rank(number, world=3, **more):
    fields = {
        "local_rank": number, "host": "node0", "pid": 1000 + number, "attempt": 0, "life": Life.RUNNING,
        "proc_state": "S", "recorded": True, "answered": True, "started_ns": LONG_AGO - 100 * S, "world_size": world,
        "initialized": True, "last_progress_ns": LONG_AGO,
    }  # fmt: skip
    fields.update(more)
    return Rank(rank=number, **{**fields, "recent_calls": pack_calls(fields.get("recent_calls", ()))})


def in_user(number, *frames, world=3, enqueued=6, **more):
    frames = frames or (line(40), line(12, "read_batch"))
    more.setdefault("samples", (sample(stack(*frames)),))
    more.setdefault("groups", (group(enqueued, world),))
    return rank(number, world, **more)


def in_call(number, op="all_reduce", seq=7, site=20, world=3, recent=(), **more):
    handled = more.pop("handled", None)
    pending = call(op, seq, site, **more)
    seen = {"samples": (sample(stack(line(site), C10D)),), "handled": handled}
    return rank(number, world, open_calls=(pending,), recent_calls=recent, groups=(group(seq, world),), **seen)


def in_backward(number, enqueued=7, world=3, site=30, steps=3, **more):
    pending = phase("backward", site, index=100, begun=None if enqueued is None else enqueued - 1)
    more.setdefault("recent_calls", backwards(steps))
    more.setdefault("groups", (group(enqueued, world),) if enqueued is not None else ())
    more.setdefault("samples", (sample(stack(line(site), AUTOGRAD)),))
    return rank(number, world, open_calls=(pending,), **more)


def in_init(number, world=3, **more):
    return rank(
        number,
        world,
        initialized=False,
        open_calls=(phase("init_process_group", 5),),
        samples=(sample(stack(line(5))),),
        **more,
    )


def before_init(number, world=3, **more):
    return rank(number, world, initialized=False, world_size=None, samples=(sample(stack(line(3))),), **more)


def at_end(number, *stacks, **more):
    return rank(number, main_ended_ns=LONG_AGO, samples=(sample(stack(LOCK), *stacks),), **more)


def moving(found):
    return replace(found, last_progress_ns=NOW - S)


def ended(number, world=3, **more):
    fields = {"life": Life.EXITED, "exit_code": 0, "ended_ns": LONG_AGO, "proc_state": None}
    fields.update(more)
    return rank(number, world, **fields)


def error(kind="ValueError", message="bad", at=LONG_AGO, frames=None, **more):
    fields = {
        "thread_is_main": True,
        "uncaught": True,
        "in_call": None,
        "frames": frames or (line(40), line(7, "parse")),
    }
    fields.update(more)
    return Raised(type=kind, message=message, time_ns=at, **fields)


def crashed(number, raised=None, world=3, **more):
    fields = {"exit_code": 1, "raised": (raised or error(),)}
    fields.update(more)
    return ended(number, world, **fields)


def failed_in(number, op, seq=None, site=20, message="Connection closed by peer", at=LONG_AGO + S, **more):
    """A rank whose call of torch.distributed, or whose backward, raised."""
    last = AUTOGRAD if op == "backward" else C10D
    frames = (line(site), last)
    failed = (
        call(op, seq, site, failed=True, open_=False) if seq else phase(op, site, failed=True, index=100, open_=False)
    )
    raised = error("RuntimeError", message, at, frames, in_call=op)
    return crashed(number, raised, recent_calls=(*backwards(3), failed), ended_ns=at + S, **more)


def killed(number, signal="SIGKILL", world=3, **more):
    fields = {"life": Life.SIGNALED, "exit_code": None, "signal": signal, "last_place": line(9)}
    fields.update(more)
    return ended(number, world, **fields)


def child(*frames, idle=False, name="worker"):
    return Child(pid=77, name=name, proc_state="S", samples=(sample(stack(*frames)),), idle=idle)


def job(*ranks, **more):
    fields = {
        "now_ns": NOW, "hang_timeout_s": TIMEOUT_S, "world_size": len(ranks), "nnodes": 1,
        "local_ranks_expected": len(ranks), "ended": False, "launched_ns": LONG_AGO - 200 * S,
    }  # fmt: skip
    fields.update(more)
    return Job(ranks=tuple(ranks), **fields)


def model_of(name):
    """A model that DDP keeps equal in the group of this name."""
    return ModelSeen(group=name, digest="d", count=0, tensors=(), site=None)


# Ranks that are held up, or that end in ways of their own.


def helper_error(who=Helper.TASK):
    return HelperError(who=who, name="rollout", error=error("LookupError", frames=(line(9, "rollout"),)))


def held_in_loader(number):
    fetch = phase("next_batch", 50)
    children = (child(line(88, "read_csv"), QUEUE), child(line(2), QUEUE, idle=True))
    return in_user(number, line(50), QUEUE, open_calls=(fetch,), children=children)


def stopped_in_call(number, **more):
    return rank(number, proc_state="T", open_calls=(call("all_reduce", 7),), groups=(group(7, 3),), **more)


def tearing_down(number, ended_ns, **more):
    """A rank whose last look was taken while its script still ran."""
    early = replace(sample(stack(line(8))), time_ns=ended_ns - S)
    fields = {"main_ended_ns": ended_ns, "samples": (early,), "proc_state": "R", "last_progress_ns": ended_ns}
    return rank(number, **{**fields, **more})


FINGERPRINT = "Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint"
TIMED_OUT = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"
WORKER_ERROR = error(
    "KeyError", "Caught KeyError in DataLoader worker process 0.", frames=(line(88, "get"),), from_child=True
)
SIGCHLD = Frame(file=f"{TORCH}/utils/data/_utils/signal_handling.py", line=72, function="handler", user=False)
LAYER_ERROR = error(
    "RuntimeError", "mat1 and mat2 shapes cannot be multiplied", in_call="ddp_forward",
    frames=(line(30), line(12, "step")),
)  # fmt: skip
ABORT = {"signal": "SIGABRT", "last_place": line(20)}


def aborted_in_call(number, **more):
    return killed(number, open_calls=(call(seq=7, **more),), recent_calls=backwards(3), **ABORT)


CHILD_FAILED = error("CalledProcessError", "returned non-zero exit status 1", LONG_AGO + 2 * S, frames=(line(50),))
OF_CHILD = HelperError(who=Helper.CHILD, name="77", error=error("KeyError", at=LONG_AGO, frames=(line(61),)))
OF_VICTIM = replace(OF_CHILD, error=error("RuntimeError", at=LONG_AGO - S, frames=(line(62),), in_call="all_reduce"))


def own_error_then(number, op, message="Connection closed by peer"):
    """A rank that handled an error of its own, and whose call meanwhile failed."""
    data = {"shape": None, "dtype": None} if op == "barrier" else {}
    failed = call(op, 7, 14, failed=True, open_=False, **data)
    raised = error("RuntimeError", message, LONG_AGO + S, (line(14), C10D), in_call=op, first=error())
    return crashed(number, raised, recent_calls=(*backwards(3), failed), ended_ns=LONG_AGO + 2 * S)


def lost_in_step(number):
    """A rank whose backward failed, and then the barrier of its ``finally``."""
    then = own_error_then(number, "barrier")
    in_step = error(
        "RuntimeError", "Detected mismatch", frames=(line(30), AUTOGRAD), in_call="backward", uncaught=False
    )
    return replace(then, raised=(in_step, *(replace(one, first=None) for one in then.raised)))


def own_limit(number, **more):
    """A rank that another thread of its own ended."""
    return ended(number, exit_code=17, ended_by_thread=EndedByThread(place=line(80, "watch")), **more)


def thrown_out(number, at):
    """A rank whose backward raised after the stop of the job had begun, and which SIGTERM then ended on its way out."""
    gone = {"life": Life.SIGNALED, "exit_code": None, "signal": "SIGTERM", "after_stop": True, "main_ended_ns": at + S}
    return failed_in(number, "backward", at=at, **gone)


def limited(found, timeout_s):
    groups = tuple(replace(one, timeout_s=timeout_s) for one in found.groups)
    return replace(found, groups=groups)


def waiting(number, timeout_s=None, **more):
    return limited(in_call(number, **more), timeout_s)


def stood(seconds, *ranks):
    """A job of which the launcher was killed when its ranks had not got on for so long."""
    ranks = (replace(one, last_progress_ns=NOW - seconds * S) for one in ranks)
    return job(*ranks, ended=True, launcher_status=143, hang_timeout_s=300.0, stopping_since_ns=NOW)


NCCL_ERROR = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:92, invalid usage (run with NCCL_DEBUG=WARN "
    "for details), NCCL version 2.30.7\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\n"
)


def shares(pairs, last="Duplicate GPU detected : rank {} and rank {} both on CUDA device 1b000"):
    """Four ranks, of which some raise what NCCL says of these pairs."""
    ranks = [in_user(n, world=4) for n in range(4)]
    for n, pair in pairs.items():
        ranks[n] = failed_in(n, "all_reduce", 1, message=NCCL_ERROR + last.format(*pair), world=4)
    return job(*ranks)


def gave_up(number, after_s=8.0, raised_s=9.0, limit_s=8.0):
    """A rank that timed out in a call so long after the call began."""
    failed = call("all_reduce", 7, failed=True, open_=False, ended_ns=LONG_AGO + int(after_s * S))
    text = "Timed out waiting 8000ms for recv operation to complete"
    raised = error("RuntimeError", text, LONG_AGO + int(raised_s * S), (line(20), C10D), in_call="all_reduce")
    return limited(crashed(number, raised, recent_calls=(failed,), groups=in_call(number).groups), limit_s)


WORK = (line(12, "tokenize"),)


def came(number, after_s, lines=WORK, limit_s=8.0):
    """A rank that came to that call so long after the others, from these lines."""
    began_ns = LONG_AGO + int(after_s * S)
    seen = BeforeCall(until_ns=began_ns + S // 100, lines=lines) if lines else None
    return limited(replace(in_call(number, started_ns=began_ns), before_call=seen), limit_s)


# Jobs of several nodes.


def node(number, presence=Presence.HERE, **more):
    fields = {"host": f"node{number}", "gathered": presence in (Presence.HERE, Presence.LEFT), "heard_ns": LONG_AGO}
    fields.update({"heard_ns": None} if presence is Presence.ABSENT else {}, **more)
    return NodeSeen(number=number, presence=presence, **fields)


def nodes_of(*nodes, own=0, **more):
    return NodesSeen(expected=len(nodes), own=own, nodes=nodes, **more)


def of_nodes(*ranks, nodes, world=4, own=0, alone=False, of_ranks=False, **more):
    """A job of two ranks a node, as the node ``own`` sees it."""
    fields = {
        "world_size": world, "nnodes": len(nodes), "local_ranks_expected": 1 if of_ranks else 2,
        "may_run_elsewhere": True, "host": f"node{own}", "node_rank": own,
        "members": nodes_of(*nodes, own=own, of_ranks=of_ranks, alone_since_ns=LONG_AGO if alone else None),
    }  # fmt: skip
    fields.update(more)
    return job(*ranks, **fields)


def tried(host, contact, error=""):
    return Connecting(host=host, address=None, port=29500, contact=contact, error=error)


# Asks rules as the verbs do: facts in, findings and checks out.


def judge_about(family, *facts):
    """Ask all rules of a family about these facts."""
    return judge(rules_of(family), {type(one): [one] for one in facts})


def ask(name, *facts):
    """Ask one rule, by its code or kind; without facts there is nothing to ask it about."""
    return judge([find_rule(name)], {type(one): [one] for one in facts})


def sureness(judged):
    """Return how sure it is that the job hangs."""
    flags = [name for name in ("certain", "proven") if getattr(judged, name, False)]
    return ", ".join([*flags] or ["open"]) + ("" if judged.findings else ", nothing found")


def asking(name):
    """Return a function that asks one rule about the facts that it is given."""
    return lambda *facts: ask(name, *facts)
