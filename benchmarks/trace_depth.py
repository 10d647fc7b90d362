"""What tracing and folding cost by depth: `python benchmarks/trace_depth.py`.  One process a row, figures of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

DEPTHS = (12, 24, 48, 96, 124, 192)
SIZE = {"hidden": "4096", "heads": "32", "vocabulary": "50304", "sequence": "1024"}
ROW = """
import json, resource, sys, time
began = time.process_time()
from mpress.fold import fold
from mpress.options import Depth
from mpress.trace.record import trace
model, arguments, depth = json.loads(sys.argv[1])
notes, seconds = [], [time.process_time() - began]
for turn in range(2):
    began = time.process_time()
    graph = trace(model, model_args=arguments, micro_batch=1, precision="bf16", depth=Depth(depth), on_note=notes.append)
    traced = time.process_time()
    chain = fold(graph)
    seconds += [traced - began, time.process_time() - traced]
    if turn == 0:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
parameters = sum(p.elements for p in graph.parameters)
print(json.dumps([parameters, seconds, most, len(graph.ops), len(chain.representatives), notes[0]]))
"""


def main() -> None:
    model = str(Path(__file__).parent.parent / "examples" / "gpt.py")
    print("CPU seconds: importing; tracing and folding in a cold process, and again in the same process; largest set when cold")
    titles = " ".join(f"{title:>6}" for title in ("import", "trace", "fold", "trace", "fold"))
    print(f"{'layers':>6} {'depth':>5} {'params':>7} {titles} {'MiB':>5} {'ops':>6}  how")
    for layers, depth in (*((layers, "fast") for layers in DEPTHS), (DEPTHS[-1], "full")):
        request = json.dumps([model, {"layers": str(layers), **SIZE}, depth])
        done = subprocess.run([sys.executable, "-c", ROW, request], capture_output=True, text=True, check=True, timeout=300)
        parameters, seconds, most, ops, types, note = json.loads(done.stdout)
        figures = " ".join(f"{value:6.2f}" for value in seconds)
        print(f"{layers:6} {depth:>5} {parameters / 1e9:6.1f}B {figures:>34} {most:5.0f} {ops:6}  {types} types of cells; {note}")


if __name__ == "__main__":
    main()
