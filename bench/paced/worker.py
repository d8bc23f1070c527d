"""One rank of a training race: trains one task with one system at a given pace until its time is over.

    python -m bench.paced.worker '{"task": "chars", "system": {"kind": "commlayer", "plan": "int4()"}}' SECONDS FOLDER

commlayer is imported only for its own system, since rivals run in other environments (bench/paced/rivals.py). At some steps,
the same on all ranks, weights are written to files in FOLDER. The caller evaluates them, so validation costs neither network
nor training time. Reading the weights counts, since a system may have to wait for them; writing the file does not.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.paced.pace import Pace
from bench.paced.place import STEPS, Place
from bench.paced.systems import start_system
from bench.ranks import as_rank
from bench.tasks import TASKS, concatenate
from bench.tasks_models import layers_of

LOOK = 10
EARLY = (1, 2, 4)
"""Steps after which weights are written, in addition to every tenth: on a slow link a system may take few steps."""
AHEAD = 3
"""When the last step is chosen, no rank can be this many steps beyond what the ranks have reported."""
END_S = 60.0


def run(settings: str, seconds: str, folder: str) -> dict[str, Any]:
    """One rank. `settings`: JSON with task, system, and maybe seed, slow (a factor for each rank)."""
    training, out = json.loads(settings), Path(folder)
    rank, ranks, seed = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(training.get("seed", 0))
    task = TASKS[training["task"]]()
    model = task.model(seed)
    pace = Pace(model, layers_of(model), training.get("slow", [1.0] * ranks)[rank])
    batch_of = {"together": range(training.get("batches", ranks))}.get(training["system"]["kind"], range(rank, rank + 1))
    place = Place(rank, ranks, os.environ.get("HOST_ADDRESS", "127.0.0.1"), out, len(task.batch(0, 0)[1]), seed)
    system = start_system(training["system"], place, model, task)
    own = (concatenate([task.batch(number, step, seed) for number in batch_of]) for step in itertools.count())
    batches, samples = system.batches or own, len(batch_of) * place.samples
    steps = np.memmap(out / STEPS, np.int64, "r+")
    report: dict[str, Any] = {"rank": rank, "looks": {}, "losses": []}
    (out / f"began.{rank}").touch()
    step, paused_s, begin = 0, 0.0, time.perf_counter()
    while not steps[-1] or step < steps[-1]:
        batch = next(batches)
        system.optimizer.zero_grad()
        pace.forward(len(batch[1]) / samples)
        loss = task.loss(system.module, batch)
        pace.backward()
        loss.backward()
        system.optimizer.step()
        step += 1
        report["losses"].append(round(float(loss), 4))
        steps[rank] = step
        if step in EARLY or step % LOOK == 0:
            weights = [value.clone() for value in model.state_dict().values()]
            looking = time.perf_counter()
            report["looks"][step] = looking - begin - paused_s
            torch.save(weights, out / f"{step}.{rank}.pt")
            paused_s += time.perf_counter() - looking
        if rank == 0 and not steps[-1] and time.perf_counter() - begin - paused_s > float(seconds):
            steps[-1] = steps[:-1].max() + AHEAD
    report |= {"steps": step, "seconds": time.perf_counter() - begin - paused_s, "late": pace.late, "passes": pace.passes}
    until = time.monotonic() + END_S
    # No rank ends before all are finished: the others may need its part of the job.
    while (steps[:-1] < steps[-1]).any() and time.monotonic() < until:
        time.sleep(0.02)
    return report | system.end()


if __name__ == "__main__":
    as_rank(run)
