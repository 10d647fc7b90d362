"""Runs an emitted plan of examples/gpt.py on CPU processes and compares loss and gradients with the original module.

Usage: demo_check.py DIR [--model-arg KEY=VALUE ...]   (DIR holds gpt_mpress.py and gpt.schedule.json; `make demo` calls this)
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import gpt
import torch

from mpress.runtime.reference import keyed_dropout


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model-arg", action="append", default=[])
    options = parser.parse_args()
    arguments = {key: int(value) for key, value in (pair.split("=", 1) for pair in options.model_arg)}
    plan = json.loads((options.directory / "gpt.schedule.json").read_text())
    stages, micro_batches = plan["pipeline"]["stages"], plan["pipeline"]["micro_batches"]

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = gpt.build_model(**arguments)
    shape = {key: arguments[key] for key in ("sequence", "vocabulary") if key in arguments}
    batches = [gpt.example_inputs(plan["model"]["micro_batch"], **shape) for _ in range(micro_batches)]
    work = options.directory
    torch.save(model.state_dict(), work / "weights.pt")
    torch.save([[dict(zip(("tokens", "targets"), batch, strict=True)) for batch in batches]], work / "data.pt")

    run = "gpt_mpress.py --state-dict weights.pt --data data.pt --save-gradients gradients.pt --save-losses losses.pt --account"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stages}", *run.split()]
    print(f"torchrun --nproc-per-node {stages} {run}", flush=True)
    subprocess.run(command, cwd=work, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    total = 0.0
    for k, batch in enumerate(batches):
        with keyed_dropout(model, seed=0, step=0, micro_batch=k):
            loss = model(*batch)
        (loss / micro_batches).backward()
        total += loss.item() / micro_batches
    emitted = torch.load(work / "gradients.pt")[0]
    equal, worst = 0, 0.0
    for name, parameter in model.named_parameters():
        if torch.equal(emitted[name], parameter.grad):
            equal += 1
        else:
            worst = max(worst, ((emitted[name] - parameter.grad).abs().max() / parameter.grad.abs().max()).item())
    count = len(list(model.parameters()))
    print(f"loss: original {total:.7f}, emitted {float(torch.load(work / 'losses.pt')[0]):.7f}")
    print(f"gradients: {equal} of {count} equal bit for bit, the others within {worst:.1e} of the largest entry")
    if worst > 1e-6:
        sys.exit("the gradients differ")


if __name__ == "__main__":
    main()
