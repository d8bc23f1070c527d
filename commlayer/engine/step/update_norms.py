"""Exchanges the norms of weight changes between ranks: one small row of numbers per fragment and rank."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.engine.job.job import DistributedJob
from commlayer.observe.noise_scale import Agreement

LENGTHS = "lengths of changes"
"""Section of the rows with the norms."""
LEAST_AGREEMENT = 0.25
"""A smaller agreement is logged as no further change."""


class UpdateNorms:
    """Exchanges the norms of weight changes between the ranks of one attached model, under one plan. All ranks begin exchanges
    in the same order.

    Under local steps, rows allow waits as long as an outer step, because ranks differ in speed. A row is read when all ranks
    have sent theirs, so a rank waits only for the transfer of a row.
    """

    def __init__(self, context: DistributedJob) -> None:
        self._context, self._rows = context, context.rows.section(LENGTHS, stays=True)
        self._agreement, self._logged = Agreement(), 0.0
        """Of the changes under the plan, and the last logged agreement."""

    def start(self, weight: float, square: float) -> None:
        self._rows.start(weight, square)
        self._context.rows.send()

    def read(self) -> Sequence[Sequence[float]]:
        """Returns the rows that the ranks passed to their last `start`, in rank order. If the model is sharded, all ranks of a
        site have the same row, which is returned once, with the sum of their weights."""
        rows = self._rows.read()
        if not (rows and self._context.site.shards):
            return rows
        return [(len(site) * rows[site[0]][0], *rows[site[0]][1:]) for site in self._context.groups.sites]

    def observe(self, rows: Sequence[Sequence[float]], square: float) -> None:
        """Updates the agreement of the ranks' changes. Logs the agreement when it is first known, and when it has halved or
        doubled."""
        self._agreement, context = self._agreement.plus(rows, square), self._context
        plan = context.worker.plan
        if self._agreement.exchanges < plan.fragments:
            return
        context.worker.counters.agreement = agreement = self._agreement.cosine
        seen = max(agreement, LEAST_AGREEMENT)
        if not 0.5 < self._logged / seen < 2:
            self._logged = seen
            context.log(f"workers' changes over {plan.local_steps} local steps have a mean cosine of {agreement:.2f}")
