"""Whether all ranks still have the same parameters: a digest of each goes round every so many steps. Knows no gradients.

Where ranks differ (a script that changes weights on one of them, optimizers in different states, processors that round
differently) their gradients are of different models, and nothing else would say so. The digests of a round are made over all of
its steps and read a step later, so nobody waits for them. All ranks read the same rows behind the same step, and act alike.

With the digests goes behind which exchanges the optimizer has stepped. Where ranks make unequal numbers of backward passes for
a step, each one's gradients are averaged with those that others have for another step. So do the optimizer's settings.

Ahead of the first optimizer step, of a job or after a load, ranks compare everything at once and wait: settings,
weights, and optimizer state, which scripts often load after attach().
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from commlayer.cluster.all_or_none import gather, gather_bytes
from commlayer.cluster.groups import Groups
from commlayer.config import Config
from commlayer.engine.connection import Connection
from commlayer.engine.ended_peers import UNEQUAL
from commlayer.engine.optimizer_memory import state_digests
from commlayer.engine.optimizer_settings import differences, digest, settings_of, structural
from commlayer.engine.optimizer_steps import Held, watch
from commlayer.engine.replica import share_optimizer
from commlayer.engine.spacing import steps_between
from commlayer.engine.tensor_digests import Digests, pieces
from commlayer.errors import CommError

COST_MOST = 0.001
"""Part of the training time that digests may take, where the setting leaves it open."""
LEAST, MOST = 10, 10_000
"""Steps of a round: of the first one, whose costs nobody knows yet, and at most."""
NAMED = 3
"""So many tensors are named in one line."""
HEAD = 6
"""Numbers of a row ahead of the digests: which kind they are, what they cost, what a step takes, two of the steps made, and a
digest of the optimizer's settings."""
SHARDED = "consolidate_state_dict"
"""Which optimizers have whose state is in parts, one on each rank."""


def drift_of(
    connection: Connection, named: Sequence[tuple[str, torch.Tensor]], optimizer: Any, config: Config, held: Held,
) -> ParameterDrift | None:
    """If there are others to compare with."""
    if connection.worker is None or connection.groups is None or connection.world == 1 or not config.drift_steps:
        return None
    return ParameterDrift(connection, named, optimizer, config, held)


def spacing(cost_s: float, step_s: float) -> int:
    """Steps of a round that costs so much in all.

    >>> spacing(0.02, 0.5), spacing(0.02, 0.001), spacing(0.02, 60.0)
    (40, 10000, 10)
    """
    return min(MOST, max(LEAST, steps_between(cost_s, step_s, COST_MOST))) if step_s > 0 else LEAST


def _unlike(rows: Sequence[Sequence[float]]) -> dict[int, list[int]]:
    """By place, which rows differ there from the first; only places where some do."""
    found = {at: [rank for rank, row in enumerate(rows) if row[at] != rows[0][at]] for at in range(len(rows[0]))}
    return {at: ranks for at, ranks in found.items() if ranks}


class ParameterDrift:
    """Called by all ranks where their parameters must be equal: behind a step's exchange, ahead of the optimizer's step."""

    def __init__(
        self, connection: Connection, named: Sequence[tuple[str, torch.Tensor]], optimizer: Any, config: Config, held: Held,
    ) -> None:
        """`held`: of the parameters that are averaged."""
        self._connection, self._optimizer, self._answer = connection, optimizer, config.drift
        self._named, self._names = named, [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self._pieces, self._digests = pieces(self._tensors), Digests(self._tensors)
        self._fixed = max(0, config.drift_steps)
        assert connection.rows is not None
        self._rows = connection.rows.rows("parameters' digests")
        self._deadline_s = config.deadline_s
        self._held = held
        # Who joins a job that steps locally comes into an exchange, and others make no comparison there.
        self._compared = connection.fresh and connection.local is not None
        """Whether settings and states have been."""
        self.begin_again()
        connection.on_close.append(watch(after=self._stepped))

    def begin_again(self) -> None:
        """With the first round: there is somebody now who knows of none before. All ranks call it in the same step."""
        self._digests = Digests(self._tensors)
        self._compared = self._compared and self._connection.local is not None
        self._span, self._place = self._fixed or (LEAST if self._connection.local is None else 1), 0
        self._began = time.perf_counter()
        self._cost_s = 0.0
        self._costs_s: deque[float] = deque(maxlen=5)
        self._said: list[int] = []
        self._steps, self._places = 0, 0
        """How often the optimizer has stepped in this round, and a check sum of behind which exchanges."""
        self._apart = self._unlike = False
        """Whether that was not alike in the last round; whether settings were not."""

    def loaded(self) -> None:
        """A checkpoint has been loaded, on all ranks behind the same step."""
        self._rows.forget()
        self._compared = False
        self.begin_again()

    def start(self) -> None:
        """Ahead of the first optimizer step. All ranks call it behind the same backward pass; later it does nothing."""
        if not self._compared:
            self._compared = True
            try:
                self._compare_all()
            except CommError as error:
                self._connection.broke(error)

    def compare(self, tensors: Sequence[torch.Tensor]) -> None:
        """From now on these, of the same names. All ranks call it behind the same step."""
        if [*map(id, tensors)] != [*map(id, self._tensors)]:
            self._tensors = [*tensors]
            self._pieces, self._digests, self._place = pieces(self._tensors), Digests(self._tensors), 0

    def __call__(self) -> None:
        if not self._compared:
            self.start()
            return
        begin = time.perf_counter()
        if self._rows.under_way:
            self._hear()
        low, high = (len(self._pieces) * place // self._span for place in (self._place, self._place + 1))
        for piece in self._pieces[low:high]:
            self._digests.add(piece)
        self._place += 1
        if self._place == self._span:
            self._tell()
        self._cost_s += time.perf_counter() - begin

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # Under local steps a scaler may skip one on one rank alone.
        if self._connection.local is None and self._held.by(optimizer):
            self._optimizer = self._optimizer or optimizer
            self._steps += 1
            self._places = zlib.crc32(self._place.to_bytes(4, "little"), self._places)

    def _tell(self) -> None:
        now = time.perf_counter()
        self._costs_s.append(self._cost_s)
        cost_s, step_s = min(self._costs_s), (now - self._began) / self._span  # what else the machine does only adds
        row = (float(self._digests.by_sums), cost_s, step_s, float(self._steps), float(self._places),
               float(digest(self._settings())), *map(float, self._digests.take()))
        self._began, self._cost_s, self._place = now, 0.0, 0
        self._steps = self._places = 0
        try:
            self._rows.start(*row)
        except CommError as error:
            self._connection.broke(error)

    def _hear(self) -> None:
        worker = self._connection.worker
        assert worker is not None
        try:
            heard = self._rows.read()
            if not self._fixed:
                self._span = spacing(max(row[1] for row in heard), min(row[2] for row in heard))
            self._compare_steps(heard)
            if self._connection.local is None:  # there a scaler may skip the step behind which a schedule moves on
                self._compare_settings({row[HEAD - 1] for row in heard})
            if len({row[0] for row in heard}) > 1:
                return  # some on a processor, some on a GPU: bits that differ say nothing there
            self._act(_unlike([row[HEAD:] for row in heard]))
        except CommError as error:
            self._connection.broke(error)

    def _compare_steps(self, heard: Sequence[Sequence[float]]) -> None:
        """Steps behind other exchanges are said. Where they go on, no sum is of one step, and parameters are not all of it."""
        made, before = self._connection, self._apart
        others = [rank for rank, row in enumerate(heard) if row[3:5] != heard[0][3:5]]
        self._apart = bool(others)
        if not others or made.worker is None or made.groups is None:
            return
        ranks = ", ".join(map(made.called, others))
        what = (f"{ranks} and {made.called(0)} have stepped their optimizers behind different exchanges "
                f"({heard[others[0]][3]:.0f} and {heard[0][3]:.0f} times since the last look): {UNEQUAL}")
        if self._answer == "end" or (self._answer == "resync" and before):
            raise CommError(f"step {self._step}: {what}", code="E-REPLICAS")
        if not self._fixed:
            self._span = LEAST
        if not before:
            self._connection.say(what)

    # ---- everything at once

    def _compare_all(self) -> None:
        """Settings, weights and states. Under local steps states differ as they should, but not in which entries there are."""
        made, settings = self._connection, self._settings()
        local = made.local is not None
        parameters = [tensor for _, tensor in self._named]
        digests = Digests(parameters)
        for piece in () if local else pieces(parameters):
            digests.add(piece)
        mine = [0] * len(parameters) if hasattr(self._optimizer, SHARDED) else \
            state_digests(parameters, self._optimizer, moments=not local)
        self._rows.start(float(digests.by_sums), float(digest(settings)), *map(float, digests.take()), *map(float, mine))
        heard = self._rows.read()
        assert made.groups is not None
        kinds, digested, count = {row[0] for row in heard}, {row[1] for row in heard}, len(parameters)
        # Some on a processor, some on a GPU: bits that differ say nothing there.
        weights, states = ({}, {}) if len(kinds) > 1 else (_unlike([row[at : at + count] for row in heard])
                                                            for at in (2, 2 + count))
        unlike = self._gather_settings(made.groups) if len(digested) > 1 else {}
        if not (weights or states or unlike):
            return
        parts = [*self._spelled(unlike)]
        parts += [f"weights of {self._named_some(weights)} differ on {self._ranks(weights)}"] if weights else []
        if states:
            parts.append(f"the optimizer's state of {self._named_some(states)} differs on {self._ranks(states)}")
        self._answer_with("; ".join(parts), lambda groups: self._take_all([*weights], groups, optimizer=bool(states or unlike)),
                          unlike)

    def _take_all(self, numbers: Sequence[int], groups: Groups, *, optimizer: bool) -> None:
        for number in numbers:
            self._take(self._named[number][1], groups)
        if optimizer:
            share_optimizer(self._optimizer, groups, self._deadline_s)

    # ---- settings

    def _settings(self) -> dict[str, str]:
        return settings_of(self._optimizer, self._named)

    def _compare_settings(self, digested: set[float]) -> None:
        made, before = self._connection, self._unlike
        assert made.groups is not None
        unlike = self._gather_settings(made.groups) if len(digested) > 1 else {}
        self._unlike = bool(unlike)
        if not unlike or (before and self._answer == "warn"):
            return
        what = "; ".join(self._spelled(unlike))
        if before:
            raise CommError(f"step {self._step}: {what}, again since rank 0's was taken: set it alike on all ranks, or say "
                            'drift="warn"', code="E-REPLICAS")
        self._answer_with(what, lambda groups: share_optimizer(self._optimizer, groups, self._deadline_s), unlike)

    def _gather_settings(self, groups: Groups) -> dict[str, list[str]]:
        rows = gather_bytes(groups, json.dumps(self._settings()).encode())
        return differences([json.loads(row) for row in rows])

    def _spelled(self, unlike: dict[str, list[str]]) -> list[str]:
        called = self._connection.called
        return [f"{name} is " + ", ".join(
            f"{value} on {', '.join(called(at) for at, other in enumerate(row) if other == value)}"
            for value in dict.fromkeys(row)) for name, row in [*unlike.items()][:NAMED]]

    def _answer_with(self, what: str, take: Callable[[Groups], None], unlike: dict[str, list[str]]) -> None:
        """Acts as the setting `drift` says."""
        groups = self._connection.groups
        assert groups is not None
        if self._answer == "warn":
            self._connection.say(f'{what}; training goes on so, since drift="warn"')
            return
        at = f"step {self._step}: "
        if self._answer == "end":
            raise CommError(f'{at}{what}; drift="resync" would go on from what rank 0 has, drift="warn" as it is',
                            code="E-REPLICAS")
        if bad := [name for name in unlike if structural(name)]:
            raise CommError(f'{at}{what}; ranks that differ in {bad[0]} cannot go on from what rank 0 has: give all the '
                            'same, or say drift="warn"', code="E-REPLICAS")
        try:
            take(groups)
        except ValueError as error:
            raise CommError(f"{at}{what}; all cannot go on from what rank 0 has: {error}", code="E-REPLICAS") from None
        self._connection.say(f"{what}: all go on from what rank 0 has")

    # ---- weights, as they are compared on the way

    @property
    def _step(self) -> int:
        return self._connection.passes

    def _ranks(self, differing: dict[int, list[int]]) -> str:
        return ", ".join(map(self._connection.called, sorted({rank for each in differing.values() for rank in each})))

    def _named_some(self, numbers: Iterable[int]) -> str:
        names = [self._names[number] for number in numbers]
        return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")

    def _act(self, differing: dict[int, list[int]]) -> None:
        """`differing`: by tensor, the ranks that have another one than rank 0. Empty, as a rule."""
        made = self._connection
        if not differing or made.worker is None or made.groups is None:
            self._said = []
            return
        what = f"{self._ranks(differing)} and {made.called(0)} have drifted apart in {self._named_some(differing)}"
        if self._answer == "end":
            raise CommError(f'step {self._step}: {what}; drift="resync" would go on from what rank 0 has', code="E-REPLICAS")
        if self._answer == "resync":
            what += ": all go on from what rank 0 has, " + self._resync([*differing], made.groups)
        else:
            what += ': training goes on with different models; drift="resync" would take what rank 0 has'
        if [*differing] != self._said or self._answer == "resync":
            self._connection.say(what)
        self._said = [*differing]

    def _resync(self, numbers: Sequence[int], groups: Groups) -> str:
        """Takes parameters and what the optimizer keeps for them from rank 0."""
        kept = [self._state(number) for number in numbers]
        for number in numbers:
            self._take(self._tensors[number], groups)
        kinds = "".join(f"{name}{tuple(t.shape)}{t.dtype}" for each in kept for name, t in each)
        mine = int.from_bytes(hashlib.sha256(f"{len(kept)}{kinds}".encode()).digest()[:8], "little") >> 1
        if len({row[0] for row in gather(groups, [mine])}) > 1:
            try:
                share_optimizer(self._optimizer, groups, self._deadline_s)
            except ValueError as error:
                return f"but not the optimizer's state: {error}"
            return "with the optimizer's state"
        for _, tensor in (pair for each in kept for pair in each):
            self._take(tensor, groups)
        return "with the optimizer's state" if kinds else "without any optimizer's state"

    def _state(self, number: int) -> list[tuple[str, torch.Tensor]]:
        state = getattr(self._optimizer, "state", {}).get(self._tensors[number], {})
        return sorted(((str(name), t.detach()) for name, t in state.items() if isinstance(t, torch.Tensor)),
                      key=lambda pair: pair[0])

    def _take(self, tensor: torch.Tensor, groups: Groups) -> None:
        there = tensor.detach().to(groups.device).contiguous()
        groups.broadcast_all(there).wait(time.monotonic() + self._deadline_s)
        # Not a change that autograd would count: it stands where the optimizer's own stand.
        tensor.data.copy_(there)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # the optimizer may run on another stream
