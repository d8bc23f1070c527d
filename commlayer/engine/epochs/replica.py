"""Sends and installs the state that a joining worker receives: weights, buffers, optimizer state, and progress.

The state is that of the current step, before which all ranks have the same weights; under local steps, that of the last
exchange. The format is safetensors plus plain values, without pickle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.processes.collectives import Groups
from commlayer.compressors import shared_snapshot
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.buckets.shared_buffers import copy_agreed_values, store_agreed_values
from commlayer.engine.job.job import DistributedJob, JobContext, JoinedState
from commlayer.engine.model.model_tensors import averaged_buffers, trained_parameters
from commlayer.engine.model.shard_parameters import (
    engine_parameters,
    gather_whole_tensor,
    is_sharded,
    local_elements,
    original_parameter,
    reshard,
    sharded_like,
    take_shard,
)
from commlayer.engine.sync.local_steps import PENDING as RESIDUAL
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CorruptFrame, InvalidInput, short_line
from commlayer.records import MALFORMED, Epoch, Plan, Record, complete

T = TypeVar("T")
TENSOR, TUPLE = "\0tensor", "\0tuple"
"""Keys that mark tensors and tuples, for which msgpack has no type, in the encoded optimizer state."""
LOCAL, OWN, HEAD, CODEC, BUFFER, STATE = "local.", "own.", "head", "codec.", "buffer.", "state."
START, VELOCITY, BEHIND = "local.start.", "local.velocity.", "local.behind"
STATE_PER_ELEMENT, HEAD_NBYTES = 16, messages.MAX_PLAN_NBYTES
"""Largest size of a state, which limits what a rank receives: 16 values per element of the model (weights, moments, master
weights, the state of local steps, and as much of a script's own objects), and as much as a plan for all else."""


class GivenState(Record, frozen=True):
    """All values of a sent state that are not tensors."""

    follow: bool = False
    """True: the receiver first follows the exchanges of local steps, from number `step` and row `row` on, without contributing.
    The receiver gets the members' state later."""
    error: str = ""
    """The reason why the sender could not read its state; empty if it could."""
    plan: bytes = b""
    step: int = 0
    """Number of the current step in messages (Worker.step)."""
    counted: int = 0
    """Number of complete exchanges (DistributedJob.exchanges)."""
    passes: int = 0
    """Number of training steps (JobContext.passes)."""
    exchanged_steps: int = 0
    """Number of training steps whose weight changes all ranks have (DistributedJob.exchanged_steps)."""
    matched: bool = False
    """True: all ranks use norm-matched averaging (DistributedJob.matched)."""
    automatic: bool = False
    """True: commlayer chooses the plan."""
    optimizer: str = ""
    """Name of the optimizer's class; "NoneType" without an optimizer."""
    state: Any = None
    """State of the optimizer, with names instead of tensors."""
    scaler: dict[str, Any] = msgspec.field(default_factory=dict)
    followed: dict[str, str] = msgspec.field(default_factory=dict)
    """Results of the functions in JobContext.followers, by name."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """States of the script's own objects, in a checkpoint."""
    model: bool = True
    """True: the state includes model, optimizer and scaler."""
    epoch: Epoch | None = None
    """The members, with the joining worker as the last one."""
    joined: int = 0
    """Number of workers that have joined the job, with this one; see Header.joined."""
    generation: int = 0
    """Generation of the plan in messages."""
    training_id: int = 0
    """See JobContext.training_id."""
    row: int = 0
    """Number of the first row in which the joining worker takes part."""
    first_world: int = 0
    """Number of workers with which the job began (DistributedJob.first_world)."""
    exits: dict[int, int] = msgspec.field(default_factory=dict)
    """Training step at which members left that are not in `epoch`, but still in the sender's; see FixedMembers.steps_at_exit.
    """
    confirmed: int = 0
    """See FixedMembers.row_exchanged_steps."""
    admitted: tuple[int, ...] = ()
    followers: tuple[int, ...] = ()
    """See FixedMembers."""
    totals: dict[int, float] = msgspec.field(default_factory=dict)
    """Total weight of each bucket's last result, by bucket."""
    undone: dict[int, int] = msgspec.field(default_factory=dict)
    """Slices of each bucket whose last result was not applied, which all workers report to the servers with their next
    contribution: one bit per slice, by bucket."""


class TakenState(NamedTuple):
    """The state of a running job, after this rank has installed it."""

    told: GivenState
    plan: Plan
    joined: JoinedState
    late: dict[str, torch.Tensor]
    """Results that are applied one step late, by tensor name."""
    codecs: dict[str, torch.Tensor]
    """The part of codec states that is equal on all workers, by bucket and name."""
    followed: int = 0
    """Number of exchanges that this rank has followed before it joins."""


class Replica:
    def __init__(self, model: nn.Module, optimizer: Any = None, scaler: Any = None) -> None:
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._trained = engine_parameters([p for _, p in trained_parameters(model)])
        self._averaged = [name for name, _ in averaged_buffers(model)]
        self._sharded = {name: p for name, p in model.named_parameters() if is_sharded(p)}
        """The sharded parameters. During a step, FSDP keeps whole parameters in their place in the model."""

    @property
    def most_nbytes(self) -> int:
        """Largest size of this model's state on any rank. LBFGS keeps two further vectors for each remembered step."""
        groups = getattr(self._optimizer, "param_groups", ())
        history = max((group.get("history_size", 0) for group in groups), default=0)
        return most_state_nbytes([*self._model.parameters(), *self._model.buffers()], STATE_PER_ELEMENT + 2 * history)

    def state_for_joiner(self, context: DistributedJob, plan: Plan, epoch: Epoch) -> dict[str, torch.Tensor]:
        """Returns this rank's state for a joining worker, the last member of `epoch`. If the state cannot be read, returns the
        error instead. The tensors are those of the job."""
        codecs = _shared_codec_states(context)
        try:
            state = self.state(context, plan, epoch=epoch)
            # A joining worker needs no local progress. Its starts are the parameters.
            local = [name for name in state if name.startswith(LOCAL) and not name.startswith((VELOCITY, BEHIND))]
            return {name: t for name, t in state.items() if name not in local} | context.worker.late.snapshot() | codecs
        except Exception as error:  # the optimizer's code can raise any error; the other ranks continue to train
            return {HEAD: _head(GivenState(error=f"{type(error).__name__}: {error}".splitlines()[0]))}

    def invitation(self, context: DistributedJob, plan: Plan, step: int) -> bytes:
        """Returns what a joining worker needs to follow the exchanges from number `step` on, encoded."""
        local, worker = context.local, context.worker
        return safetensors.torch.save({HEAD: _head(GivenState(
            follow=True, plan=records.encode(plan), step=step, row=context.rows.transport.number,
            generation=worker.now.generation, matched=local is not None and local.matches_norms,
            first_world=context.first_world))})

    def remaining_state(self, state: Mapping[str, torch.Tensor], given: Collection[str]) -> dict[str, torch.Tensor]:
        """Returns the part of a result of `state_for_joiner` that a worker still needs after it has received an earlier one,
        with the tensors `given`, and followed the exchanges since. The moments of its optimizer may be older, because each rank
        has its own."""
        return {name: t for name, t in state.items()
                if not name.startswith(("parameter.", VELOCITY))
                and not (name in given and name.startswith(STATE) and t.numel() > 1)}

    def encoded(self, state: Mapping[str, torch.Tensor], *, apart: bool) -> tuple[bytes, bytes]:
        """Encodes a result of `state_for_joiner`: what only this rank gives, and what is equal on all ranks. `apart`: True if
        the optimizers of ranks have different states."""
        own = {name for name in state if name.startswith((HEAD, BUFFER, *([STATE] if apart else [])))}
        parts = [{name: on_host(t) for name, t in state.items() if (name in own) == mine} for mine in (True, False)]
        data = [safetensors.torch.save(part) for part in parts]
        if (nbytes := sum(map(len, data))) <= self.most_nbytes:
            return data[0], data[1]
        why = f"it has {nbytes} bytes, but with this model at most {self.most_nbytes}"
        return safetensors.torch.save({HEAD: _head(GivenState(error=why))}), b""

    def state(
        self, context: JobContext, plan: Plan | None, extra: Mapping[str, Any] = MappingProxyType({}), *, model: bool = True,
        epoch: Epoch | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns this rank's state as named tensors; one of them contains all values that are not tensors. `model`: True if
        model, optimizer and GradScaler are included. `plan`: The plan of the job; None if the job has one worker. `extra`:
        further objects, by name. `epoch`: for a joining worker, which is its last member.
        """
        tensors: dict[str, torch.Tensor] = {}
        job = context if isinstance(context, DistributedJob) else None
        local = context.local
        optimizer, scaler = (self._optimizer, self._scaler) if model else (None, None)
        head = GivenState(
            plan=b"" if plan is None else records.encode(plan), step=0 if job is None else job.worker.step,
            counted=0 if job is None else job.exchanges, passes=context.passes, exchanged_steps=context.exchanged_steps,
            matched=job is not None and job.matched, automatic=context.terms.auto, optimizer=type(optimizer).__name__,
            state=None if optimizer is None else _plain(optimizer.state_dict(), tensors, f"{STATE}optimizer"),
            scaler=_plain(scaler.state_dict(), tensors, f"{STATE}scaler") if scaler is not None else {},
            followed={name: say() for name, say in context.followers.items()},
            extra=_collect_script_states(extra, tensors), model=model)
        if job is not None and epoch is not None:
            head = msgspec.structs.replace(
                head, epoch=epoch, training_id=job.training_id, joined=job.worker.now.joined,
                generation=job.worker.now.generation,
                row=job.rows.transport.number, first_world=job.first_world,
                exits={m.rank: job.members.confirmed for m in job.uplink.epoch.members if m not in epoch.members},
                confirmed=job.members.row_exchanged_steps, admitted=tuple(job.members.admitted),
                followers=tuple(job.members.followers),
                totals=_in_site(job, {b.id: b.assumed for b in job.worker.buckets if b.assumed is not None}, float),
                undone=_in_site(job, {b.id: bits for b in job.worker.buckets
                                      if (bits := b.ledger.discarded | b.ledger.unreported)}, int))
        if model:
            buffers = {name: b.detach().clone() for name, b in self._model.named_buffers()}
            if job is not None:
                # The current buffers belong to one forward pass later and differ between ranks.
                copy_agreed_values(job.worker.shared_buffers,
                                   [*[None] * len(self._trained), *(buffers[name] for name in self._averaged)])
            tensors |= {f"buffer.{name}": b for name, b in buffers.items()}
            starts = {} if local is None else dict(zip(map(id, map(original_parameter, self._trained)), local.starts,
                                                       strict=True))
            for name, parameter in self._model.named_parameters():
                p = self._sharded.get(name, parameter)
                start = starts.get(id(p), local_elements(p).data).detach()
                tensors[f"parameter.{name}"] = gather_whole_tensor(sharded_like(p, start)) if is_sharded(p) else start
        return tensors | ({} if local is None else self._each(local.snapshot(), _whole_like)) | {HEAD: _head(head)}

    def _each(
        self, local: dict[str, torch.Tensor], change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Returns the state of local steps after change(parameter, tensor) of starts and velocities. Pending residuals, which
        ranks also save for themselves, are left out if they are those of shards."""
        sharded = any(map(is_sharded, map(original_parameter, self._trained)))
        return {name: change(original_parameter(self._trained[int(name.rpartition(".")[2])]), tensor)
                if name.startswith((START, VELOCITY)) else tensor
                for name, tensor in local.items() if not (sharded and name.startswith(RESIDUAL))}

    @contextlib.contextmanager
    def averaged(self, context: JobContext) -> Iterator[None]:
        if not isinstance(context, DistributedJob) or (local := context.local) is None:
            yield
            return
        buffers = dict(self._model.named_buffers())
        shared = [buffers[name].data for name in self._averaged]
        tensors = [*(p.data for p in self._trained), *shared]
        own = [t.clone() for t in tensors]
        reshard(self._model)
        try:
            for p, start in zip(self._trained, local.starts, strict=True):
                p.data.copy_(start)
            copy_agreed_values(context.worker.shared_buffers, [*[None] * len(self._trained), *shared])
            yield
        finally:
            reshard(self._model)
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value)

    def agree_buffers(self, worker: Worker) -> None:
        """Records that all ranks have the model's present buffers."""
        buffers = dict(self._model.named_buffers())
        store_agreed_values(worker.shared_buffers, [*[None] * len(self._trained), *(buffers[name] for name in self._averaged)])

    def own_state(self, extra: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Returns the part of a checkpoint that is different on each rank: current buffers, and the states of the script's own
        objects `extra`."""
        tensors: dict[str, torch.Tensor] = {}
        head = _head(_collect_script_states(extra, tensors))
        buffers = dict(self._model.named_buffers())
        tensors |= {f"buffer.{name}": buffers[name].detach() for name in self._averaged}
        return {f"{OWN}{name}": t for name, t in (tensors | {HEAD: head}).items()}

    def install(self, transfer: GivenState, tensors: Mapping[str, torch.Tensor], check: Callable[[Plan], None]) -> TakenState:
        """Installs the state of a running job that this rank joins, as `decode_state` returns it. `check` receives the plan.
        Raises ValueError if the state does not fit."""
        plan = records.decode(transfer.plan, Plan, "plan of the running job")
        check(plan)
        restore = self._install(transfer, tensors, "E-JOIN-STATE", "joining a running job")
        local = {name: t for name, t in tensors.items() if name.startswith(LOCAL)}
        if local:
            local |= {f"{START}{n}": start for n, start in enumerate(self.common(tensors)[0])}
            local = self._each(local, take_shard)
        return TakenState(transfer, plan, JoinedState(local, restore, dict(transfer.followed), transfer.exchanged_steps),
                          {name: t for name, t in tensors.items() if name.startswith("late.")},
                          {name.removeprefix(CODEC): t for name, t in tensors.items() if name.startswith(CODEC)})

    def common(self, tensors: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Returns the common weights of local steps in a received state, and the outer optimizer's momentum."""
        names = self._names_of_trained()
        if missing := [name for name in names if f"parameter.{name}" not in tensors]:
            raise InvalidInput("E-JOIN-STATE", f"joining a running job: its state lacks {missing[0]}: use the same model")
        return [tensors[f"parameter.{name}"] for name in names], [tensors.get(f"{VELOCITY}{n}") for n in range(len(names))]

    def completed(
        self, rest: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], starts: Sequence[torch.Tensor],
        velocity: Sequence[torch.Tensor | None],
    ) -> dict[str, torch.Tensor]:
        """Returns a complete state: `rest`, which was received last, and what it lacks from the snapshot received before
        (`tensors`), with the weights and momentum that followed from it (`starts`, `velocity`)."""
        kept = {name: t for name, t in tensors.items() if name.startswith(("parameter.", STATE))}
        kept |= {f"parameter.{name}": start for name, start in zip(self._names_of_trained(), starts, strict=True)}
        kept |= {f"{VELOCITY}{n}": each for n, each in enumerate(velocity) if each is not None}
        return kept | dict(rest)

    @property
    def trained(self) -> dict[str, int]:
        """Numbers of elements of the trained parameters, by name."""
        return {name: original_parameter(p).numel() for name, p in zip(self._names_of_trained(), self._trained, strict=True)}

    def _names_of_trained(self) -> list[str]:
        names = {id(p): name for name, p in self._model.named_parameters()}
        return [names[id(original_parameter(p))] for p in self._trained]

    def load(
        self, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any], own: Mapping[str, torch.Tensor] | None, *,
        buffers: bool,
    ) -> dict[str, torch.Tensor]:
        """Installs the state in a checkpoint, and returns the state of local steps. `own`: the result of `own_state` on this
        rank when the checkpoint was saved. None: the checkpoint contains no such state. `buffers`: True if all ranks install
        their own buffers. Raises ValueError if the state does not fit."""
        saved = msgspec.msgpack.decode(tensors[HEAD].numpy().tobytes(), type=complete(GivenState))
        states, of_states = saved.extra, tensors
        if own is not None:
            of_states = {name.removeprefix(OWN): t for name, t in own.items() if name.startswith(OWN)}
            states = msgspec.msgpack.decode(of_states[HEAD].numpy().tobytes())
        if set(extra) != set(states):
            given, kept = (", ".join(sorted(names)) or "nothing" for names in (extra, states))
            raise InvalidInput("E-CHECKPOINT", f"resume(): extra names {given}, but the checkpoint was saved with {kept}")
        if saved.model:
            self._install(saved, tensors, "E-CHECKPOINT", "resume()")
        for name, value in extra.items():
            value.load_state_dict(_whole(states[name], dict(of_states)))
        named = dict(self._model.named_buffers())
        for name in self._averaged if buffers and saved.model else ():
            named[name].data.copy_(of_states[f"buffer.{name}"])
        return self._each({name: t for name, t in tensors.items() if name.startswith(LOCAL)}, take_shard)

    def _install(self, given: GivenState, tensors: Mapping[str, torch.Tensor], code: str, what: str) -> Callable[[], None]:
        """Writes model, optimizer and scaler. Returns a function that writes the optimizer's state once more."""
        reshard(self._model)
        mine = type(self._optimizer).__name__
        if given.optimizer != mine:
            raise InvalidInput(code, f"{what}: the optimizer is {mine}, but that of the job is {given.optimizer}; it must be "
                                     "the same")
        remedy = "use the model and optimizer of the job that saved it"
        targets: dict[str, torch.Tensor] = {f"parameter.{name}": p.data for name, p in self._model.named_parameters()}
        targets |= {f"buffer.{name}": b for name, b in self._model.named_buffers()}
        saved = [name for name in tensors if name.startswith(("parameter.", "buffer."))]
        for name in dict.fromkeys([*targets, *saved]):
            here, there = (tuple(x[name].shape) if name in x else "none" for x in (targets, tensors))
            if here != there:
                raise InvalidInput(code, f"{what}: {name} has shape {here} here, but {there} in the saved state: {remedy}")

        def restore() -> None:
            if self._optimizer is not None:
                _restore(self._optimizer, given.state, tensors)

        try:
            restore()
        except Exception as error:  # of the optimizer's code
            raise InvalidInput(
                code, f"{what}: the optimizer's state does not fit ({short_line(error, 200)}): {remedy}") from None
        if self._scaler is not None and given.scaler:
            self._scaler.load_state_dict(_whole(given.scaler, dict(tensors)))
        for name, tensor in targets.items():
            local_elements(tensor).data.copy_(take_shard(tensor, tensors[name]))
        return restore


def decode_state(own: bytes, common: bytes) -> tuple[GivenState, dict[str, torch.Tensor]]:
    """Decodes the state of a running job, as `Replica.encoded` returns it."""
    try:
        tensors = safetensors.torch.load(own) | (safetensors.torch.load(common) if common else {})
        transfer = msgspec.msgpack.decode(tensors.pop(HEAD).numpy().tobytes(), type=complete(GivenState))
    except (*MALFORMED, ValueError, KeyError, SafetensorError) as error:
        raise CorruptFrame(f"the state received from the job is malformed: {short_line(error, 200)}") from None
    if transfer.error:
        raise InvalidInput("E-JOIN-STATE", f"joining a running job: its workers cannot send their state: {transfer.error}")
    return transfer, tensors


def _collect_script_states(extra: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the states of the script's own objects, with names instead of tensors. The tensors are added to `tensors`."""
    for name, value in extra.items():
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise InvalidInput("E-CHECKPOINT", f"checkpoint(): extra {name!r} is a {type(value).__name__}, but it must have "
                                               "state_dict() and load_state_dict()")
    return {name: _plain(value.state_dict(), tensors, f"{STATE}extra.{name}") for name, value in extra.items()}


def _shared_codec_states(context: DistributedJob) -> dict[str, torch.Tensor]:
    """Returns the part of codec states that is equal on all workers that encode a bucket. Each rank of a site encodes only some
    buckets, so all ranks of the site call this function together."""
    own = {f"{CODEC}{bucket.id}.{name}": torch.from_numpy(value) for bucket in context.worker.buckets
           if isinstance(bucket, EncodedBucket) for name, value in shared_snapshot(bucket.ledger.state).items()}
    rows = context.groups.gather_inside(safetensors.torch.save(own), lambda: context.worker.error)
    states = dict(chain.from_iterable(safetensors.torch.load(row).items() for row in rows))
    return {name: states[name] for name in sorted(states)}


def _in_site(context: DistributedJob, own: dict[int, T], kind: type[T]) -> dict[int, T]:
    """Returns the values of all ranks of this site, by bucket. If the model is sharded, each rank has other buckets."""
    rows = context.groups.gather_inside(msgspec.msgpack.encode(own), lambda: context.worker.error)
    return {bucket: value for row in rows for bucket, value in msgspec.msgpack.decode(row, type=dict[int, kind]).items()}  # type: ignore[valid-type]


def most_state_nbytes(tensors: Iterable[torch.Tensor], per_element: int = STATE_PER_ELEMENT) -> int:
    return HEAD_NBYTES + per_element * sum(t.numel() * max(t.element_size(), 4) for t in tensors)


def _head(record: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(record)), dtype=torch.uint8)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in CPU memory that it shares with no other tensor, as the safetensors format requires. Copies only if
    needed."""
    host = tensor.detach().cpu().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def share_optimizer(optimizer: Any, groups: Groups, source: int = 0) -> None:
    """Copies the optimizer's state and hyperparameters from rank `source` to all ranks. All ranks call it together.

    Raises the same ValueError on all ranks if rank `source` has no optimizer, or one whose state cannot be sent.
    """
    head, body = b"", b""
    if groups.rank == source:
        tensors: dict[str, torch.Tensor] = {}
        error, state = "", None
        try:
            state = _plain(optimizer.state_dict(), tensors, "state")
        except Exception as failed:  # the optimizer's code can raise any error, and the other ranks wait for a message
            error, tensors = f"rank {source}: {type(failed).__name__}: {failed}".partition("\n")[0], {}
        body = safetensors.torch.save({name: on_host(t) for name, t in tensors.items()})
        head = msgspec.msgpack.encode((error, state, len(body)))
    what = "the optimizer's state"
    shared = groups.share_bytes(head, HEAD_NBYTES, what, source=source)
    error, state, nbytes = messages.unpack(shared, tuple[str, Any, int], f"rank {groups.members.ranks[source]}", what)
    if error:
        raise InvalidInput("E-JOIN-STATE", error)
    tensors_of = (p for group in getattr(optimizer, "param_groups", ()) for p in group["params"])
    received = groups.share_bytes(body, most_state_nbytes(tensors_of), what, nbytes, source)
    if groups.rank == source:
        return
    try:
        _restore(optimizer, state, safetensors.torch.load(received))
    except Exception as failed:  # of the optimizer's code
        raise InvalidInput("E-JOIN-STATE", f"the optimizer's state of rank {groups.members.ranks[source]} does not fit: "
                                           f"{short_line(failed, 200)}") from None


def _restore(optimizer: Any, state: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    groups = list(optimizer.param_groups)
    saved = _whole(state, dict(tensors))
    for group, kept in zip(groups, saved["param_groups"], strict=False):
        for p, number in zip(group["params"], kept["params"], strict=False):
            for name, value in saved["state"].get(number, {}).items() if is_sharded(p) else ():
                if isinstance(value, torch.Tensor) and value.shape == p.shape:
                    saved["state"][number][name] = sharded_like(p, take_shard(p, value).to(p.device))
    optimizer.load_state_dict(saved)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    optimizer.param_groups[:] = groups  # scripts keep references to them


def _whole_like(p: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    return gather_whole_tensor(sharded_like(p, shard.to(p.device))) if is_sharded(p) else shard


def _plain(value: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    """Returns the value, which is at `path` in a state, with names instead of tensors. The tensors are added to `tensors`, each
    under its own path. Raises ValueError for a value that is neither a tensor nor of a plain type."""
    if isinstance(value, torch.Tensor):
        name = path if path not in tensors else f"{path}.{len(tensors)}"
        tensors[name] = gather_whole_tensor(value)
        return {TENSOR: name}
    if isinstance(value, Mapping):
        # An optimizer's parameters have an order that can differ between ranks, but their tensors must have equal names.
        numbered = all(isinstance(key, int) for key in value)
        return {key: _plain(value[key], tensors, f"{path}.{key}") for key in (sorted(value) if numbered else value)}
    if isinstance(value, tuple | list):
        plain = [_plain(inner, tensors, f"{path}.{place}") for place, inner in enumerate(value)]
        return {TUPLE: plain} if isinstance(value, tuple) else plain
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidInput("E-JOIN-STATE", f"the optimizer's state contains a value of type {type(value).__name__}, but only "
                                       "tensors and plain values are supported")


def _whole(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns the value with tensors instead of their names; the inverse of `_plain`. Removes these tensors from `tensors`:
    each is copied once, so a value takes no more memory than was received for it."""
    if isinstance(value, dict):
        if TENSOR in value:
            return tensors.pop(value[TENSOR]).clone()
        if TUPLE in value:
            return tuple(_whole(inner, tensors) for inner in value[TUPLE])
        return {key: _whole(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner, tensors) for inner in value]
    return value
