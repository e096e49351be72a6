"""A rank that is watched and measures nothing: its calls are barriers over the store, and need no torch.

    watched_rank.py FOLDER RANK WORLD PORT HANG_TIMEOUT FAULT

It leaves ``at-RANK-CALL`` in the folder when it has come to a call, and ``report-RANK`` when it reports. A fault acts
before call 3. The hang timeout counts from there: on a busy machine it may take any time to come so far.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from ddpdoctor.exchange.meeting import meet
from ddpdoctor.model.bandwidth import Member
from ddpdoctor.model.codec import encode
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher
from ddpdoctor.probes.bandwidth.collectives import Tracker
from ddpdoctor.probes.bandwidth.watch import GIL_LIMIT_S, Watcher

FOLDER, RANK, WORLD, PORT, HANG_TIMEOUT_S, FAULT = Path(sys.argv[1]), *sys.argv[2:]
RANK, WORLD, PORT, HANG_TIMEOUT_S = int(RANK), int(WORLD), int(PORT), float(HANG_TIMEOUT_S)
REPORT_STATUS = 7
EVERYBODY = tuple(range(WORLD))
HANGS = ("stuck", "stop", "end", "gil")
START_S = 300.0
"""How much longer than the hang timeout a rank may take to come to call 3."""


def mark(name):
    (FOLDER / name).touch()


def wait_for_file(name):
    while not (FOLDER / name).exists():
        time.sleep(0.01)


def wait_for_all(conversation, place):
    """Wait until all ranks have come to a place: those of a bench have agreed before they are watched."""
    conversation.add(place, 1)
    while conversation.add(place, 0) < WORLD:
        time.sleep(0.01)


def wait_for_local_ranks(watcher):
    """Wait until this rank's watcher knows the processes of the others: within milliseconds of its start."""
    while len(watcher.local_ranks.ranks) < WORLD - 1:
        time.sleep(0.01)


def barrier(conversation, tracker, ranks):
    tracker.enter("barrier", ranks)
    key = barrier_key(ranks, tracker.calls)
    conversation.add(key, 1)
    while conversation.add(key, 0) < len(ranks):
        time.sleep(0.005)
    tracker.leave()


def barrier_key(ranks, call):
    return f"barrier/{'-'.join(map(str, ranks))}/{call}"


def wait_for_others_in_call_3(conversation):
    while conversation.add(barrier_key(EVERYBODY, 3), 0) < WORLD - 1:
        time.sleep(0.01)


def hold_up():
    while True:
        time.sleep(60)  # STUCK


def pair_up(conversation, tracker):
    """Ranks 0 and 1 have much to do with each other, for which rank 2 waits."""
    for _ in range(15 if RANK < 2 else 0):
        time.sleep(HANG_TIMEOUT_S / 10)
        barrier(conversation, tracker, (0, 1))


def act(conversation, tracker):
    if FAULT == "stuck":
        hold_up()
    if FAULT == "raise":
        raise ValueError("no such thing\nand more")
    if FAULT == "exit":
        os._exit(3)
    if FAULT == "pair":
        pair_up(conversation, tracker)
    if FAULT == "slow":
        tracker.at("measure", "a large one", allowance_s=60)
        time.sleep(1.5 * HANG_TIMEOUT_S)
    if FAULT == "wait":
        wait_for_file("go")
    if FAULT == "end":
        return
    if FAULT == "gil":
        ctypes.PyDLL(None).sleep(3600)  # HOLDS THE GIL
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def run(conversation, tracker, watcher):
    for number in range(1, 6):
        if number == 3:
            wait_for_local_ranks(watcher)
            wait_for_all(conversation, "call 3")
        tracker.at("measure", f"call {number}", allowance_s=START_S if number < 3 else 0.0)
        mark(f"at-{RANK}-{number}")
        if number == 3 and FAULT in HANGS:
            wait_for_others_in_call_3(conversation)
        if number == 3:
            act(conversation, tracker)
            if FAULT == "end":
                return
        barrier(conversation, tracker, EVERYBODY)


def finish(stop):
    if FAULT == "badreport":
        raise RuntimeError("the disk is full")
    (FOLDER / f"report-{RANK}").write_text(json.dumps(encode(stop)))
    return REPORT_STATUS


def main():
    launch = Launch(
        launcher=Launcher.OWN, rank=RANK, world_size=WORLD, nnodes=1, hosts=("127.0.0.1",), port=PORT, agent_store=True
    )  # fmt: skip
    with meet(launch, os.environ, 100) as meeting:
        conversation, tracker = meeting.begin("probe"), Tracker()
        more = {"host": "here", "pid": 0, "device": "cpu", "device_name": "", "cores": 1, "version": "", "torch": ""}
        wait_for_all(conversation, "here")
        members = tuple(Member(rank=rank, local_rank=rank, **more) for rank in EVERYBODY)
        watched = Watcher(
            rank=RANK, members=members, tracker=tracker, conversation=conversation,
            hang_timeout_s=HANG_TIMEOUT_S, finish=finish,
            gil_limit_s=2.0 if FAULT == "gil" else GIL_LIMIT_S, clean_up=lambda: mark(f"clean-{RANK}"),
        )  # fmt: skip
        with watched:
            run(conversation, tracker, watched)
        mark(f"end-{RANK}")


main()
