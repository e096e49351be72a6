"""Compares the replicas of a job while it runs: those of this node, and those of all nodes with each other."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.exchange.conversation import BadRecord
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.launch.node_messages import find
from ddpdoctor.model.consistency import NodeStreams, RootsReport, RootsRequest
from ddpdoctor.model.facts import REPLICAS_NAME
from ddpdoctor.recorder.storage.files import remove

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ddpdoctor.collect.fingerprint_compare import Comparer
    from ddpdoctor.collect.fingerprint_files import NodeIndex
    from ddpdoctor.collect.fingerprint_nodes import Joint
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.launch.evidence import Followed
    from ddpdoctor.launch.first_node import FirstNode
    from ddpdoctor.launch.other_node import OtherNode
    from ddpdoctor.model.consistency import Consistency, Stream

SAVE_EVERY_S = 5.0  # our choice: how often the results so far are written for `ddpdoctor status`, if there are new ones
# Our choice: with headers this adds about 200 bytes a second to the heartbeats, and the data kept meanwhile fits.
EVERY_S = 3.0
SOON_S = 0.5  # our choice: the pause while requested contents are on their way
CLOSE_LIMIT_S = 2.0
ROOTS = "replicas/roots"
WORD = "replicas/word"
CONTENTS = "replicas/contents"


class SharedReplicas:
    """The fingerprints of the current attempt, which this node exchanges with the others from ``start`` to ``close``.

    They have a lock: the session writes, another thread reads. After an error that one tries again; watching does not
    need it.
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        """Start without an attempt; ``allowed`` are name patterns of tensors that may differ."""
        self.lock = threading.RLock()
        self.failure: Exception | None = None
        self._allowed = allowed
        self._index: NodeIndex | None = None
        self._comparer: Comparer | None = None
        self._joint: Joint | None = None
        self._turn = 0  # the number of the last request for contents that this node has answered
        self._sent: RootsReport | None = None
        self._word: RootsRequest | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, attempt: int) -> NodeIndex:
        """Start an attempt and return its new index. All nodes use the same number for the same attempt."""
        from ddpdoctor.collect.fingerprint_files import NodeIndex

        self._index, self._comparer, self._joint = NodeIndex(attempt), None, None
        return self._index

    def follow(self, comparer: Comparer) -> bool:
        """Use the comparer's latest state; return whether a difference between nodes was found for the first time."""
        self._comparer = comparer
        return self._joint is not None and self._joint.compare(time.monotonic())

    def kept(self, names: tuple[str, ...] | None = None) -> NodeStreams:
        """Return the kept points of the named streams, or of all streams that other nodes write too."""
        from ddpdoctor.collect.fingerprint_files import pack_stream

        with self.lock:
            index, comparer = self._index, self._comparer
            if index is None or comparer is None:
                return NodeStreams()
            chosen = [stream for stream in index.shared() if names is None or stream.name in names]
            return NodeStreams(streams=tuple(pack_stream(stream, comparer.found_here(stream.key)) for stream in chosen))

    def results(self) -> tuple[Stream, ...]:
        """Return the results over all nodes so far, on the first node."""
        with self.lock:
            return tuple(stream.found for stream in self._joint.found().streams) if self._joint is not None else ()

    def save(self, folder: Path, attempt: int | None) -> None:
        """Write the kept points, and on the first node the result over all nodes; raises OSError."""
        from ddpdoctor.collect.fingerprint_nodes import JOINT, POINTS
        from ddpdoctor.collect.run_files import attempt_name, save

        if self._index is not None:
            save(folder / attempt_name(POINTS, attempt), self.kept())
        if self._joint is not None:
            save(folder / attempt_name(JOINT, attempt), self._joint.found())

    def start(self, member: FirstNode | OtherNode) -> None:
        self._thread = threading.Thread(target=self._run, args=(member,), name="ddpdoctor-replicas", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. A call that hangs ends at its own limit; this does not wait for it."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_LIMIT_S)

    def _run(self, member: FirstNode | OtherNode) -> None:
        while not self._ended.wait(EVERY_S if self._word is None or not self._word.wanted else SOON_S):
            try:
                self.exchange(member)
            except Exception as error:  # noqa: BLE001 - watching the job continues without the others
                self.failure = self.failure or error

    def exchange(self, member: FirstNode | OtherNode) -> None:
        conversation = member.conversation()
        if conversation is None or member.number is None:
            return
        try:
            if member.is_first:
                self._hear(conversation, member.members.numbers())
            else:
                self._report(conversation, member.number)
        except StoreError:
            if not member.is_first:
                member.reconnect()

    def _report(self, conversation: Conversation, number: int) -> None:
        """Send the first node this node's report, and what it asks for."""
        with self.lock:
            report = RootsReport(roots=self._index.report() if self._index is not None else ())
        if report != self._sent:
            conversation.send(f"{ROOTS}/{number}", report)
            self._sent = report
        word = find(conversation, RootsRequest, WORD)
        if word is None:
            return
        with self.lock:  # forget the points that the first node has found to be equal everywhere
            streams = self._index.streams if self._index is not None else {}
            for name, upto in word.settled.items():
                if name in streams:
                    streams[name].forget(upto)
        if word.turn > self._turn and word.wanted:
            for name in word.wanted:
                conversation.send(f"{CONTENTS}/{number}/{word.turn}/{name}", self.kept((name,)))
            self._turn = word.turn

    def _hear(self, conversation: Conversation, others: list[int]) -> None:
        """Take in, on the first node, what the others report, and ask them for contents."""
        from ddpdoctor.collect.fingerprint_nodes import Joint

        for number in others:
            report = find(conversation, RootsReport, f"{ROOTS}/{number}")
            if report is not None:
                with self.lock:
                    if self._joint is None and self._index is not None:
                        self._joint = Joint(self._index, self._allowed)
                    if self._joint is not None:
                        self._joint.hear(number, report.roots, time.monotonic())
        with self.lock:
            word = self._joint.word() if self._joint is not None else RootsRequest()
        for name in word.wanted:
            for number in others:
                with contextlib.suppress(BadRecord):  # a damaged record counts as an empty answer
                    key = f"{CONTENTS}/{number}/{word.turn}/{name}"
                    sent = conversation.wait(NodeStreams, key, 0.0, f"node {number}", take=True)
                    with self.lock:
                        if sent is not None and self._joint is not None:
                            self._joint.answered(number, sent)
        if word != self._word:
            conversation.send(WORD, word)
            self._word = word


class LiveComparison:
    """Compares the replicas of each attempt of a job. It imports what compares late: no rank waits for that."""

    def __init__(
        self, folder: Path, check_every: int, allowed: tuple[str, ...], shared: SharedReplicas | None = None
    ) -> None:
        """Take the recorders' folder and what is shared with other nodes. With ``check_every`` 0, comparing is off."""
        self.has_news = False  # whether a difference was found that has not been reported yet
        self.failure: Exception | None = None  # the error that ended the comparing
        self._folder = folder
        self._check_every = check_every
        self._allowed = allowed
        self._shared = shared
        self._attempt = -1
        self._comparer: Comparer | None = None
        self._is_off = check_every == 0
        self._saved: Consistency | None = None  # what was saved last of this attempt
        self._next_save_s = 0.0

    def follow(self, attempt: int, ranks: Iterable[Followed], meeting: int | None = None) -> None:
        """Compare what was written since the last call. ``meeting``: the number that all nodes give this attempt."""
        with self._wall():
            if attempt != self._attempt:
                # Save the results of an attempt that the launcher gave up on. Drop those from before the first
                # attempt.
                from ddpdoctor.collect.fingerprint_nodes import COMPARISON, JOINT, POINTS
                from ddpdoctor.collect.run_files import attempt_name

                if self._attempt >= 0:
                    self._end(self._attempt)
                self._comparer = self._saved = None
                for name in (*map(attempt_name, (COMPARISON, POINTS, JOINT)), REPLICAS_NAME):
                    remove(self._folder / name)
                self._attempt = attempt
            if self._comparer is None and not self._is_off:
                from ddpdoctor.collect.fingerprint_compare import Comparer

                number = attempt if meeting is None else meeting
                index = self._shared.begin(number) if self._shared is not None else None
                prints = self._folder / "prints"
                self._comparer = Comparer(prints, check_every=self._check_every, allowed=self._allowed, index=index)
            if self._comparer is not None:
                from ddpdoctor.collect.fingerprint_files import Writer

                self.has_news |= self._comparer.compare(
                    Writer(pid=r.pid, ticks=r.ticks, began_ns=r.cells.get("started_ns", 0), ended_ns=r.ended_ns)
                    for r in ranks
                )
            if self._comparer is not None and self._shared is not None:
                self.has_news |= self._shared.follow(self._comparer)
            now_s = time.monotonic()
            if self._comparer is None or now_s < self._next_save_s:
                return
            from ddpdoctor.collect.run_files import save

            # The results so far have a file of their own: if the watcher is killed, a report must not take them for
            # all there is.
            self._next_save_s = now_s + SAVE_EVERY_S
            found = self._comparer.consistency()
            joint = self._shared.results() if self._shared is not None else ()
            found = replace(found, streams=(*joint, *(stream for stream in found.streams if stream.compared)))
            if found.streams and found != self._saved:
                with contextlib.suppress(OSError):  # a full disk costs the news and nothing else
                    save(self._folder / REPLICAS_NAME, found)
                    self._saved = found

    def save(self) -> None:
        with self._wall():
            if self._comparer is not None:
                self._write(self._comparer.consistency(), None)

    def close(self) -> None:
        """Compare the rest after the job has ended, save the results, and remove the ranks' files."""
        with self._wall():
            self._end(None)

    def _end(self, attempt: int | None) -> None:
        comparer, self._comparer = self._comparer, None
        if comparer is not None and self._write(comparer.close(), attempt):
            comparer.remove_files()

    def _write(self, found: Consistency, attempt: int | None) -> bool:
        """Save the results completely or not at all; return False on a full disk, where the ranks' files then stay."""
        from ddpdoctor.collect.fingerprint_nodes import COMPARISON
        from ddpdoctor.collect.run_files import attempt_name, save

        try:
            save(self._folder / attempt_name(COMPARISON, attempt), found)
            if self._shared is not None:
                self._shared.save(self._folder, attempt)
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def _wall(self) -> Iterator[None]:
        try:
            with self._shared.lock if self._shared is not None else contextlib.nullcontext():
                yield
        except Exception as error:  # noqa: BLE001 - the wall around a collector: watching continues without it
            self.failure, self._comparer, self._is_off = error, None, True
