"""Checks for replica divergence: once per round of N steps, the rows of all ranks have a checksum of their parameters.

Ranks might diverge because a script changes weights on one of them, optimizers have different states, or processors round
differently. After a divergence, the gradients of ranks belong to different models, and no error shows it. Digests of the
parameters are computed during all steps of a round. Ranks read the rows one step later, so no rank waits for them. All ranks
read the same rows after the same step, and react alike. If checksums differ, ranks gather the digest of each parameter, and
wait for the digests.

If ranks make unequal numbers of backward passes per step, each rank's gradients are averaged with those of another step. So
ranks also exchange a checksum of the exchanges after which the optimizer has stepped, and a digest of the optimizer's settings.

Before the first optimizer step of a job, or after a load, ranks compare everything at once and wait: settings, weights, and
optimizer state, which scripts often load after attach().
"""

from __future__ import annotations

import array
import dataclasses
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from commlayer.cluster.processes.collectives import Groups, gather, gather_values
from commlayer.config import Config
from commlayer.engine.components import Component, ComponentOrder
from commlayer.engine.epochs.replica import share_optimizer
from commlayer.engine.hooks.callbacks import after_backward
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.model.digests import DigestPiece, Digests, pieces
from commlayer.engine.model.optimizer_settings import differences, digest, is_structural, read_optimizer_settings
from commlayer.engine.model.optimizer_state import state_digests
from commlayer.engine.model.optimizers import HeldParameters, watch
from commlayer.engine.model.shard_parameters import TensorPart, comparable_parts, is_sharded, local_elements
from commlayer.engine.observers.spacing import steps_between
from commlayer.engine.worker.finished_peers import UNEQUAL
from commlayer.errors import CommError

COST_MOST = 0.001
"""Largest fraction of the training time that digests take, if the setting drift_steps is -1."""
LEAST, MOST = 10, 10_000
"""LEAST: number of steps of the first round, whose cost is not known yet. MOST: largest number of steps of a round."""
SETTINGS_NBYTES = 64 << 10
"""Largest size of a rank's optimizer settings, in addition to four times those of this rank."""
NOT_HELD = -1
"""Value that stands for the digest of a part that this rank does not have."""
SUMS = 2.0**32
NAMED = 3
"""Largest number of tensors or settings that one log line or error names."""
SHARDED = "consolidate_state_dict"
"""Name of a method of optimizers whose state is divided among the ranks; other optimizers do not have it."""


def spacing(cost_s: float, step_s: float) -> int:
    """Returns the number of steps of a round whose digests cost `cost_s` seconds in total.

    >>> spacing(0.02, 0.5), spacing(0.02, 0.001), spacing(0.02, 60.0)
    (40, 10000, 10)
    """
    return min(MOST, max(LEAST, steps_between(cost_s, step_s, COST_MOST))) if step_s > 0 else LEAST


class DriftRow(NamedTuple):
    """One rank's report to the other ranks. Numbers only, because they are part of the step's row."""

    by_sums: float
    """Kind of the digests: 1 if they were computed on a GPU. Digests of different kinds cannot be compared."""
    settings: float
    """Digest of the optimizer's settings."""
    digests: float
    """Checksum of the digests of all tensors that are not sharded; before the first optimizer step also of those of the
    optimizer's state."""
    has_state: float
    """1: this rank's optimizer has a state."""
    cost_s: float = 0.0
    """Seconds that the digests of a round cost."""
    step_s: float = 0.0
    optimizer_steps: float = 0.0
    """Number of optimizer steps in this round."""
    shards: float = 0.0
    """Sum of the checksums of this rank's shards, modulo SUMS. Its sum over a site does not depend on the site's size."""
    positions: float = 0.0
    """Checksum of the exchanges after which the optimizer has stepped."""


FAILED = DriftRow(*[math.nan] * len(DriftRow._fields))
"""The row of a rank whose part of the check has failed. All ranks then end the check."""


def digests_differ(rows: Sequence[DriftRow], sites: Sequence[Sequence[int]]) -> bool:
    """Returns True if some tensor differs between ranks, or between sites over which it is sharded. Digests from CPUs and from
    GPUs cannot be compared, and then count as equal."""
    shards = {sum(rows[rank].shards for rank in site) % SUMS for site in sites}
    return len({row.by_sums for row in rows}) == 1 and max(len(shards), len({row.digests for row in rows})) > 1


def differing_ranks(digests: Sequence[Sequence[int]], parts: Sequence[TensorPart]) -> dict[int, list[int]]:
    """Maps the number of each tensor that differs to the ranks whose digest of some part differs from that of the first rank
    that has the part. `digests`: of all parts, by rank."""
    ranks_of: dict[int, list[int]] = {}
    for part, column in zip(parts, zip(*digests, strict=True), strict=True):
        first = next((value for value in column if value != NOT_HELD), NOT_HELD)
        if ranks := [rank for rank, value in enumerate(column) if value not in (NOT_HELD, first)]:
            ranks_of[part.tensor] = sorted({*ranks_of.get(part.tensor, []), *ranks})
    return ranks_of


def ranks_stepped_apart(rows: Sequence[DriftRow]) -> list[int]:
    """Returns the ranks whose optimizers have stepped after other exchanges than that of rank 0."""
    steps = [(row.optimizer_steps, row.positions) for row in rows]
    return [rank for rank, mine in enumerate(steps) if mine != steps[0]]


@dataclasses.dataclass
class _Round:
    """The state of the current round on this rank, since the last row of digests was sent."""

    began: float
    training_steps: int = 0
    cost_s: float = 0.0
    """Seconds that the digests have taken."""
    optimizer_steps: int = 0
    positions_digest: int = 0
    """Checksum of the values of `training_steps` at which the optimizer steps were made."""


class ParameterDrift(Component):
    """Compares parameters between ranks when their parameters must be equal: after a step's exchange, before the optimizer's
    step."""

    order = ComponentOrder.CHECKS

    def __init__(
        self, context: DistributedJob, named: Sequence[tuple[str, torch.Tensor]], optimizer: Any, config: Config,
        held: HeldParameters,
    ) -> None:
        """`named`: the parameters with their names. `held`: returns which optimizers step the averaged parameters."""
        self._context, self._optimizer, self._reaction = context, optimizer, config.drift
        self._named, self._names = named, [name for name, _ in named]
        self._tensors = [local_elements(tensor) for _, tensor in named]
        self._remedy = '; drift="resync" would copy rank 0\'s state'
        if context.site.shards:  # rank 0 has only its shards
            self._reaction, self._remedy = "warn" if config.drift == "warn" else "end", ""
        self._sent_digests: list[int] = []
        """The digests whose checksum is in this rank's last row."""
        self._fixed = max(0, config.drift_steps)
        self._rows = context.rows.section("parameters' digests")
        self._deadline_s = config.deadline_s
        self._held = held
        # A worker that joins under local steps enters in the middle of an exchange, where the others compare nothing.
        self._compared = context.fresh and context.local is not None
        """True: settings, weights and optimizer states have been compared since the start or the last load."""
        self.new_members()
        self.new_plan()
        context.on_close.append(watch(after=self._stepped))

    def new_members(self) -> None:
        """Restarts with the first round, because a new member has no digests of earlier rounds."""
        self._set_parts()
        self._compared = self._compared and self._context.local is not None
        self._span = self._fixed or (LEAST if self._context.local is None else 1)
        self._round = _Round(time.perf_counter())
        self._costs_s: deque[float] = deque(maxlen=5)
        self._reported: list[int] = []
        self._failed = self._ended = False
        """`_failed`: this rank's part of the check has failed. `_ended`: all ranks know that the check has failed on one of
        them."""
        self._steps_differ = self._settings_differ = False
        """Two flags about the last round: optimizer steps, and optimizer settings, differed between ranks."""

    def _set_parts(self) -> None:
        """Divides the tensors into the parts that sites can compare."""
        shards, sites = self._context.site.shards, self._context.groups.sites
        sizes, tensors = {*map(len, sites)}, [tensor for _, tensor in self._named]
        sharded = {n for n, tensor in enumerate(tensors) if is_sharded(tensor) and sizes != {1}}
        compared = [*range(len(tensors))]
        if shards and len(sizes) > 1:  # a site of one rank does not know which frozen tensors are sharded in the others
            compared = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
            sharded = {compared[number] for number in shards.tensors}
        self._parts = [part for part in comparable_parts(tensors, sharded, sites) if part.tensor in {*compared}]
        self._pieces, self._digests = self._digest_pieces(self._tensors)

    def _digest_pieces(self, tensors: Sequence[torch.Tensor]) -> tuple[list[DigestPiece | None], Digests]:
        """Returns the pieces of all parts of the tensors, and the digests of this rank's parts, to which nothing is added yet.
        None: another rank has the piece. All ranks that have a piece therefore read it in the same step of a round."""
        held = [part.own_piece(tensors[part.tensor], self._context.site.shards) for part in self._parts]
        self._has = [own is not None for own in held]
        numbers = [*accumulate(self._has, initial=0)]
        every = pieces([part.empty_piece(tensors[part.tensor]) if own is None else own
                        for part, own in zip(self._parts, held, strict=True)])
        return ([piece._replace(tensor=numbers[piece.tensor]) if self._has[piece.tensor] else None for piece in every],
                Digests([own for own in held if own is not None]))

    def loaded(self) -> None:
        """Restarts the comparison."""
        self._rows.forget()
        self._compared = False
        self.new_members()

    def new_plan(self) -> None:
        """Selects the tensors to compare from now on, under the same names: those that are equal on all ranks."""
        local = self._context.local
        starts = {} if local is None else local.common
        tensors = [starts.get(id(tensor), local_elements(tensor)) for _, tensor in self._named]
        if [*map(id, tensors)] != [*map(id, self._tensors)]:
            self._tensors = tensors
            self._pieces, self._digests = self._digest_pieces(tensors)
            self._round.training_steps = 0

    def end_local_step(self) -> None:
        if not self._compared:
            self._compare_all()

    def end_exchange(self, *, early: bool) -> None:
        self.end_step()

    def end_step(self) -> None:
        if not self._compared:
            self._compare_all()
            return
        begin = time.perf_counter()
        if self._rows.under_way:
            self._compare_rows()
        if self._ended:
            return
        done = self._round.training_steps
        self._round.training_steps += 1
        try:
            low, high = (len(self._pieces) * at // self._span for at in (done, done + 1))
            for piece in filter(None, self._pieces[low:high] if not self._failed else ()):
                self._digests.add(piece)
        except Exception:
            self._failed = True
            raise
        finally:
            if self._round.training_steps == self._span:
                self._send_row()
            self._round.cost_s += time.perf_counter() - begin

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # Under local steps, a scaler may skip a step on one rank only.
        if self._context.local is None and self._held.parameter_numbers(optimizer):
            self._optimizer = self._optimizer or optimizer
            self._round.optimizer_steps += 1
            position = self._round.training_steps.to_bytes(4, "little")
            self._round.positions_digest = zlib.crc32(position, self._round.positions_digest)

    def _send_row(self) -> None:
        now, ended = time.perf_counter(), self._round
        self._costs_s.append(ended.cost_s)
        cost_s, step_s = min(self._costs_s), (now - ended.began) / self._span  # other load on the machine only adds time
        self._round = _Round(now)
        self._start(lambda: self._own_row(self._digests, [])._replace(
            cost_s=cost_s, step_s=step_s, optimizer_steps=ended.optimizer_steps, positions=ended.positions_digest))

    def _own_row(self, digests: Digests, states: Sequence[int]) -> DriftRow:
        """Returns this rank's row with the checksums of `digests` and of the digests of the optimizer's state, by part."""
        own = iter(digests.take())
        self._sent_digests = sent = [*(next(own) if held else NOT_HELD for held in self._has), *states]
        kinds = [part.rows > 0 for part in self._parts]
        kinds += kinds if states else []
        whole = array.array("q", [value for value, sharded in zip(sent, kinds, strict=True) if not sharded])
        shards = sum(zlib.crc32(array.array("q", [n, sent[n]])) for n, sharded in enumerate(kinds)
                     if sharded and sent[n] != NOT_HELD)
        return DriftRow(digests.by_sums, digest(self._settings()), zlib.crc32(whole),
                        bool(getattr(self._optimizer, "state", None)), shards=shards % SUMS)

    def _start(self, row: Callable[[], DriftRow]) -> None:
        """Starts this rank's part of the next row."""
        numbers = FAILED
        try:
            numbers = numbers if self._failed else row()
        except Exception as error:
            self._failed = True
            self._context.report_failure("the comparison of weights", error)
        self._rows.start(*map(float, numbers))

    def _read(self) -> list[DriftRow]:
        """Returns the rows of all ranks; an empty list if the check has failed on one of them and therefore ends."""
        rows = [DriftRow(*numbers) for numbers in self._rows.read()]
        if failed := [self._context.called(rank) for rank, row in enumerate(rows) if math.isnan(row.by_sums)]:
            self._ended = True
            self._context.log_decision(f"the check for replica divergence ends, because it has failed on {', '.join(failed)}")
        return [] if failed else rows

    def _compare_rows(self) -> None:
        if not (rows := self._read()):
            return
        if not self._fixed:
            self._span = spacing(max(row.cost_s for row in rows), min(row.step_s for row in rows))
        self._compare_steps(rows)
        if self._context.local is None:  # under local steps, a skipped step can delay a schedule
            self._compare_settings(rows)
        weights, before = differing_ranks(self._digests_of_all(rows), self._parts), self._reported
        self._reported = [*weights]
        if weights and (self._reaction != "warn" or self._reported != before):
            self._react_to_differences(f"the weights of {self._ranks(weights)} and {self._context.called(0)} differ in "
                                       f"{self._named_some(weights)}", [self._tensors[number] for number in weights],
                                       optimizer=all(row.has_state for row in rows), later=True)

    def _digests_of_all(self, rows: Sequence[DriftRow]) -> list[list[int]]:
        """Returns the digests of all ranks, if checksums differ; otherwise only those of this rank."""
        differ = digests_differ(rows, self._context.groups.sites)
        return gather(self._context.groups, self._sent_digests) if differ else [self._sent_digests]

    def _compare_steps(self, rows: Sequence[DriftRow]) -> None:
        """Reports ranks whose optimizers have stepped after different exchanges. If that continues, each sum mixes gradients of
        several steps, which comparing parameters would not show."""
        context, before = self._context, self._steps_differ
        others = ranks_stepped_apart(rows)
        self._steps_differ = bool(others)
        if not others:
            return
        ranks = ", ".join(map(context.called, others))
        what = (f"{ranks} and {context.called(0)} have stepped their optimizers after different exchanges "
                f"({rows[others[0]].optimizer_steps:.0f} and {rows[0].optimizer_steps:.0f} steps since the last check): "
                f"{UNEQUAL}")
        if self._reaction == "end" or (self._reaction == "resync" and before):
            raise CommError(f"step {self._step}: {what}", code="E-REPLICAS")
        if not self._fixed:
            self._span = LEAST
        if not before:
            self._context.log_decision(what)

    def _compare_all(self) -> None:
        """Compares settings, weights and optimizer states of all ranks, before the first optimizer step. Under local steps,
        values of states differ by design, but all ranks must have the same entries."""
        self._compared = True
        local = self._context.local is not None
        parameters = [tensor for _, tensor in self._named]
        count, sizes = len(self._parts), {*map(len, self._context.groups.sites)}

        def own() -> DriftRow:
            own, digests = self._digest_pieces([*map(local_elements, parameters)])
            for piece in filter(None, () if local else own):
                digests.add(piece)
            mine = [0] * len(parameters) if hasattr(self._optimizer, SHARDED) else \
                state_digests(parameters, self._optimizer, moments=not local)
            # A state's digest is that of all rows of a rank, so only ranks with equal rows can compare it.
            return self._own_row(digests, [NOT_HELD if not held or (part.rows and len(sizes) > 1) else mine[part.tensor]
                                           for held, part in zip(self._has, self._parts, strict=True)])

        self._start(own)
        if not (rows := self._read()):
            return
        digests = self._digests_of_all(rows)
        weights, states = (differing_ranks([row[first : first + count] for row in digests], self._parts)
                           for first in (0, count))
        unlike = self._differing_settings(rows)
        if not (weights or states or unlike):
            return
        parts = [*self._format_differences(unlike)]
        parts += [f"weights of {self._named_some(weights)} differ on {self._ranks(weights)}"] if weights else []
        if states:
            parts.append(f"the optimizer's state of {self._named_some(states)} differs on {self._ranks(states)}")
        self._react_to_differences("; ".join(parts), [parameters[number] for number in weights], unlike,
                                   optimizer=bool(states or unlike))

    def _settings(self) -> dict[str, str]:
        return read_optimizer_settings(self._optimizer, self._named)

    def _compare_settings(self, rows: Sequence[DriftRow]) -> None:
        before, unlike = self._settings_differ, self._differing_settings(rows)
        self._settings_differ = bool(unlike)
        if not unlike or (before and self._reaction == "warn"):
            return
        what = "; ".join(self._format_differences(unlike))
        if before:
            raise CommError(f"step {self._step}: {what}, again after it was copied from rank 0: set it "
                            'to the same value on all ranks, or use drift="warn"', code="E-REPLICAS")
        self._react_to_differences(what, [], unlike, optimizer=True)

    def _differing_settings(self, rows: Sequence[DriftRow]) -> dict[str, list[str]]:
        """Returns each setting of the optimizers that differs between ranks, with its value on each rank."""
        if len({row.settings for row in rows}) == 1:
            return {}
        groups, settings = self._context.groups, self._settings()
        most_nbytes = SETTINGS_NBYTES + 4 * sum(len(name) + len(value) for name, value in settings.items())
        return differences(gather_values(groups, settings, dict[str, str], most_nbytes, "settings of the optimizer"))

    def _format_differences(self, unlike: dict[str, list[str]]) -> list[str]:
        called = self._context.called
        return [f"{name} is " + ", ".join(
            f"{value} on {', '.join(called(at) for at, other in enumerate(row) if other == value)}"
            for value in dict.fromkeys(row)) for name, row in [*unlike.items()][:NAMED]]

    def _react_to_differences(
        self, what: str, tensors: Collection[torch.Tensor], unlike: Mapping[str, Sequence[str]] = MappingProxyType({}), *,
        optimizer: bool, later: bool = False,
    ) -> None:
        """Reacts to differences as the setting drift says. `tensors`, `optimizer`: what to copy from rank 0. `later`: True for
        weights of a later step, which are copied even if the optimizer's state cannot be."""
        if self._reaction == "warn":
            self._context.log_decision(f'{what}{self._remedy}. Training continues because drift="warn".')
            return
        at, copied = f"step {self._step}: ", "rank 0's state" if optimizer else "rank 0's weights"
        if self._reaction == "end":
            raise CommError(f"{at}{what}{self._remedy}; drift=\"warn\" would continue", code="E-REPLICAS")
        if bad := [name for name in unlike if is_structural(name)]:
            raise CommError(f"{at}{what}; ranks that differ in {bad[0]} cannot use rank 0's state: start "
                            'all ranks with the same, or use drift="warn"', code="E-REPLICAS")
        for tensor in tensors:
            self._copy(tensor, self._context.groups)
        try:
            if optimizer:
                share_optimizer(self._optimizer, self._context.groups)
        except ValueError as error:
            if not later:
                raise CommError(f"{at}{what}; rank 0's state cannot be copied: {error}", code="E-REPLICAS") from None
            copied = f"rank 0's weights, but not with the optimizer's state: {error}"
        self._context.log_decision(f"{what}: all ranks continue with {copied}")

    @property
    def _step(self) -> int:
        return self._context.passes

    def _ranks(self, differing: dict[int, list[int]]) -> str:
        return ", ".join(map(self._context.called, sorted({rank for each in differing.values() for rank in each})))

    def _named_some(self, numbers: Iterable[int]) -> str:
        names = [self._names[number] for number in numbers]
        return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")

    def _copy(self, tensor: torch.Tensor, groups: Groups) -> None:
        received = tensor.detach().to(groups.device, copy=True, memory_format=torch.contiguous_format)
        groups.broadcast_all(received).wait(time.monotonic() + self._deadline_s)

        def write() -> None:
            # The function writes to .data, so autograd does not count a change, just as it does not count the optimizer's
            # changes.
            tensor.data.copy_(received)
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()  # the optimizer may run on another stream

        after_backward(write)  # under sync="forward" a backward pass is running, which must not see two sets of weights
