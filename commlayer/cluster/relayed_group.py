"""torch's process group for ranks that reach one place alone, where they leave tensors for each other. Knows torch's contract.

So whatever speaks to torch.distributed (this package, DistributedDataParallel, a script) does so between homes behind NAT as in
a rack, and nobody opens a socket to another home. Every collective is one thing: each member leaves its bytes, in parts, and
takes everybody's; reductions add them in member order, so all have the same bits. It is for what is small or rare. Gradients go
over servers.
"""

from __future__ import annotations

import datetime
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from commlayer.cluster.world_store import Desk
from commlayer.errors import CommError, InvalidState

NAME = "homes"
"""Of the backend, as torch.distributed.get_backend() tells it."""
PART_NBYTES = 160 << 10
"""Below what one call to a coordinator may bring."""
AHEAD = 8
"""Parts under way at once: so much of a long way is filled, and so much is kept for each member."""
NOTICE_S = 5.0
"""Who waits for a collective without a deadline of its own leaves it so much time to say whom it has waited for."""
Rows = list[bytes | None]
"""By member; None of those who are left out."""
_Work: Any = dist._Work  # type: ignore[attr-defined]
_ProcessGroup: Any = dist.ProcessGroup


class Work(_Work):  # type: ignore[misc]
    """One collective under way."""

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__()
        self._what, self._timeout_s = what, timeout_s
        self._over, self._error = threading.Event(), ""
        self._future: Any = torch.futures.Future()
        self.outputs: list[torch.Tensor] = []

    def end(self, error: str = "") -> None:
        self._error = error
        if error:
            self._future.set_exception(RuntimeError(error))
        else:
            self._future.set_result(self.outputs)
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        given_s = timeout.total_seconds()
        limit_s = given_s if given_s > 0 else self._timeout_s + NOTICE_S
        if not self._over.wait(limit_s):
            raise InvalidState("E-PROCESS-GROUP", f"{self._what} timed out after {limit_s:g} s")
        if self._error:
            raise InvalidState("E-PROCESS-GROUP", self._error)
        return True

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self.outputs


class RelayedGroup(_ProcessGroup):  # type: ignore[misc]
    """Calls are carried out one after the other, in the order in which they are made; all members make them in one order."""

    def __init__(self, desk: Desk, name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        """`ranks`: the members' numbers in the world; `rank`: this one's place among them."""
        super().__init__(rank, len(ranks))
        self._desk, self._place, self._ranks, self._mine, self._timeout_s = desk, name, list(ranks), rank, timeout_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._next = 0
        """The number of the next part. Whoever begins one has ended the one AHEAD before it, hence all have begun that one, and
        ended the one AHEAD before that: nobody asks for it any more."""
        self._failed = self._name = ""
        self.without = False
        """Whether those who are gone are left out, alike by all who are left. Else that is an error."""
        self.patience_s = 0.0
        """How long it waits behind its limit: where one that hangs is done without, by then somebody has judged that."""
        self.held = ""
        """Why nothing is carried out for now: then every call fails with this line."""
        self.alone = False
        """Whether a call that is held is answered here in place of that, as if all members had what this one has."""

    @property
    def place(self) -> str:
        """Where its members leave what they have: it has a name of its own, the same for all of them."""
        return self._place

    def allow(self, timeout_s: float) -> None:
        """So long may collectives take that begin from now on."""
        self._timeout_s = timeout_s

    # ---- torch's names

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        """torch's own half of a group in Python forgets it."""
        self._name = name

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        x = _one(tensors)
        return self._gather("all-reduce", [x], functools.partial(self._reduced, _op(opts), x), x)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        works = [self.allreduce([x], opts) for x in tensors]
        return works[-1]

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        x, root = _one(tensors), int(getattr(opts, "rootRank", 0))
        return self._gather("broadcast", [x], lambda rows: [_read(self._of(rows, root), x)], x, only=root, heirs=True)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        x = _one(inputs)
        return self._gather("all-gather", outputs[0], lambda rows: [_read(row, x) for row in rows], x, every=True)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        outputs = list(output.view(-1).chunk(self.size()))
        return self._gather("all-gather", outputs, lambda rows: [_read(row, x) for row in rows], x, every=True)

    _allgather_base = all_gather_single

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        x = _one(tensors)
        at_root = int(getattr(opts, "rootRank", 0)) == self._mine
        return self._gather("reduce", [x] if at_root else [], functools.partial(self._reduced, _op(opts), x), x)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        x = _one(inputs)
        rows_to = outputs[0] if outputs else []
        return self._gather("gather", rows_to, lambda rows: [_read(row, x) for row in rows], x, every=True)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        x, root = _one(outputs), int(getattr(opts, "rootRank", 0))
        whole = torch.stack(inputs[0]) if inputs else x.new_empty(self.size(), *x.shape)
        return self._gather("scatter", [x], lambda rows: [_read(self._of(rows, root), whole)[self._mine]],
                            whole, only=root)

    def barrier(self, opts: Any = None) -> Work:
        return self._gather("barrier", [], lambda _: [], torch.zeros(1, dtype=torch.uint8))

    def shutdown(self) -> None:
        """What is under way is still carried out."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for its thread, once it was shut down."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def move(self, desk: Desk, place: str, ranks: Sequence[int], rank: int) -> None:
        """It has been shut down, and goes on among others: DDP holds on to the group that it was made with."""
        self._thread, self._pool, self._jobs = None, None, queue.SimpleQueue()
        self._desk, self._place, self._ranks, self._mine = desk, place, list(ranks), rank
        self._next, self._failed = 0, ""

    def abort(self) -> None:
        self._failed = "the process group was aborted"
        self.shutdown()

    # ---- the one collective

    def _gather(
        self, what: str, outputs: list[torch.Tensor], made: Callable[[Rows], Sequence[torch.Tensor]], x: torch.Tensor, *,
        only: int | None = None, heirs: bool = False, every: bool = False,
    ) -> Work:
        """`made` of everybody's bytes goes to `outputs`. `only`: the one member that has any to leave. `heirs`: if it is gone,
        the first who is left does it in its place. `every`: without a member's bytes there is none, on all who are left."""
        work, nbytes = Work(f"{what} between homes", self._timeout_s + self.patience_s), x.numel() * x.element_size()
        if self.held and self.alone:
            for output, value in zip(outputs, made([_bytes(x)] * self.size()) if outputs else (), strict=True):
                output.detach().copy_(value.view(output.shape))
            work.outputs = list(outputs)
        if self.held:
            work.end("" if self.alone else self.held)
            return work
        data = _bytes(x) if only in (None, self._mine) else b""

        def carry_out() -> None:
            try:
                rows = self._exchanged(data, nbytes)
                if every and (gone := [str(rank) for rank, row in zip(self._ranks, rows, strict=True) if row is None]):
                    # Zeros would be taken for what they had. The group goes on: all who are left read this line.
                    work.end(f"{what} between homes: rank {', '.join(gone)} is gone, and has left no row: call it again behind "
                             "the next step, which is of those who are left")
                    return
                if heirs and only is not None and rows[only] is None:
                    heir = next(member for member, row in enumerate(rows) if row is not None)
                    rows[only] = self._exchanged(_bytes(x) if heir == self._mine else b"", nbytes)[heir]
                for output, value in zip(outputs, made(rows) if outputs else (), strict=True):
                    output.detach().copy_(value.view(output.shape))
                    if output.is_cuda:
                        torch.cuda.current_stream(output.device).synchronize()
            except CommError as error:
                self._failed = self._failed or str(error)
            except Exception as error:
                self._failed = self._failed or f"{type(error).__name__}: {error}"
            work.outputs = list(outputs)
            work.end(self._failed)

        self._jobs.put(carry_out)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"commlayer-group-{self._place}", daemon=True)
            self._thread.start()
        return work

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _exchanged(self, data: bytes, nbytes: int) -> Rows:
        """Everybody's. `nbytes`: what one member has at most; all know it, so all count the same parts."""
        if self._failed:
            raise CommError(self._failed)
        begins = range(0, max(nbytes, 1), PART_NBYTES)
        first, self._next = self._next, self._next + len(begins)
        one = functools.partial(self._part, data, first)
        if len(begins) == 1:
            return one(0)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AHEAD, "commlayer-parts")
        parts = [self._pool.submit(one, 0)]
        for number in range(1, len(begins)):
            if number >= AHEAD:
                parts[number - AHEAD].result()
            parts.append(self._pool.submit(one, number))
        # Who left some parts and not the others has gone meanwhile.
        return [None if None in rows else b"".join(row or b"" for row in rows)
                for rows in zip(*(part.result() for part in parts), strict=True)]

    def _part(self, data: bytes, first: int, number: int) -> Rows:
        """One part of everybody's."""
        piece = data[number * PART_NBYTES : (number + 1) * PART_NBYTES]
        limit_s = self._timeout_s
        at, until = first + number, time.monotonic() + limit_s + self.patience_s
        others = [member for member in range(len(self._ranks)) if member != self._mine]
        drop = [self._key(at - 2 * AHEAD, self._mine)] if at >= 2 * AHEAD else []
        kept = self._desk.ask(until, put=[(self._key(at, self._mine), piece)], drop=drop, without=self.without,
                              want=[(self._key(at, member), self._ranks[member]) for member in others],
                              rank=self._ranks[self._mine], limit_s=limit_s)
        if None in kept.found and not kept.over:
            missing = [self._ranks[member] for member, value in zip(others, kept.found, strict=True) if value is None]
            raise CommError(f"nothing heard within {limit_s:g} s from rank {', '.join(map(str, missing))}, "
                            "which has not come as far as this one", code="E-DEADLINE")
        rows = list(kept.found)
        return [*rows[: self._mine], piece, *rows[self._mine :]]

    def _key(self, part: int, member: int) -> str:
        return f"{self._place}/{part}/{member}"

    def _of(self, rows: Rows, root: int) -> bytes:
        if (row := rows[root]) is None:
            raise CommError("is gone, and has left nothing to share", peer=f"rank {root}")
        return row

    def _reduced(self, op: Any, x: torch.Tensor, rows: Rows) -> list[torch.Tensor]:
        there = [row for row in rows if row is not None]
        total = _read(there[0], x).clone()
        for row in there[1:]:
            _REDUCE[op](total, _read(row, x))
        return [total.div_(len(there)) if op == dist.ReduceOp.AVG else total]


_REDUCE: dict[Any, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MAX: lambda total, x: torch.maximum(total, x, out=total),
    dist.ReduceOp.MIN: lambda total, x: torch.minimum(total, x, out=total),
    dist.ReduceOp.BAND: torch.Tensor.bitwise_and_,
    dist.ReduceOp.BOR: torch.Tensor.bitwise_or_,
    dist.ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


def _op(opts: Any) -> Any:
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    found = next((known for known in _REDUCE if op == known), None)
    if found is None:
        raise InvalidState("E-PROCESS-GROUP", f"{op} between homes: not offered, allowed: {', '.join(str(o) for o in _REDUCE)}")
    return found


def _one(tensors: Any) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidState("E-PROCESS-GROUP", f"a collective of {len(tensors)} tensors between homes, allowed: one")
    found: torch.Tensor = tensors[0]
    return found


def _bytes(x: torch.Tensor) -> bytes:
    flat = x.detach().to("cpu").contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _read(data: bytes | None, like: torch.Tensor) -> torch.Tensor:
    """On the CPU."""
    assert data is not None
    if len(data) != like.numel() * like.element_size():
        raise InvalidState("E-PROCESS-GROUP",
                           f"a member left {len(data)} bytes, this rank has {like.numel() * like.element_size()}: all call the "
                           "same collectives in the same order, with tensors of one shape and dtype")
    if not data:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)
