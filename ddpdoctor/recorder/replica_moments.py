"""Writes down what a replica is like: after a step of an optimizer, at a forward, after a sync of buffers, at the end.

Which moments are due is told by their numbers alone, which are equal on all ranks: 1, 2, 4 and so on below N, then the
multiples of N. Nothing here talks to other ranks, and nothing is left on a GPU or in autograd.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Dict, List, Optional

from . import print_wire, replica_rows
from .replica_files import PrintFiles
from .replica_rows import Rows
from .replica_values import fitted, model_values, optimizer_values, site
from .replicas import Replica

GPU_WAIT_S = 1.0
"""How long the end waits for a GPU that is still at work: it may stand in a collective that never completes. Ours."""


def next_due(number: int, every: int) -> int:
    """Return the first number after ``number`` at which replicas are looked at."""
    power = 1 << number.bit_length()
    return power if power < every else (number // every + 1) * every


def may_look() -> bool:
    """Return whether tensors can be read now: not in code that is being compiled, or captured as a graph of a GPU's."""
    torch: Any = sys.modules["torch"]
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class StepMoments:
    """The moments of one model by the clock of one optimizer."""

    def __init__(self, replica: Replica, optimizer: Any) -> None:
        replica.optimizers += 1
        self.replica = replica
        self._files = PrintFiles(_about(replica, print_wire.STEP, replica.optimizers))
        self._forwards, self._unreduced = replica.before_step
        self._gradients: Rows = []
        self._prints: Optional[bytes] = None
        self.sample: Any = None
        """One of the parameters that the optimizer changes."""
        self._left = (0, 0)
        """Its version, and where it was, when the last step had ended."""
        self._between = 0
        self.follow(optimizer)

    def follow(self, optimizer: Any) -> None:
        """Find anew what the optimizer holds of the model."""
        held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        self._named = [(n, t) for n, t in replica_rows.named_parameters(self.replica) if id(t) in held]
        trained = [tensor for _, tensor in self._named if tensor.requires_grad]
        if trained and trained[0] is not self.sample:
            self.sample = trained[0]
            self._leave()
            self._between = 0

    def begins(self) -> None:
        """Note that a step begins: what the script has done to parameters since the last one is its habit."""
        self._prints = None
        if self.sample is not None:
            self._between = self.sample._version - self._left[0]

    def ended(self) -> None:
        """Note that a step has ended."""
        replica = self.replica
        self._forwards, self._unreduced = replica.before_step = (replica.forwards, replica.unreduced_forwards)
        self._leave()

    def _leave(self) -> None:
        if self.sample is not None:
            self._left = (self.sample._version, self.sample.data_ptr())

    def is_edited(self) -> bool:
        """Return whether parameters were changed since the last step other than between steps before it.

        So it is where one rank loads the best weights, or folds them, for an evaluation after training.
        """
        if self.sample is None:
            return False
        version, place = self._left
        module = self.replica.module()
        is_there = module is not None and any(tensor is self.sample for tensor in module.parameters())
        return not is_there or self.sample.data_ptr() != place or self.sample._version != version + self._between

    def look_before(self) -> None:
        """Take the gradients as the optimizer is given them."""
        self._gradients = replica_rows.gradient_rows(self._named)
        self._prints = _prints_of(self._gradients)

    def look_after(self, number: int, optimizer: Any, optimizers: List[Any], frame: Any) -> None:
        """Write the record of step ``number``.

        Gradients that a closure has computed within the step are taken here.
        """
        if self._prints is None:
            self.look_before()
        rows, taken = self._gradients, self._prints or b""
        self._gradients, self._prints = [], None
        replica = self.replica
        named = replica_rows.named_parameters(replica)
        after = replica_rows.parameter_rows(named) + replica_rows.state_rows(self._named, optimizer)
        if not replica.syncs_buffers:
            after += replica_rows.buffer_rows(replica)
        values = dict(
            model_values(replica, named, optimizers),
            steps=number,
            forwards=replica.forwards - self._forwards,
            unreduced_forwards=replica.unreduced_forwards - self._unreduced,
            site=site(frame),
        )
        values.update(optimizer_values(optimizer))
        _write(self._files, number, values, rows + after, taken + _prints_of(after))


class ModelMoments:
    """The moments of one model by its own clocks."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.forward_due = 1
        self.sync_due = 0
        self._forward_files: Optional[PrintFiles] = None
        self._sync_files: Optional[PrintFiles] = None
        self._forwards = 0
        self._unreduced = 0

    def look_at_forward(self, optimizers: List[Any], frame: Any) -> None:
        """Write parameters, and buffers that nobody sends, at a forward."""
        replica = self.replica
        if self._forward_files is None:
            self._forward_files = PrintFiles(_about(replica, print_wire.FORWARD))
        values = self._values(optimizers)
        values["site"] = site(frame)
        _write_rows(self._forward_files, replica.reductions, values, _whole(replica))
        self._forwards = replica.forwards
        self._unreduced = replica.unreduced_forwards

    def look_after_sync(self) -> None:
        """Write the buffers that DDP has just sent."""
        replica = self.replica
        if self._sync_files is None:
            self._sync_files = PrintFiles(_about(replica, print_wire.SYNC))
        values = {"steps": 0, "reductions": replica.reductions, "forwards": 0, "unreduced_forwards": 0}
        _write_rows(self._sync_files, replica.reductions, values, replica_rows.buffer_rows(replica))

    def look_at_end(self, optimizers: List[Any], steps: int) -> None:
        """Write the model as training has left it, after so many steps of its first optimizer."""
        replica = self.replica
        files = PrintFiles(_about(replica, print_wire.END), most_records=1)
        values = dict(self._values(optimizers), steps=steps)
        _write_rows(files, replica.reductions, values, _whole(replica))

    def _values(self, optimizers: List[Any]) -> Dict[str, Any]:
        replica = self.replica
        return dict(
            model_values(replica, replica_rows.named_parameters(replica), optimizers),
            steps=0,
            forwards=replica.forwards - self._forwards,
            unreduced_forwards=replica.unreduced_forwards - self._unreduced,
        )


def gpu_is_idle() -> bool:
    """Return whether the GPU has done, or does soon, all that it was given: then it can be read without a hang."""
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return True
    until = time.monotonic() + GPU_WAIT_S
    while not torch.cuda.current_stream().query():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _whole(replica: Replica) -> Rows:
    rows = replica_rows.parameter_rows(replica_rows.named_parameters(replica))
    return rows if replica.syncs_buffers else rows + replica_rows.buffer_rows(replica)


def _about(replica: Replica, clock: str, optimizer: int = 0) -> Dict[str, Any]:
    """Return the table of a stream without its rows."""
    return {
        "clock": clock,
        "group": replica.group,
        "ranks": list(replica.ranks),
        "model": replica.number,
        "optimizer": optimizer,
        "rank": replica.rank,
    }


def _prints_of(rows: Rows) -> bytes:
    from .fingerprint import prints

    return prints([tensor for _, tensor in rows])


def _write_rows(files: PrintFiles, number: int, values: Dict[str, Any], rows: Rows) -> None:
    _write(files, number, values, rows, _prints_of(rows))


def _write(files: PrintFiles, number: int, values: Dict[str, Any], rows: Rows, taken: bytes) -> None:
    if rows:
        files.write(number, fitted(values), [row for row, _ in rows], taken)
