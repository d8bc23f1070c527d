"""A torch process group whose members exchange tensors through the coordinator's key-value store instead of direct connections.

It serves ranks at sites behind NAT: torch.distributed (in this package, in DistributedDataParallel, in a script) works between
sites without connections between them. Every collective is an all-gather: each member writes its bytes in chunks, and reads the
bytes of all others. Reductions add them in member order, so all results are equal bit for bit. The group is meant for small or
rare data; gradients are sent through servers.
"""

from __future__ import annotations

import datetime
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commlayer.cluster.calls.messages import StoreKey
from commlayer.errors import CommError, InvalidState

if TYPE_CHECKING:
    from commlayer.cluster.calls.site_client import KvClient

NAME = "homes"
"""Backend name, as torch.distributed.get_backend() returns it."""
PART_NBYTES = 160 << 10
"""Size of a chunk, which must be less than the limit of one call to the coordinator."""
PARTS_IN_FLIGHT = 8
"""Number of chunks in flight at once, enough to fill a link of high latency. This limit also bounds the data that the
coordinator stores for each member."""
ERROR_NOTICE_S = 5.0
"""A wait without its own timeout lasts this many seconds longer than the collective. The collective's error, which can name
missing ranks, then comes first."""
Rows = list[bytes | None]
"""The bytes of each member, in member order; None for members that are left out."""
_Work: Any = dist._Work
_ProcessGroup: Any = dist.ProcessGroup
Reducer: Any = dist.Reducer


class RelayWork(_Work):  # type: ignore[misc]
    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__()
        self._what, self._timeout_s = what, timeout_s
        self._over, self._error = threading.Event(), ""
        self._future: Any = torch.futures.Future()
        self.outputs: list[torch.Tensor] = []

    def end(self, error: str = "") -> None:
        self._error = error
        if error:
            self._future.set_exception(InvalidState("E-COLLECTIVE", error))
        else:
            self._future.set_result(self.outputs)
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        given_s = timeout.total_seconds()
        limit_s = given_s if given_s > 0 else self._timeout_s + ERROR_NOTICE_S
        if not self._over.wait(limit_s):
            raise InvalidState("E-DEADLINE", f"{self._what} timed out after {limit_s:g} s")
        if self._error:
            raise InvalidState("E-COLLECTIVE", self._error)
        return True

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self.outputs


class RelayedGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group that relays tensors through the coordinator. The group runs its collectives one after the other in call
    order; all members must call collectives in the same order."""

    def __init__(self, kv: KvClient, name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        """`kv`: client of the coordinator's store. `name`: key prefix, equal on all members. `ranks`: world ranks of the
        members. `rank`: this process's index among them. `timeout_s`: timeout of collectives."""
        super().__init__(rank, len(ranks))
        self._kv, self._place, self._ranks, self._mine, self.timeout_s = kv, name, list(ranks), rank, timeout_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._next = 0
        """Number of the next chunk. A member that starts chunk n has finished chunk n - PARTS_IN_FLIGHT. When a member starts
        chunk n, all members have finished chunk n - 2 * PARTS_IN_FLIGHT, so this chunk can be dropped."""
        self._failed = self._name = ""
        self.skip_lost = False
        """True: collectives leave out lost members, the same ones on all ranks. False: a lost member is an error."""
        self.patience_s = 0.0
        """Seconds that a collective waits beyond its timeout. In that time the coordinator evicts a member that hangs, if the
        job may continue without that member."""
        self.paused_reason = ""
        """If not empty, collectives are on hold: every call fails with this text."""
        self.local_only = False
        """True: while collectives are on hold, they succeed locally, as if every member had this rank's data."""

    @property
    def place(self) -> str:
        """Key prefix of the group's values, unique to the group and equal on all its members."""
        return self._place

    # torch calls the following methods by these names.

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        """Stores the group's name, because torch does not store it for a process group implemented in Python."""
        self._name = name

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: Any, opts: Any = None) -> RelayWork:
        x = _one(tensors)
        return self._start_collective("all-reduce", [x], functools.partial(self._reduced, _op(opts), x), x)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> RelayWork:
        works = [self.allreduce([x], opts) for x in tensors]
        return works[-1]

    def broadcast(self, tensors: Any, opts: Any = None) -> RelayWork:
        x, root = _one(tensors), int(getattr(opts, "rootRank", 0))
        check = layout.check(x, f"rank {self._ranks[root]}")
        return self._start_collective("broadcast", [x], lambda rows: [check(_read(self._require_row(rows, root), x))], x,
                                      only=root,
                                      successor_sends=True)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> RelayWork:
        x = _one(inputs)
        return self._start_collective("all-gather", outputs[0], lambda rows: [_read(row, x) for row in rows], x, every=True)

    def allgather_unequal(self, outputs: list[torch.Tensor], x: torch.Tensor) -> RelayWork:
        """Gathers tensors of different sizes, which all members know: those of `outputs`. Each member sends only its own."""
        most_nbytes = max(out.nbytes for out in outputs)
        return self._start_collective("all-gather", outputs, lambda rows: [*map(_read, rows, outputs)], x, every=True,
                                      most_nbytes=most_nbytes)

    def allgather_present(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Gathers a tensor of each member that is not lost; waits. Returns the same tensors on all of these members, in member
        order."""
        found: list[torch.Tensor] = []

        def read(rows: Rows) -> Sequence[torch.Tensor]:
            found.extend(_read(row, x).to(x.device) for row in rows if row is not None)
            return ()

        self._start_collective("all-gather", (), read, x).wait()
        return found

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> RelayWork:
        outputs = list(output.view(-1).chunk(self.size()))
        return self._start_collective("all-gather", outputs, lambda rows: [_read(row, x) for row in rows], x, every=True)

    _allgather_base = all_gather_single

    def reduce(self, tensors: Any, opts: Any = None) -> RelayWork:
        x = _one(tensors)
        if int(getattr(opts, "rootRank", 0)) != self._mine:
            return self._start_collective("reduce", [], _no_result, x)
        return self._start_collective("reduce", [x], functools.partial(self._reduced, _op(opts), x), x)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> RelayWork:
        x = _one(inputs)
        if not outputs:
            return self._start_collective("gather", [], _no_result, x, every=True)
        return self._start_collective("gather", outputs[0], lambda rows: [_read(row, x) for row in rows], x, every=True)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> RelayWork:
        x, root = _one(outputs), int(getattr(opts, "rootRank", 0))
        stacked = torch.stack(inputs[0]) if inputs else x.new_empty(self.size(), *x.shape)
        return self._start_collective("scatter", [x], lambda rows: [_read(self._require_row(rows, root), stacked)[self._mine]],
                                      stacked, only=root)

    def barrier(self, opts: Any = None) -> RelayWork:
        """Ends at once while this group is paused, because the other ranks have passed the barrier already."""
        if self.paused_reason:
            (work := RelayWork("barrier", self.timeout_s)).end()
            return work
        return self._start_collective("barrier", [], _no_result, torch.zeros(1, dtype=torch.uint8))

    def shutdown(self) -> None:
        """Ends the group's thread after the collectives that have been called so far."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the group's thread to end, after shutdown()."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def move(self, kv: KvClient, place: str, ranks: Sequence[int], rank: int) -> None:
        """Continues with other members; call it after shutdown(). DDP keeps the group object that it was created with, so the
        same object must work with new members."""
        self._thread, self._pool, self._jobs = None, None, queue.SimpleQueue()
        self._kv, self._place, self._ranks, self._mine = kv, place, list(ranks), rank
        self._next, self._failed = 0, ""

    def abort(self) -> None:
        self._failed = "the process group was aborted"
        self.shutdown()

    def _start_collective(
        self, what: str, outputs: Sequence[torch.Tensor], compute: Callable[[Rows], Sequence[torch.Tensor]], x: torch.Tensor, *,
        only: int | None = None, successor_sends: bool = False, every: bool = False, most_nbytes: int | None = None,
    ) -> RelayWork:
        """Starts a collective; `compute` computes the `outputs` from all members' bytes. `only`: the one member that
        contributes; None: all do. `successor_sends`: if that member is gone, the first remaining one contributes instead.
        `every`: fails on all remaining ranks if a member's bytes are missing. `most_nbytes`: size of the largest contribution;
        None: all have the size of `x`."""
        work, nbytes = RelayWork(f"{what} between homes", self.timeout_s + self.patience_s), most_nbytes or x.nbytes
        if self.paused_reason and self.local_only:
            for output, value in zip(outputs, compute([_bytes(x)] * self.size()), strict=True):
                output.detach().copy_(value.view(output.shape))
            work.outputs = list(outputs)
        if self.paused_reason:
            work.end("" if self.local_only else self.paused_reason)
            return work
        data = _bytes(x) if only in (None, self._mine) else b""

        def carry_out() -> None:
            try:
                rows = self._exchanged(data, nbytes)
                if every and (gone := [str(rank) for rank, row in zip(self._ranks, rows, strict=True) if row is None]):
                    # Zeros would look like that member's data. The group stays usable: all remaining ranks get this error.
                    work.end(f"{what} between homes: rank {', '.join(gone)} left before it sent its data: call it again after "
                             "the next step, with the remaining ranks")
                    return
                if successor_sends and only is not None and rows[only] is None:
                    heir = next(member for member, row in enumerate(rows) if row is not None)
                    rows[only] = self._exchanged(_bytes(x) if heir == self._mine else b"", nbytes)[heir]
                values = compute(rows)
                if len(outputs) != len(values):
                    work.end(f"{what} between homes: got {len(outputs)} output tensors, but the job has {len(values)} workers: "
                             "read torch.distributed.get_world_size() again after homes have left or joined")
                    return
                for output, value in zip(outputs, values, strict=True):
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
        """Exchanges bytes with all members and returns them in member order. `nbytes`: the size of the largest contribution,
        equal on all members, so all count the same chunks."""
        if self._failed:
            raise CommError(self._failed)
        begins = range(0, max(nbytes, 1), PART_NBYTES)
        first, self._next = self._next, self._next + len(begins)
        one = functools.partial(self._part, data, first)
        if len(begins) == 1:
            return one(0)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(PARTS_IN_FLIGHT, "commlayer-parts")
        parts = [self._pool.submit(one, 0)]
        for number in range(1, len(begins)):
            if number >= PARTS_IN_FLIGHT:
                parts[number - PARTS_IN_FLIGHT].result()
            parts.append(self._pool.submit(one, number))
        # A member that has written only some of the chunks is gone.
        return [None if None in rows else b"".join(row or b"" for row in rows)
                for rows in zip(*(part.result() for part in parts), strict=True)]

    def _part(self, data: bytes, first: int, number: int) -> Rows:
        """Exchanges one chunk with all members. `first`: number of the collective's first chunk; `number`: index of this chunk
        in it."""
        piece = data[number * PART_NBYTES : (number + 1) * PART_NBYTES]
        limit_s = self.timeout_s
        at, until = first + number, time.monotonic() + limit_s + self.patience_s
        others = [member for member in range(len(self._ranks)) if member != self._mine]
        drop = [self._key(at - 2 * PARTS_IN_FLIGHT, self._mine)] if at >= 2 * PARTS_IN_FLIGHT else []
        reply = self._kv.request(until, put=[(self._key(at, self._mine), piece)], drop=drop, without=self.skip_lost,
                                 want=[self._key(at, member) for member in others],
                                 rank=self._ranks[self._mine], limit_s=limit_s)
        if None in reply.values and not reply.over:
            missing = [self._ranks[member] for member, value in zip(others, reply.values, strict=True) if value is None]
            raise CommError(f"no data within {limit_s:g} s from rank {', '.join(map(str, missing))}, which "
                            "has not started this collective", code="E-DEADLINE")
        rows = list(reply.values)
        return [*rows[: self._mine], piece, *rows[self._mine :]]

    def _key(self, part: int, member: int) -> StoreKey:
        return f"{self._place}/{part}", self._ranks[member]

    def _require_row(self, rows: Rows, root: int) -> bytes:
        if (row := rows[root]) is None:
            raise CommError("left without sending its data", peer=f"rank {root}")
        return row

    def _reduced(self, op: Any, x: torch.Tensor, rows: Rows) -> list[torch.Tensor]:
        present = [row for row in rows if row is not None]
        total = _read(present[0], x).clone()
        for row in present[1:]:
            _REDUCE[op](total, _read(row, x))
        return [total.div_(len(present)) if op == dist.ReduceOp.AVG else total]


class _BucketLayout(threading.local):
    """Checks the layout of buckets that DistributedDataParallel takes from rank 0: its C++ code uses the numbers as sizes and
    indices without checking all of them. Each thread has its own."""

    rebuilds = False
    """True: this thread broadcasts a layout: first the indices of all parameters with the number of buckets, then the size of
    each bucket."""
    indices: list[int] | None = None
    """The indices of all parameters, after they have been broadcast."""

    def rebuild(self, known: Callable[..., bool], *args: Any) -> bool:
        """Calls DDP's function that broadcasts a layout."""
        self.rebuilds, self.indices = True, None
        try:
            return known(*args)
        finally:
            self.rebuilds = False

    def check(self, x: torch.Tensor, peer: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that checks what `peer` broadcasts instead of `x`."""
        if not self.rebuilds:
            return lambda received: received
        indices, self.indices = self.indices, x.flatten().tolist()[:-1] if self.indices is None else None

        def checked(received: torch.Tensor) -> torch.Tensor:
            values = received.flatten().tolist()
            if indices is None:
                fits = sorted(values[:-1]) == sorted(x.flatten().tolist()[:-1]) and 1 <= values[-1] < len(values)
            else:
                fits = min(values, default=0) >= 1 and sum(values) == len(indices)
            if not fits:
                raise CommError("sends a layout of DistributedDataParallel's buckets that does not contain each parameter once",
                                peer=peer, code="E-COLLECTIVE")
            return received

        return checked


layout = _BucketLayout()
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


def _no_result(_: Rows) -> Sequence[torch.Tensor]:
    return ()


def _op(opts: Any) -> Any:
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    match = next((known for known in _REDUCE if op == known), None)
    if match is None:
        raise InvalidState("E-COLLECTIVE", f"{op} between homes is not supported, allowed: "
                                           f"{', '.join(str(o) for o in _REDUCE)}")
    return match


def _one(tensors: Any) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidState("E-COLLECTIVE", f"a collective between homes supports only one tensor, got {len(tensors)}")
    tensor: torch.Tensor = tensors[0]
    return tensor


def _bytes(x: torch.Tensor) -> bytes:
    flat = x.detach().to("cpu").contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _read(data: bytes | None, like: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor with the shape and dtype of `like` from a member's bytes."""
    assert data is not None
    if len(data) != like.numel() * like.element_size():
        raise InvalidState("E-COLLECTIVE",
                           f"a member sent {len(data)} bytes, but this rank expects {like.numel() * like.element_size()}: all "
                           "ranks must call the same collectives in the same order, with tensors of equal shape and dtype")
    if not data:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)
