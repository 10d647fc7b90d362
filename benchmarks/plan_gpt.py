"""Time and gap of planning the example GPT: `python benchmarks/plan_gpt.py`.  One row a configuration, figures of this machine."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROWS = (
    ("5.3B dgx1-v100-32gb fp16", ["--machine", "dgx1-v100-32gb", "--precision", "fp16", "--model-arg", "layers=26"]),
    ("15.3B dgx-a100-40gb bf16", ["--machine", "dgx-a100-40gb"]),
    ("15.3B dgx-a100-80gb bf16", ["--machine", "dgx-a100-80gb"]),
    ("25.5B dgx-a100-80gb bf16", ["--machine", "dgx-a100-80gb", "--model-arg", "layers=125"]),
)


def main() -> None:
    model = Path(__file__).parent.parent / "examples" / "gpt.py"
    print(f"{'row':28} {'seconds':>8} {'trace':>6} {'solve':>6} {'gap %':>6} {'step s':>7} {'status':>10}")
    for name, flags in ROWS:
        start = time.perf_counter()
        command = [sys.executable, "-m", "mpress_cli", str(model), "--gpus", "8", *flags, "--json", "--dry-run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        plan = json.loads(done.stdout)
        if done.returncode:
            print(f"{name:28} {seconds:8.1f} {plan['code']}: {plan['message']}")
            continue
        traced, solved = plan["timings"]["trace_seconds"], plan["timings"]["solve_seconds"]
        gap, step, status = plan["gap"] * 100, plan["step_seconds"], plan["status"]
        print(f"{name:28} {seconds:8.1f} {traced:6.1f} {solved:6.1f} {gap:6.2f} {step:7.3f} {status:>10}")
    print(f"largest resident set of a row: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
