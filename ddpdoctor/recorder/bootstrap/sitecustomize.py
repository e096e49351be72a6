"""Loads the recorder by file path, then the ``sitecustomize`` that this one hides: PYTHONPATH has this folder first.

Every Python of a job runs this file, installed packages or not, so it imports only what it must.
"""

import os
import sys


def _load_hidden():
    """Import the sitecustomize that would have been found without us, as a module or a package."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours


if os.environ.get("DDPDOCTOR_RUN"):
    try:
        package = sys.modules["_ddpdoctor_recorder"] = type(sys)("_ddpdoctor_recorder")
        package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
        from _ddpdoctor_recorder import start

        start.install()
    except Exception as error:  # a recorder that fails must never keep a rank from running
        wanted = os.environ.get("DDPDOCTOR_DETAIL")
        gpus = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
        if wanted and not (wanted == "gloo" and gpus):  # all ranks or none must have it; with GPUs, NCCL is likely
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        try:
            name = os.path.join(os.environ["DDPDOCTOR_RUN"], "lost-%d-0" % os.getpid())
            # Without the recorder's own helper for opening files, because that may be what failed.
            with os.fdopen(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w") as lost:
                lost.write("%s\nthe recorder failed at its start: %r" % (os.environ.get("RANK", ""), error))
        except Exception:
            pass
_load_hidden()
