# https://github.com/pytorch/pytorch/issues/59146
# report: the lock file of a build that was killed: load() waits forever
# truth: {"code": "stuck", "ranks": [0, 1], "line": true}
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load_inline

dist.init_process_group("gloo")
build = Path(tempfile.gettempdir(), f"extension-{os.getppid()}")
build.mkdir(exist_ok=True)
(build / "lock").touch()
dist.barrier()
source = "int one() { return 1; }"
ops = load_inline("ops", source, functions=["one"], build_directory=str(build))  # CULPRIT
dist.barrier()
dist.destroy_process_group()
