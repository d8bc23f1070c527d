"""One rank of a training race: trains one task with one system at a given pace until its time is over.

    python -m bench.paced.worker '{"task": "chars", "system": {"kind": "commlayer", "plan": "int4()"}}' --out FOLDER

commlayer is imported only for its own system, since rivals run in other environments (bench/paced/rivals.py). At some steps,
the same on all ranks, weights are written to files in FOLDER. The caller evaluates them, so validation costs neither network
nor training time. Reading the weights counts, since a system may have to wait for them; writing the file does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import torch

from bench.paced.pace import Pace
from bench.paced.place import Place
from bench.paced.systems import start_system
from bench.ranks import as_rank
from bench.tasks import TASKS, concatenate, layers_of

LOOK = 10
EARLY = (1, 2, 4)
"""Steps after which weights are written, in addition to every tenth: on a slow link a system may take few steps."""
AHEAD = 3
"""When the last step is chosen, no rank can be this many steps beyond what the ranks have reported."""
END_S = 60.0


class Steps:
    """The progress of each rank and the last step, in memory shared by the ranks of a run, which run on one machine."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        path = folder / "steps"
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
            os.ftruncate(file.fileno(), 8 * (ranks + 1))
            self._map = mmap.mmap(file.fileno(), 8 * (ranks + 1))

    def wrote(self, steps: int) -> None:
        self._put(self._rank, steps)

    def stop(self) -> None:
        self._put(self._ranks, max(self._get(rank) for rank in range(self._ranks)) + AHEAD)

    @property
    def last(self) -> int | None:
        return self._get(self._ranks) or None

    def all_there(self, steps: int) -> bool:
        return all(self._get(rank) >= steps for rank in range(self._ranks))

    def _put(self, place: int, value: int) -> None:
        self._map[8 * place : 8 * place + 8] = value.to_bytes(8, "little")

    def _get(self, place: int) -> int:
        return int.from_bytes(self._map[8 * place : 8 * place + 8], "little")


def run(training: dict[str, Any], seconds: float, out: Path) -> dict[str, Any]:
    rank, ranks, seed = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(training.get("seed", 0))
    task = TASKS[training["task"]]()
    model = task.model(seed)
    pace = Pace(model, layers_of(model), training.get("slow", [1.0] * ranks)[rank])
    batch_of = {"together": range(training.get("batches", ranks))}.get(training["system"]["kind"], range(rank, rank + 1))
    place = Place(rank, ranks, os.environ.get("HOST_ADDRESS", "127.0.0.1"), out, len(task.batch(0, 0)[1]), seed)
    system = start_system(training["system"], place, model, task)
    own = (concatenate([task.batch(number, step, seed) for number in batch_of]) for step in itertools.count())
    batches, samples = system.batches or own, len(batch_of) * place.samples
    steps = Steps(out, rank, ranks)
    report: dict[str, Any] = {"rank": rank, "looks": {}, "losses": []}
    (out / f"began.{rank}").touch()
    step, paused_s, begin = 0, 0.0, time.perf_counter()
    while steps.last is None or step < steps.last:
        batch = next(batches)
        system.optimizer.zero_grad()
        pace.forward(len(batch[1]) / samples)
        loss = task.loss(system.module, batch)
        pace.backward()
        loss.backward()
        system.optimizer.step()
        step += 1
        report["losses"].append(round(float(loss), 4))
        steps.wrote(step)
        if step in EARLY or step % LOOK == 0:
            weights = [value.clone() for value in model.state_dict().values()]
            looking = time.perf_counter()
            report["looks"][step] = looking - begin - paused_s
            torch.save(weights, out / f"{step}.{rank}.pt")
            paused_s += time.perf_counter() - looking
        if rank == 0 and steps.last is None and time.perf_counter() - begin - paused_s > seconds:
            steps.stop()
    report |= {"steps": step, "seconds": time.perf_counter() - begin - paused_s, "late": pace.late, "passes": pace.passes}
    until = time.monotonic() + END_S
    # No rank ends before all are finished: the others may need its part of the job.
    while not steps.all_there(steps.last or 0) and time.monotonic() < until:
        time.sleep(0.02)
    return report | system.end()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.paced.worker")
    parser.add_argument("training", type=json.loads,
                        help="task, system, and maybe seed, slow (a factor for each rank), as JSON")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(args.training, args.seconds, args.out)), flush=True)


if __name__ == "__main__":
    as_rank(main)
