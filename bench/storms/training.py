"""The training script of a home: a small transformer, attached to the job, until the storm names the last step."""

from __future__ import annotations

import hashlib
import logging
import signal
import sys
import time
import traceback
from typing import Any

import torch
from torch import nn

from bench.storms.reports import EVERY, LAYERS, LOCAL, LR, SEQUENCES, WIDTH, Ended, Stepped, Work
from bench.tasks import Task, characters
from bench.tasks_text import handbook


def task() -> Task:
    return characters(handbook(), WIDTH, SEQUENCES, LAYERS, LR)


def train(pipe: Any, number: int, work: Work) -> None:
    """The work of a home's process. `number`: the worker's number in the job, which its batches follow."""
    from commlayer.cluster.processes.script_host import begin_world, joins_again
    from commlayer.config import read_launch
    from commlayer.errors import CommError

    logging.basicConfig(level=logging.INFO, format=f"worker {number}: %(message)s")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    done = [0]
    try:
        begin_world(read_launch(), "gloo")
        report = _train(pipe, number, work, done)
    except KeyboardInterrupt:
        report = Ended(done[0], what="interrupted")
    except CommError as error:
        report = Ended(done[0], what=str(error), again=joins_again(error))
    except Exception:
        report = Ended(done[0], what=traceback.format_exc())
    pipe.send(report)


def _train(pipe: Any, number: int, work: Work, done: list[int]) -> Ended:
    from commlayer import LocalSteps, attach

    trained_task = task()
    model = trained_task.model(0)
    optimizer = trained_task.optimizer(model.parameters())
    sync = LocalSteps(EVERY) if work.mode == LOCAL else "step"
    with attach(model, optimizer, compression="int4", sync=sync) as session:
        last = sys.maxsize
        while session.step < last:
            begin = time.monotonic()
            loss = trained_task.loss(model, trained_task.batch(number, session.step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done[0] = session.step
            pipe.send(Stepped(done[0], int(session.metrics()["exchanges"]), loss.item(), time.time()))
            while pipe.poll():
                last = pipe.recv()
            time.sleep(max(0.0, begin + work.pace_s - time.monotonic()))
        session.flush()
        return Ended(done[0], digest(model))


def digest(model: nn.Module) -> str:
    """A digest of all weights, bit for bit."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
