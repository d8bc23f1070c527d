"""Exchanges the norms of weight changes between ranks, one small row per turn.

The rows use the observers' channel, so a change of plans makes no new group. On slow links, a new group would take as long as
the rest of the change. Under local steps, the channel allows waits as long as an outer step: a fast rank sends its norm when it
begins an exchange, and others may arrive as late as the exchange allows. By then they have sent theirs, so a rank waits for no
more than a row's transfer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from commlayer.cluster.collectives import gather
from commlayer.engine.connection import Connection
from commlayer.engine.initial_sync import align
from commlayer.engine.step import Regroup
from commlayer.errors import CommError, InvalidInput
from commlayer.optim import Outer


class ToldLengths:
    """For one attached model, under successive plans. All ranks begin exchanges in the same order."""

    def __init__(self, connection: Connection, outer: Outer, deadline_s: float) -> None:
        self._connection, self._outer, self._deadline_s = connection, outer, deadline_s
        self._rows = None if connection.rows is None else connection.rows.rows("lengths of changes")
        self._error: CommError | None = None

    def go(self, every: int) -> bool:
        """Starts with a plan of `every` local steps. All ranks call it together. Returns whether norms are exchanged: only if
        all ranks match them, because optimizers may be of different families."""
        connection = self._connection
        if connection.rows is None or connection.groups is None:
            return False
        try:
            if connection.matched is None:
                connection.matched = all(row[0] for row in gather(connection.groups, [int(self._outer.matched)]))
            elif connection.matched and not self._outer.matched:
                raise InvalidInput("E-RANKS-DIFFER",
                                   "sync: the job that this home joins makes means as long as changes are "
                                   "(Outer(matched=True)), this home does not; allowed: the same on all ranks")
            connection.rows.allow(self._deadline_s * every)
            return connection.matched
        except CommError as error:
            with contextlib.suppress(Regroup):  # then norms are not exchanged under this plan
                connection.broke(error)
            return False

    def rest(self) -> None:
        """The current plan exchanges no norms."""
        if self._connection.rows is not None:
            self._connection.rows.allow(0.0)

    def start(self, weight: float, square: float) -> None:
        assert self._rows is not None
        try:
            self._rows.start(weight, square)
        except CommError as error:
            self._error = error

    def read(self) -> Sequence[Sequence[float]]:
        """Empty if members have gone; the next exchange continues without them: see `agree`."""
        assert self._rows is not None
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._rows.read(self._deadline_s, self._failed)
        except CommError as failure:
            with contextlib.suppress(Regroup):
                self._connection.broke(failure)
            return []

    def _failed(self) -> BaseException | None:
        connection = self._connection
        if connection.worker is not None and connection.worker.error is not None:
            return connection.worker.error
        gone = connection.members is not None and connection.members.pending(0.0)
        return CommError("members have gone while their rows were on the way") if gone else None

    def agree(self, starts: Sequence[torch.Tensor]) -> None:
        """Aligns `starts` after members have changed: some may have received the last rows, and others not.

        Remaining and new members call it together, in an exchange or between two."""
        connection = self._connection
        while True:
            assert connection.groups is not None
            try:
                differing = align(starts, connection.groups, self._deadline_s)
                break
            except CommError as error:
                try:
                    connection.broke(error)
                except Regroup:
                    assert connection.members is not None
                    connection.members.go()
        if differing:
            connection.say("those who are left had merged the last exchange differently, since some had not heard how long the "
                     "changes of others were: all go on from what rank 0 has")
