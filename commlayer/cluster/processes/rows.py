"""The row of a step: one record of numbers that each rank sends, and that all ranks receive in rank order.

A row has one section for each part of the session that needs numbers from other ranks. The sections that are started in a step
are sent as one row at the end of the step. Ranks usually read this row after the next step, so no rank waits. A row that is
needed earlier is sent and read at once. Between the same two rows, all ranks start the same sections, so all ranks can read the
rows.

If the job has a server, the row is a bucket of server 0 (cluster/servers/served_rows.py): if members leave, the others receive
the row without theirs. In jobs without servers, a row is an all-gather.
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commlayer.cluster.processes.bounded_calls import PendingCollective, torch_errors
from commlayer.cluster.processes.process_groups import Members, rows_of_all
from commlayer.cluster.processes.site_process_group import set_timeout
from commlayer.errors import CommError, CorruptFrame

CLOSE_S = 2.0
"""Longest wait for a row in flight, in seconds, when this rank leaves."""
PART = 63
"""Numbers of a row in each message of the all-gather, after the row's length. All messages have this size: a Gloo process ends
itself if a peer's message has another size than expected, so ranks that make different calls would not get an error."""
HEAD = 2
"""Numbers before those of a section: the section's own number and its length."""
LEAVES = [-1.0]
"""The last row of a rank that leaves. The others count it as absent."""

Failed = Callable[[], BaseException | None]
"""Polled during a wait; an error that it returns is raised."""


def section_number(what: str) -> float:
    """Returns the number of a section in rows."""
    return float(zlib.crc32(what.encode()))


def section_values(rows: Iterable[Sequence[float]], section: str) -> list[list[float]]:
    """Returns the numbers of a section in rows that other ranks have sent; empty if they lack it. `section`: see
    StepRows.section."""
    found, number = [], section_number(f"exchange of {section}")
    for row in rows:
        at = 0
        while at + HEAD <= len(row):
            end = at + HEAD + int(row[at + 1]) if 0 <= row[at + 1] <= len(row) else len(row)
            if row[at] == number:
                found.append([*row[at + HEAD : end]])
            at = end
    return found


class PendingRows(Protocol):
    """The rows of all ranks, which are being exchanged."""

    def is_over(self) -> bool:
        """Returns True if `wait` would return at once."""
        ...

    def wait(self, deadline: float, failed: Failed) -> dict[int, list[float]]:
        """Returns all rows by the number of their sender. Raises DeadlineExceeded after `deadline` (time.monotonic())."""
        ...


class FailedRow:
    """A row that could not be sent."""

    def __init__(self, error: CommError) -> None:
        self._error = error

    def is_over(self) -> bool:
        return True

    def wait(self, deadline: float, failed: Failed) -> dict[int, list[float]]:
        raise self._error


class RowTransport:
    """Exchanges rows between all ranks, in the order of the calls of `start`."""

    number, joined = 0, 0
    """Number of the next row, and Header.joined of rows, if a server collects them."""
    late_s = 0.0
    """How much later than the other ranks one rank may send a row, in seconds, if that is longer than `timeout_s`."""
    stalled: Mapping[int, tuple[int, tuple[int, ...]]] = {}
    """Servers' reports of what they wait for; see Step.stalled."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def start(self, row: list[float], what: str) -> PendingRows:
        """Sends this rank's row without waiting. `what`: for errors."""
        raise NotImplementedError

    def begin(self, generation: int) -> None:
        """Starts again for another plan. Rows in flight are dropped."""

    def allow(self, late_s: float) -> None:
        """Sets `late_s` from now on."""
        self.late_s = late_s

    def missing(self) -> tuple[str, ...]:
        """Returns the names of the members that have not sent the row in flight, as far as they are known."""
        return ()

    def close(self) -> None:
        """Ends the exchange of rows."""


class StepRows:
    """Sends and receives the rows of one job on one rank."""

    def __init__(self, transport: RowTransport, members: Members, failed: Failed = lambda: None, *, may_leave: bool = False
                 ) -> None:
        self.transport, self._members, self.failed = transport, members, failed
        self._numbers: Sequence[int] = range(len(members.ranks))
        """The members' numbers in messages, in rank order."""
        self._may_leave = may_leave
        self._sections: dict[str, Section] = {}
        self._next, self._sent = _Row(), list[_Row]()
        """The row that sections fill now, and the rows in flight."""
        self.allow, self.begin = transport.allow, transport.begin

    def section(self, what: str, *, stays: bool = False) -> Section:
        """Returns the section for `what`, which errors name. `stays`: True: its rows are read even if members have changed
        since they were sent."""
        return self._sections.setdefault(what, Section(self, what, stays=stays))

    def add(self, section: Section, numbers: tuple[float, ...]) -> _Row:
        self._next.parts[section] = numbers
        return self._next

    def send(self) -> None:
        """Sends the sections that were started since the last row, as one row. Does nothing if there are none. An error is
        raised when the row is read."""
        if self._next.parts:
            row, self._next = self._next, _Row()
            try:
                row.pending = self.transport.start(row.numbers(), row.what)
            except CommError as error:
                row.pending = FailedRow(error)
            self._sent = [each for each in self._sent if each.pending and not each.pending.is_over()] + [row]

    def received(self, row: _Row, patience_s: float = math.inf) -> dict[int, dict[Section, list[float]]]:
        """Waits for a row, and returns the sections of each sender. Raises CommError if a rank has started other sections."""
        if row.pending is None:
            self.send()
        if not row.received:
            assert row.pending is not None
            limit_s = max(self.transport.timeout_s, self.transport.late_s)
            rows = row.pending.wait(time.monotonic() + min(patience_s, limit_s), self.failed)
            rows = {sender: numbers for sender, numbers in rows.items() if numbers != LEAVES}
            if {*rows} != {*self._numbers} and not self._may_leave:
                raise CorruptFrame(f"sends rows of {len(rows)} ranks, expected {len(self._numbers)}", peer="server 0")
            row.received = {sender: self._sections_in(row, rows[sender], sender) for sender in self._ordered(rows)}
        return row.received

    def _ordered(self, senders: Iterable[int]) -> list[int]:
        """Returns the senders of a row: current members in rank order, then those that have left or joined since."""
        places = {number: place for place, number in enumerate(self._numbers)}
        return sorted(senders, key=lambda sender: (places.get(sender, len(places)), sender))

    def _sections_in(self, row: _Row, numbers: list[float], sender: int) -> dict[Section, list[float]]:
        found, at = {}, 0
        for section, mine in row.parts.items():
            if numbers[at : at + HEAD] != [section.number, len(mine)]:
                raise self._calls_differ(numbers[at : at + 1], section, sender)
            found[section] = numbers[at + HEAD : at + HEAD + len(mine)]
            at += HEAD + len(mine)
        if at < len(numbers):
            raise self._calls_differ(numbers[at : at + 1], section, sender)
        return found

    def _calls_differ(self, theirs: list[float], mine: Section, sender: int) -> CommError:
        ranks = dict(zip(self._numbers, self._members.ranks, strict=True))
        known = {section.number: section.what for section in self._sections.values()}
        names = [known.get(number, "exchange of other values") for number in theirs] or ["next step"]
        peer = f"rank {ranks[sender]}" if sender in ranks else f"worker {sender}"
        return CommError(f"is in the {names[0]}, but this rank is in the {mine.what}: make the same calls on all ranks, in the "
                         "same order", peer=peer, code="E-CALLS-DIFFER")

    def leave(self, wait_s: float) -> bool:
        """Sends this rank's last row, in a job whose members may leave. Returns True if all ranks leave after the same row."""
        pending = self.transport.start(LEAVES, "end of the session")
        return all(row == LEAVES for row in pending.wait(time.monotonic() + wait_s, self.failed).values())

    def settle(self) -> None:
        """Waits for the rows that have been sent and not received. Called before all ranks switch to another plan."""
        for row in self._sent:
            self.received(row)

    def change(self, members: Members, numbers: Sequence[int]) -> None:
        """Switches to other members. All these members call this after the same row. `numbers`: their numbers in messages."""
        self._members, self._numbers = members, numbers
        for section in self._sections.values():
            if not section.stays:
                section.forget()

    def forget(self) -> None:
        """Drops all rows that were not read."""
        self._next, self._sent = _Row(), []
        for section in self._sections.values():
            section.forget()

    def finish(self) -> None:
        """Waits for the rows in flight, because other ranks may still need this rank's row."""
        sent, self._sent = self._sent, []
        for row in sent:
            with contextlib.suppress(CommError):
                self.received(row, CLOSE_S)

    def close(self) -> None:
        self.finish()
        self.transport.close()


class _Row:
    """A row in flight: the sections that this rank has started, and the received rows of all ranks."""

    def __init__(self) -> None:
        self.parts: dict[Section, tuple[float, ...]] = {}
        self.pending: PendingRows | None = None
        self.received: dict[int, dict[Section, list[float]]] = {}

    @property
    def what(self) -> str:
        return ", ".join(section.what for section in self.parts)

    def numbers(self) -> list[float]:
        return [number for section, mine in self.parts.items() for number in (section.number, len(mine), *mine)]


class Section:
    """The numbers of one part of the session in the rows, at most once per row."""

    def __init__(self, rows: StepRows, what: str, *, stays: bool) -> None:
        self._rows, self.what, self.stays = rows, f"exchange of {what}", stays
        self.number = section_number(self.what)
        self._row: _Row | None = None

    def start(self, *numbers: float) -> None:
        """Adds this rank's numbers to its next row. All ranks call it before the same row, with equally many numbers."""
        self._row = self._rows.add(self, numbers)

    @property
    def under_way(self) -> bool:
        return self._row is not None

    @property
    def sent(self) -> bool:
        return self._row is not None and self._row.pending is not None

    @property
    def arrived(self) -> bool:
        """True: all ranks have sent the row that was started, so `read` returns at once."""
        return self._row is not None and self._row.pending is not None and self._row.pending.is_over()

    def forget(self) -> None:
        self._row = None

    def read(self) -> list[list[float]]:
        """Returns the numbers of all ranks in rank order; see read_by_sender."""
        return [*self.read_by_sender().values()]

    def read_by_sender(self) -> dict[int, list[float]]:
        """Waits for the row that was started, and returns the numbers of each sender. Sends the row if this was not done
        yet."""
        assert self._row is not None
        row, self._row = self._row, None
        return {sender: sections[self] for sender, sections in self._rows.received(row).items()}


class GatheredRows(RowTransport):
    """Exchanges rows by all-gathers in a CPU process group. The group is separate from those of gradients, so rows neither wait
    for gradients nor change the order of gradient collectives. Creating it waits for every member."""

    def __init__(self, members: Members, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._members = members
        self._group: Any = members.group(timeout_s=timeout_s, backend="gloo")

    def start(self, row: list[float], what: str) -> PendingRows:
        messages = []
        for at in range(0, len(row), PART):
            part = row[at : at + PART]
            mine = torch.tensor([len(row), *part, *[0.0] * (PART - len(part))], dtype=torch.float64)
            with torch_errors(what):
                work, rows = rows_of_all(mine, self._members.world, self._group)
            messages.append((PendingCollective(work, what, on_device=False), rows))
        return _GatheredRow(messages)

    def allow(self, late_s: float) -> None:
        if late_s != self.late_s:
            set_timeout(self._group, max(late_s, self.timeout_s))
        super().allow(late_s)

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None  # frees the group's threads in this process; in a forked process that would hang


class _GatheredRow:
    """A row in flight, with one all-gather for each of its messages."""

    def __init__(self, messages: list[tuple[PendingCollective, torch.Tensor]]) -> None:
        self._messages = messages

    def is_over(self) -> bool:
        return all(pending.is_over() for pending, _ in self._messages)

    def wait(self, deadline: float, failed: Failed) -> dict[int, list[float]]:
        rows: list[list[float]] = []
        for pending, parts in self._messages:
            pending.wait(deadline, failed)
            messages = parts.tolist()
            rows = [row + message[1:] for row, message in zip(rows or [[] for _ in messages], messages, strict=True)]
            if len({message[0] for message in messages}) > 1:
                break  # ranks with shorter rows send no further message
        lengths = [int(max(0, min(len(row), message[0]))) for row, message in zip(rows, messages, strict=True)]
        return {rank: row[:length] for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))}
