"""Accelerate with the tracker, under which rank 1 may be slow."""

import sys
import time

import torch
from accelerate import Accelerator

from ddpdoctor.integrations.accelerate import DdpDoctorTracker

torch.set_num_threads(1)


def main():
    accelerator = Accelerator(cpu=True, log_with=[DdpDoctorTracker(report_dir=sys.argv[1])])
    accelerator.init_trackers("project", config={"lr": 0.1})
    model = torch.nn.Linear(8, 2)
    model, opt = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(25):
        opt.zero_grad()
        if sys.argv[2] == "slow" and accelerator.process_index == 1:
            time.sleep(0.1)  # FAULT
        accelerator.backward(model(torch.randn(4, 8)).mean())
        opt.step()
        accelerator.log({"step": step})
    model, opt = accelerator.free_memory(model, opt)  # see training.leave
    accelerator.end_training()


if __name__ == "__main__":
    main()
