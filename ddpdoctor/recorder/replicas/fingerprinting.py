"""Fingerprints a replica after an optimizer's step, at a forward, after a buffer broadcast, and at the end.

``schedule`` says which of them are due. Nothing here communicates with other ranks, and nothing is left on a GPU or in
autograd.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any, Dict, List, Optional

from .. import frames
from ..capture import is_capturing
from ..storage import fingerprint_layout
from . import schedule, tensors, unwrapped
from .ddp_models import Replica
from .files import FingerprintFiles
from .optimizers import Untrained
from .tensors import Rows
from .values import fitted, model_values, optimizer_values

GPU_WAIT_S = 1.0
"""How long the end waits for a busy GPU, which may be in a collective that never completes. Our choice."""


def may_fingerprint() -> bool:
    """Return whether tensors can be read now: not while torch compiles or a CUDA graph is captured."""
    torch: Any = sys.modules["torch"]
    return not torch.compiler.is_compiling() and not is_capturing()


class StepFingerprints:
    """The fingerprints of one model at one optimizer's steps. It outlives the optimizer and keeps no tensor alive."""

    def __init__(self, replica: Any, optimizer: Any) -> None:
        self.replica = replica
        """A ``Replica``, or an ``Unwrapped`` if no DDP holds the parameters."""
        self.steps = 0
        self._files: Optional[FingerprintFiles] = None
        self._untrained = Untrained()
        self._forwards, self._unreduced = replica.before_step
        self._gradients: Rows = []
        self._taken: Any = None
        """Their ``fingerprint.Fingerprints``, read when the step has ended."""
        self._sample: Any = lambda: None
        """A weak reference to one parameter that the optimizer changes."""
        self._left = (0, 0)
        """The sample's version and address at the end of the last step."""
        self._between = 0
        self.follow(optimizer)

    def follow(self, optimizer: Any) -> None:
        """Update the sample after the optimizer's or the model's parameters may have changed."""
        trained = [tensor for _, tensor in self._named(optimizer) if tensor.requires_grad]
        if trained and trained[0] is not self._sample():
            self._sample = weakref.ref(trained[0])
            self._leave()
            self._between = 0

    def _named(self, optimizer: Any) -> List[Any]:
        held = {id(tensor) for tensor in tensors.held_by(optimizer)}
        return [named for named in tensors.named_parameters(self.replica) if id(named[1]) in held]

    def begins(self) -> None:
        """Note that a step begins, and count the script's usual changes to parameters since the last one."""
        self._taken = None
        sample = self._sample()
        if sample is not None:
            self._between = sample._version - self._left[0]

    def ended(self, steps: int) -> None:
        """Note that a step has ended."""
        replica = self.replica
        self.steps = steps
        self._forwards, self._unreduced = replica.before_step = (replica.forwards, replica.unreduced_forwards)
        replica.last_stepped = self
        if isinstance(replica, unwrapped.Unwrapped):
            unwrapped.stepped(replica, steps)
        self._leave()

    def _leave(self) -> None:
        sample = self._sample()
        if sample is not None:
            self._left = (sample._version, sample.data_ptr())

    def is_edited(self) -> bool:
        """Return whether parameters changed more since the last step than they did between the two steps before.

        That happens if one rank loads the best weights, or folds them, for an evaluation after training.
        """
        sample, module = self._sample(), self.replica.module()
        if sample is None or module is None or not any(tensor is sample for tensor in module.parameters()):
            return True
        version, place = self._left
        return bool(sample.data_ptr() != place or sample._version - version > self._between)

    def take_first(self) -> None:
        """Write the parameters as they are before the first step."""
        values = dict(model_values(self.replica, [], []), steps=0, forwards=0, unreduced_forwards=0)
        rows = tensors.parameter_rows(tensors.named_parameters(self.replica))
        _write_rows(self._own_files(), 0, values, rows)

    def take_before(self, optimizer: Any) -> None:
        """Fingerprint the gradients as the optimizer gets them."""
        self._gradients = tensors.gradient_rows(self._named(optimizer))
        self._taken = fingerprints_of(self._gradients)

    def take_after(self, number: int, optimizer: Any, optimizers: List[Any], frame: Any) -> None:
        """Write the record of step ``number``.

        If a closure computed the gradients within the step, they are fingerprinted here.
        """
        if self._taken is None:
            self.take_before(optimizer)
        rows, gradients = self._gradients, self._taken
        self._gradients, self._taken = [], None
        replica = self.replica
        named = tensors.named_parameters(replica)
        after = tensors.parameter_rows(named) + tensors.state_rows(self._named(optimizer), optimizer)
        if not replica.syncs_buffers:
            after += tensors.buffer_rows(replica)
        values = dict(
            model_values(replica, named, optimizers),
            steps=number,
            forwards=replica.forwards - self._forwards,
            unreduced_forwards=replica.unreduced_forwards - self._unreduced,
            site=frames.describe_user(frame),
            every=schedule.distance(),
        )
        values.update(optimizer_values(optimizer))
        before, taken = gradients.value(), fingerprints_of(after).value()
        values.update(self._untrained.find(named, taken, optimizer, optimizers))
        write(self._own_files(), number, values, rows + after, before + taken)

    def _own_files(self) -> FingerprintFiles:
        """Return the files to write to. An optimizer gets its number when they are first needed."""
        if self._files is None:
            self.replica.optimizers += 1
            self._files = FingerprintFiles(_about(self.replica, fingerprint_layout.STEP, self.replica.optimizers))
        return self._files


class ModelFingerprints:
    """The fingerprints of one model at its forwards, its buffer broadcasts, and its end."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.forward_taken = 0
        """The backwards with reductions when the model was last fingerprinted at a forward."""
        self.sync_taken = -1
        self._forward_files: Optional[FingerprintFiles] = None
        self._sync_files: Optional[FingerprintFiles] = None
        self._forwards = 0
        self._unreduced = 0

    def take_at_forward(self, optimizers: List[Any], frame: Any) -> None:
        """Write parameters, and buffers that DDP does not broadcast, at a forward."""
        replica = self.replica
        if self._forward_files is None:
            self._forward_files = FingerprintFiles(_about(replica, fingerprint_layout.FORWARD))
        values = self._values(optimizers)
        values["site"] = frames.describe_user(frame)
        _write_rows(self._forward_files, replica.reductions, values, _whole(replica))
        self._forwards = replica.forwards
        self._unreduced = replica.unreduced_forwards

    def take_after_sync(self) -> None:
        """Write the buffers that DDP has just broadcast."""
        replica = self.replica
        if self._sync_files is None:
            self._sync_files = FingerprintFiles(_about(replica, fingerprint_layout.SYNC))
        values = {"steps": 0, "reductions": replica.reductions, "forwards": 0, "unreduced_forwards": 0}
        _write_rows(self._sync_files, replica.reductions, values, tensors.buffer_rows(replica))

    def take_at_end(self, steps: int) -> None:
        """Write the model as training left it, after ``steps`` steps. The optimizers may be gone already."""
        replica = self.replica
        files = FingerprintFiles(_about(replica, fingerprint_layout.END), most_records=1)
        values = dict(self._values([]), steps=steps, stray=0, unheld=0)
        _write_rows(files, replica.reductions, values, _whole(replica))

    def _values(self, optimizers: List[Any]) -> Dict[str, Any]:
        replica = self.replica
        return dict(
            model_values(replica, tensors.named_parameters(replica), optimizers),
            steps=0,
            forwards=replica.forwards - self._forwards,
            unreduced_forwards=replica.unreduced_forwards - self._unreduced,
        )


def gpu_is_idle() -> bool:
    """Return whether the GPU finishes its work within ``GPU_WAIT_S``, so that it can be read without a hang."""
    torch: Any = sys.modules["torch"]
    if is_capturing():
        return False
    if not torch.cuda.is_initialized():
        return True
    until = time.monotonic() + GPU_WAIT_S
    while not torch.cuda.current_stream().query():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _whole(replica: Replica) -> Rows:
    rows = tensors.parameter_rows(tensors.named_parameters(replica))
    return rows if replica.syncs_buffers else rows + tensors.buffer_rows(replica)


def _about(replica: Replica, clock: str, optimizer: int = 0) -> Dict[str, Any]:
    """Return a stream's table without its rows."""
    return {
        "clock": clock,
        "group": replica.group,
        "ranks": list(replica.ranks),
        "model": replica.number,
        "optimizer": optimizer,
        "rank": replica.rank,
    }


def fingerprints_of(rows: Rows) -> Any:
    """Return the fingerprints of rows as they are now, without waiting for a GPU."""
    from .fingerprint import Fingerprints

    return Fingerprints([tensor for _, tensor in rows])


def _write_rows(files: FingerprintFiles, number: int, values: Dict[str, Any], rows: Rows) -> None:
    write(files, number, values, rows, fingerprints_of(rows).value())


def write(files: FingerprintFiles, number: int, values: Dict[str, Any], rows: Rows, taken: bytes) -> None:
    """Write a record, unless there are no rows."""
    if rows:
        files.write(number, fitted(values), [row for row, _ in rows], taken)
