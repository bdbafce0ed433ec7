"""A real training loop of accelerate on the CPU: ``python train.py FOLDER name|instance REPORT_TO``."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from runmirror_accelerate import RunMirrorTracker, enable

if __name__ == "__main__":
    folder, how, report_to = sys.argv[1:]
    if how == "name":
        enable()
        accelerator = Accelerator(cpu=True, log_with="runmirror", project_dir=folder)
    else:
        accelerator = Accelerator(cpu=True, log_with=RunMirrorTracker(f"{folder}/line", report_to=report_to))
    options = {"runmirror": {"report_to": report_to}}
    accelerator.init_trackers("line", {"lr": 0.1, "steps": 20}, init_kwargs=options)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    for step in range(20):
        loss = torch.nn.functional.mse_loss(model(x), 2 * x + 1)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.detach(), "processes": accelerator.num_processes}, step=step)
    accelerator.end_training()
