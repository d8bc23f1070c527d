"""A task for the tuner: commlayer tune examples/tune_digits.py --trials 20

The tuner calls proxy(settings) with settings["codec"] (spelled as in plans), ["ratio"] and ["batch"] (over all workers). A
proxy trains for a short time, the same way each time, and returns what it took and the loss it reached. This one trains on the
digits of commlayer.demo, with four workers in one process, and counts the seconds that they would take at 5 Mb/s.
"""

import functools
from typing import Any

from tuning_tasks import Batch, SimulatedCluster, TuningTask, picker, train

from commlayer.demo.problem import Digits, digits, mlp


@functools.cache
def problem() -> tuple[Digits, Batch]:
    data = digits(seed=1)
    return data, picker(*data.train)


def proxy(settings: dict[str, Any]) -> dict[str, float]:
    data, batch = problem()
    task = TuningTask(mlp(48, seed=1), batch, data.test, samples=6400, rate=0.12)
    return train(task, settings, SimulatedCluster(workers=4, bps=5e6))
