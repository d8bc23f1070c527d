"""What ranks tell each other of their changes of weights, a small row for each turn. Knows a connection; no weights.

Rows go over the channel of those who look on, so that a change of plans makes no group: over long links that takes as long as
all the rest of it. Under local steps the channel waits for as long as a round may take: a rank that is ahead tells its length
when it begins an exchange, and others come to it as late as the exchange itself allows. By then they have told theirs, so that
nobody waits for more than a row's way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from commlayer.cluster.all_or_none import gather
from commlayer.engine.connection import Connection
from commlayer.engine.initial_sync import align
from commlayer.engine.step import Regroup
from commlayer.errors import CommError, InvalidInput
from commlayer.optim import Outer


class ToldLengths:
    """Of one attached model, under one plan after the other. All ranks begin exchanges in one order, here as elsewhere."""

    def __init__(self, connection: Connection, outer: Outer, deadline_s: float) -> None:
        self._connection, self._outer, self._deadline_s = connection, outer, deadline_s
        self._rows = None if connection.rows is None else connection.rows.rows("lengths of changes")
        self._error: CommError | None = None

    def go(self, every: int) -> bool:
        """From now on under a plan of so many local steps. All ranks call it together. Whether lengths are told: only where all
        match them, for optimizers may be of different families."""
        made = self._connection
        if made.rows is None or made.groups is None:
            return False
        try:
            if made.matched is None:
                made.matched = all(row[0] for row in gather(made.groups, [int(self._outer.matched)]))
            elif made.matched and not self._outer.matched:
                raise InvalidInput("E-RANKS-DIFFER",
                                   "sync: the job that this home joins makes means as long as changes are "
                                   "(Outer(matched=True)), "
                                   "this home does not; allowed: the same on all ranks")
            made.rows.allow(self._deadline_s * every)
            return made.matched
        except CommError as error:
            with contextlib.suppress(Regroup):  # then nobody tells anything under this plan
                made.broke(error)
            return False

    def rest(self) -> None:
        """A plan has come into force under which nothing is told."""
        if self._connection.rows is not None:
            self._connection.rows.allow(0.0)

    def start(self, weight: float, square: float) -> None:
        assert self._rows is not None
        try:
            self._rows.start(weight, square)
        except CommError as error:
            self._error = error

    def read(self) -> Sequence[Sequence[float]]:
        """Nothing where ranks have gone, without which the next exchange goes on: see `agree`."""
        assert self._rows is not None
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._rows.read(self._deadline_s, self._failed)
        except CommError as found:
            with contextlib.suppress(Regroup):
                self._connection.broke(found)
            return []

    def _failed(self) -> BaseException | None:
        made = self._connection
        if made.worker is not None and made.worker.error is not None:
            return made.worker.error
        gone = made.members is not None and made.members.pending(0.0)
        return CommError("members have gone while their rows were on the way") if gone else None

    def agree(self, starts: Sequence[torch.Tensor]) -> None:
        """Members have changed, and those who go on, or have joined, call it together, in one exchange or between two: some may
        have had the last one's rows, and others not."""
        made = self._connection
        while True:
            assert made.groups is not None
            try:
                differing = align(starts, made.groups, self._deadline_s)
                break
            except CommError as error:
                try:
                    made.broke(error)
                except Regroup:
                    assert made.members is not None
                    made.members.go()
        if differing:
            made.say("those who are left had merged the last exchange differently, since some had not heard how long the "
                     "changes of others were: all go on from what rank 0 has")
