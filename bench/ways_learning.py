"""What each way of training learns in the same number of steps, without a network: four ranks over loopback, AdamW.

`python -m bench.ways_learning [--steps N] [--ways "NAME;NAME"]`. Seconds are not compared: ranks share what cores there are.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bench.baselines import launch_hosts
from bench.report import Result, show

RANKS = 4
SPARSE = "topk(ratio=0.01, values='int8')"
WAYS: dict[str, dict[str, Any]] = {
    "dense": {"plan": "identity()"},
    "int4": {"plan": "int4()"},
    "topk 1 %, gradients": {"plan": SPARSE},
    "topk 1 %, updates": {"plan": SPARSE, "codes": "updates"},
    "topk 1 % of all, gradients": {"plan": SPARSE, "config": {"ratio_over": "plan"}},
    "topk 1 % of all, updates": {"plan": SPARSE, "config": {"ratio_over": "plan"}, "codes": "updates"},
    "int4, updates": {"plan": "int4()", "codes": "updates"},
    "every=4, int4": {"plan": "int4()", "every": 4},
    "every=4, int4, overlapped": {"plan": "int4()", "every": 4, "overlap": "round"},
    "every=4, int4, overlapped in 4": {"plan": "int4()", "every": 4, "overlap": "round", "fragments": 4},
}


def run(steps: int, names: list[str]) -> Result:
    rows: list[dict[str, Any]] = []
    for name in names:
        argv = [sys.executable, "-m", "bench.ways_task", json.dumps(WAYS[name]), "--steps", str(steps)]
        first, *others = launch_hosts(None, RANKS, argv, deadline_s=600.0)
        if any(other["losses"] != first["losses"] for other in others):
            raise RuntimeError(f"{name}: ranks differ in what the mean of their weights is")
        rows.append({"way": name} | {f"loss at {step}": loss for step, loss in first["losses"].items()}
                    | {"kB a step": first["sent_nbytes"] / steps / 1e3, "seconds": first["seconds"]})
    return {"rows": rows, "summary": {"ranks": RANKS, "steps": steps}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ways_learning")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--ways", default=";".join(WAYS), help="names, with ; between")
    args = parser.parse_args()
    show("ways_learning", run(args.steps, args.ways.split(";")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
