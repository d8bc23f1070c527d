"""What ranks tell each other of their changes of weights, a small row for each turn. Knows a connection; no weights.

It has a channel of its own, with a time-out for as long as a round may take: a rank that is ahead tells its length when it
begins an exchange, and others come to it as late as the exchange itself allows. By then they have told theirs, so that nobody
waits for more than a row's way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import torch

from commlayer.errors import CommError
from commlayer.job.connection import Connection
from commlayer.optim import Outer
from commlayer.runtime.initial_sync import align
from commlayer.runtime.step import Regroup
from commlayer.transport.all_or_none import gather
from commlayer.transport.groups import Groups
from commlayer.transport.rank_rows import RowChannel

log = logging.getLogger("commlayer")


def lengths_of(connection: Connection, outer: Outer, every: int, deadline_s: float) -> ToldLengths | None:
    """For local steps of one plan; all ranks call it together. None unless all of them match lengths: optimizers may be of
    different families."""
    if connection.groups is None:
        return None
    if (joined := connection.joined) is not None and connection.fresh:  # the others have agreed, and see `agree`
        if joined.matched and not outer.matched:
            raise ValueError("sync: the running job makes means as long as changes are (Outer(matched=True)), this home does "
                             "not; allowed: the same on all ranks")
        return ToldLengths(connection, connection.groups, every, deadline_s) if joined.matched else None
    try:
        if not all(row[0] for row in gather(connection.groups, [int(outer.matched)])):
            return None
        made = ToldLengths(connection, connection.groups, every, deadline_s)
        made.open()
        return made
    except CommError as error:
        with contextlib.suppress(Regroup):  # then nobody tells anything under this plan
            connection.broke(error)
        return None


class ToldLengths:
    """Of one plan."""

    def __init__(self, connection: Connection, groups: Groups, every: int, deadline_s: float) -> None:
        self._connection, self._deadline_s = connection, deadline_s
        self._channel = RowChannel(groups.members, deadline_s * every)
        self._rows = self._channel.rows("lengths of changes")
        self._error: CommError | None = None

    def open(self) -> None:
        """Where all come at once: the first of an exchange need not wait for the last."""
        self._channel.open()

    def start(self, weight: float, square: float) -> None:
        try:
            self._rows.start(weight, square)
        except CommError as error:
            self._error = error

    def read(self) -> Sequence[Sequence[float]]:
        """Nothing where ranks have gone, without which the next exchange goes on: see `agree`."""
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
            self._channel.regroup(made.groups.members)
            try:
                self._channel.open()  # here, where nobody is late: who joins has a step to compute ahead of its rows
                differing = align(starts, made.groups, self._deadline_s)
                break
            except CommError as error:
                try:
                    made.broke(error)
                except Regroup:
                    assert made.members is not None
                    made.members.go()
        if differing and made.worker is not None:
            what = (f"step {made.worker.step}: those who are left had merged the last exchange differently, since some had not "
                    "heard how long the changes of others were: all go on from what rank 0 has")
            made.decisions.append(what)
            log.warning("%s", what)

    def close(self) -> None:
        self._channel.close()
