"""A long training with churn: connections are cut, a server is killed and restarted, and memory must stay constant.

Memory is each process's resident set over the second half of the steps, or the part in which the process was running and had
settled. For a server, the final sizes of its processes are also compared with each other.
"""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bench import Unmeasurable
from bench.report import Result
from commlayer.errors import CommError
from tests.chaos import processes
from tests.chaos.cluster import HERE, Cluster
from tests.chaos.dealing import undisturbed
from tests.chaos.reports import Ended, Stepped
from tests.chaos.sizes import MOST_GROWTH_PCT, Sizes, files_flat, growth
from tests.chaos.trials import Setting

SETTING = Setting("topk(ratio=0.1)", apart=True)
TOLD_EVERY = 25
CUT_EVERY, KILLS = 100, 8
"""Steps between two cuts, and how often the server is killed in total."""
ROUNDING = 1e-3
"""Of sums over all steps."""
LIMIT_S = 3600.0


def run(steps: int, seed: int, seconds: float = 0.0) -> Result:
    """`seconds`: time limit; 0 for an hour."""
    return soaked(SETTING, TOLD_EVERY, steps,
                  lambda cluster: _Soak(cluster, steps, random.Random(seed), seconds or LIMIT_S).run())


def soaked(setting: Setting, told_every: int, steps: int, train: Callable[[Cluster], Result]) -> Result:
    """Calls `train` with a cluster for that many steps. Raises Unmeasurable if the cluster cannot be started."""
    try:
        with processes.meeting(HERE) as at, Cluster(undisturbed(setting), at, steps, told_every) as cluster:
            return train(cluster)
    except CommError as reason:
        raise Unmeasurable(str(reason)) from None


class _Soak:
    def __init__(self, cluster: Cluster, steps: int, chance: random.Random, limit_s: float) -> None:
        self._cluster, self._steps, self._chance, self._limit_s = cluster, steps, chance, limit_s
        self._sizes = Sizes(steps)
        self._digests: dict[int, set[str]] = defaultdict(set)
        self._at = [0] * len(cluster.workers)
        self._ended: list[Ended | None] = [None] * len(cluster.workers)
        self._cuts = self._kills = 0

    def run(self) -> Result:
        begin, cut_at, kill_every = time.monotonic(), CUT_EVERY, max(1, self._steps // KILLS)
        kill_at = kill_every // 2
        while not all(self._ended[r] or w.silent for r, w in enumerate(self._cluster.workers)):
            self._hear()
            at = max(self._at)
            if at >= cut_at:
                self._cuts += self._chance.choice(self._cluster.links).cut(reset=self._chance.random() < 0.5)
                cut_at += CUT_EVERY
            if at >= kill_at:
                self._kills += self._cluster.servers[0].signal(signal.SIGKILL)
                self._cluster.restart_server(0)
                kill_at += kill_every
            if time.monotonic() > begin + self._limit_s:
                break
            time.sleep(0.02)
        self._hear()
        return self._result(time.monotonic() - begin)

    def _hear(self) -> None:
        for rank, worker in enumerate(self._cluster.workers):
            for report in worker.told():
                if isinstance(report, Stepped):
                    self._at[rank] = report.step
                    self._digests[report.step].add(report.digest)
                    self._sizes.weigh(f"worker {rank}", worker, report.step)
                    if rank == 0:
                        self._sizes.weigh("server 0", self._cluster.servers[0], report.step)
                        self._sizes.weigh("coordinator", self._cluster.coordinator, report.step)
                else:
                    self._ended[rank] = report

    def _result(self, seconds: float) -> Result:
        rows = self._sizes.rows()
        grown_pct, across_pct = growth(rows)
        complete = all(end is not None and not end.what and not end.bug and end.steps == self._steps for end in self._ended)
        seen, off = self._cluster.seen, self._cluster.off()
        summary: dict[str, Any] = {
            "steps": max(self._at), "finished": complete, "connections_cut": self._cuts, "servers_killed": self._kills,
            "other_digests": sum(len(digests) > 1 for digests in self._digests.values()),
            "contributions": seen.contributions, "wrong_on_the_wire": len(seen.faults), "payloads_sent_again": seen.repeats,
            "applied_off_put_in": off, "accounts_balance": off <= ROUNDING, "growth_pct": grown_pct,
            "restarts_growth_pct": across_pct, "memory_flat": max(grown_pct, across_pct) <= MOST_GROWTH_PCT,
            "files_flat": files_flat(rows),
            "steps_per_s": max(self._at) / seconds, "seconds": seconds}
        if not complete:
            rows += [{"process": f"worker {rank}", "ended": str(end)} for rank, end in enumerate(self._ended)]
        # Growth is unknown after a short run.
        grown = grown_pct > MOST_GROWTH_PCT or across_pct > MOST_GROWTH_PCT or not summary["files_flat"]
        right = complete and not grown and not summary["other_digests"] and not seen.faults and summary["accounts_balance"]
        return {"rows": rows, "summary": summary, "code": int(not right)}
