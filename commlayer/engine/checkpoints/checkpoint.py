"""Writes and loads checkpoints: model, optimizer, GradScaler, the script's own objects, and the codec state of all ranks and
servers.

A checkpoint is a folder `save-N` in the user's directory. Each rank writes files to this folder, which is on a shared disk or
on the rank's own disk. `training-R` contains model and optimizer. `rank-R` contains the codec state of rank R (residuals,
momenta) and its own module buffers. `server-S` contains the codec state of server S. After that the manifest is written. Ranks
remove older checkpoints only after the manifest is on disk, so one complete checkpoint always remains. A checkpoint without
manifest, or with missing files, is incomplete.

A rank writes `training-R` if its optimizer differs from that of other ranks (local steps), or if it does not see rank 0's file.
A job with another number of workers or another plan inherits the residuals in all files that its ranks have
(`_inherit_residuals`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError

from commlayer import records
from commlayer.cluster.calls.messages import MAX_PLAN_NBYTES, blame_position
from commlayer.cluster.processes.collectives import Groups, all_or_none, gather, gather_values
from commlayer.cluster.servers.server_codecs import CodecOps
from commlayer.compressors import make_codec, restore, snapshot
from commlayer.compressors.feedback import encodes_updates
from commlayer.compressors.residual_slices import Residuals, ResidualSlice, merge_residuals, residual_on, split_by_tensor
from commlayer.engine.buckets import shared_buffers
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.checkpoints.checkpoint_files import (
    FOLDER,
    LIST_NBYTES,
    MANIFEST,
    MAX_NUMBER_STEP,
    PLAN,
    TRAINING,
    CheckpointHeader,
    Files,
    SaveOnDisk,
    assign_file_reader,
    belongs_to_checkpoint,
    checkpoint_folder,
    files_in,
    find_checkpoints,
    keep_only,
    numbers,
    own_files,
    read,
    reading,
    remove,
    seal,
    tensor_file_path,
    write,
    writing,
)
from commlayer.engine.components import Pending
from commlayer.engine.epochs.plan_switch import switch
from commlayer.engine.epochs.replica import Replica
from commlayer.engine.job.job import DistributedJob, JobContext
from commlayer.engine.sync.local_steps import PENDING
from commlayer.engine.worker.plan_handover import inherit_residuals
from commlayer.errors import CommError, CorruptFrame, InvalidInput, PeerLost, short_line
from commlayer.observe.events import CheckpointEvent
from commlayer.planner.shards import Shards
from commlayer.records import Bucket, Plan

log = logging.getLogger("commlayer")
SHARD = "shard."
"""Prefix of the names of pending residuals that are only those of a rank's shards. Other jobs do not inherit these
residuals."""
RESIDUAL, CARRY, ASSUMED = "residual.", "carry.", "assumed."
"""Prefixes of tensor names in the file of a rank: residuals of a bucket whose codec state has them by encoder, residuals
inherited from an earlier plan, and the total weight that a bucket assumes next (WorkerBucket.assumed)."""
SAVING, LOADING = "checkpoint()", "resume()"


def worker_state(context: DistributedJob) -> dict[str, Any]:
    """Returns the state of this rank's codecs (residuals, momenta) for every bucket that the rank encodes, and the number of
    the next step."""
    worker = context.worker
    _refuse_under_way(context)
    if worker.error is None:
        worker.drain()
        worker.roll_back()
    tensors: dict[str, torch.Tensor] = {}
    for bucket in worker.buckets:
        number, ledger = bucket.id, bucket.ledger
        tensors |= {f"{number}.{name}": torch.from_numpy(value) for name, value in snapshot(ledger.state).items()}
        if not isinstance(bucket, EncodedBucket) and (residual := residual_on(ledger.unsent(), bucket.slices)) is not None:
            tensors[f"{RESIDUAL}{number}"] = torch.from_numpy(residual)
        if ledger.inherited is not None:
            tensors[f"{CARRY}{number}"] = ledger.inherited.clone()
        if bucket.assumed is not None:
            tensors[f"{ASSUMED}{number}"] = torch.tensor(bucket.assumed, dtype=torch.float64)
    tensors["total"] = torch.tensor(worker.units.total, dtype=torch.float64)
    tensors |= worker.late.snapshot()
    tensors |= shared_buffers.snapshot(worker.shared_buffers)
    if context.local is not None:
        of_shard = SHARD if context.site.shards else ""
        tensors |= {f"{of_shard}{name}": t for name, t in context.local.pending_residuals.snapshot().items()}
    return {"step": worker.step, "plan": records.digest(worker.plan), "tensors": tensors}


def restore_worker(context: DistributedJob, state: Mapping[str, Any]) -> None:
    """Restores the result of `worker_state`, under the plan with which it was saved. Does nothing if `state` is empty."""
    worker = context.worker
    if not state:
        return
    _refuse_under_way(context)
    if (saved := state.get("plan")) != (here := records.digest(worker.plan)):
        raise InvalidInput("E-CHECKPOINT", f"the state was saved with plan {saved}, but this job has {here}: use the same plan")
    tensors: Mapping[str, torch.Tensor] = state["tensors"]
    worker.drain()
    for bucket in worker.buckets:
        restore(bucket.ledger.state, _tensors_of_bucket(tensors, bucket.id))
    for bucket in worker.buckets:
        bucket.forget()
        bucket.ledger.inherited = tensors.get(f"{CARRY}{bucket.id}")
        bucket.assumed = None if (total := tensors.get(f"{ASSUMED}{bucket.id}")) is None else float(total)
    worker.late.restore(tensors)
    shared_buffers.restore(worker.shared_buffers, tensors)
    if context.local is not None:
        context.local.pending_residuals.restore({name.removeprefix(SHARD): t for name, t in tensors.items()})
    worker.now.number = int(state["step"])
    worker.units.total = float(tensors.get("total", worker.units.total))


def save(
    context: JobContext, replica: Replica, directory: Path, extra: Mapping[str, Any], *, model: bool,
) -> None:
    """Writes a checkpoint, as Session.checkpoint describes. All ranks call it between the same two steps."""
    context.retry_on_epoch_change(lambda: _save(context, replica, directory, extra, model=model))
    if context.rank == 0:
        context.stream.log.append(CheckpointEvent(action="saved", step=context.passes, directory=str(directory)))


def _save(context: JobContext, replica: Replica, directory: Path, extra: Mapping[str, Any], *, model: bool) -> None:
    job = context if isinstance(context, DistributedJob) else None
    context.components.complete(Pending.ALL_STEPS)
    groups, plan = context.groups, context.plan  # these calls may have changed them
    undone: dict[int, int] = {}
    with all_or_none(groups, SAVING):
        with writing(directory):  # first: the calls below roll back discarded averages
            directory.mkdir(parents=True, exist_ok=True)
            highest = max(numbers(directory), default=0)
        if job is not None:
            job.worker.drain()
            undone = job.worker.roll_back()
    contents: Files = {}
    if job is not None:
        contents |= server_states(job, undone)
    rows = gather(groups, [highest, secrets.randbits(62), context.training_id])
    number, first = next_number([row[0] for row in rows]), context.rank == 0
    context.training_id = max(row[2] for row in rows) or rows[0][1]
    mark = CheckpointHeader(save=f"{rows[0][1]:016x}", step=context.passes, round=0 if job is None else job.worker.step,
                            world=context.world, servers=0 if plan is None else plan.servers,
                            plan="" if plan is None else records.digest(plan), rate=1.0
                            if job is None else job.worker.units.rate,
                            members=context.first_world, sites=_unlike(groups), training_id=context.training_id)
    folder = checkpoint_folder(directory, number)

    def training() -> Files:
        return {f"{TRAINING}{context.rank}": replica.state(context, plan, extra, model=model)}

    shards = context.site.shards
    own = first or (plan is not None and plan.steps_locally and not shards.local)
    whole: Files = {}
    if shards:
        with all_or_none(groups, SAVING):
            replica.own_state(extra)  # an error of the script's objects must not come between collectives
        whole = training()  # gathers the shards inside of each site
        if not (own or context.logs):
            whole = {}
    try:
        # No rank may continue yet: messages of the next step would change state that other ranks still fetch.
        with all_or_none(groups, SAVING):
            state = {} if job is None else worker_state(job)["tensors"]
            contents[f"rank-{context.rank}"] = state | replica.own_state(extra)
            with writing(directory):
                write(folder, contents | ((whole or training()) if own else {}), mark, plan if first else None)
        with all_or_none(groups, SAVING), writing(directory):
            if context.logs and not tensor_file_path(folder, f"{TRAINING}0").exists():
                write(folder, whole or training(), mark, plan)
            if first:
                seal(folder, mark)
        with all_or_none(groups, SAVING), writing(directory):
            if context.logs and not (folder / MANIFEST).exists():
                seal(folder, mark)
    except Exception as error:
        if not isinstance(error, CommError):  # after a CommError, ranks can differ
            remove(folder)
        raise
    keep_only(directory, number)


def next_number(highest: Sequence[int]) -> int:
    """Returns the number of the next checkpoint from the highest number of each rank. The number is higher than that of any
    rank's checkpoints, so that no file of an earlier checkpoint is overwritten."""
    if min(highest) < 0 or max(highest) - min(highest) > MAX_NUMBER_STEP:
        rank = highest.index(max(highest) if min(highest) >= 0 else min(highest))
        raise CommError(f"has a checkpoint with number {highest[rank]}, but numbers may differ by {MAX_NUMBER_STEP}: remove "
                        "folders that no checkpoint() wrote from its directory", peer=f"rank {rank}", code="E-SIZE")
    return 1 + max(highest)


class FoundCheckpoint(NamedTuple):
    """The checkpoint that all ranks load, and which rank reads which of its files."""

    folder: Path
    mark: CheckpointHeader
    exact: bool
    """True: the job has as many workers as the job that saved the checkpoint, and each rank has its own files."""
    readers: dict[str, int]
    """Maps the name of each file to the rank that reads it."""


def _unlike(groups: Groups | None) -> str:
    """Returns the numbers of ranks of all sites; nothing if they are equal. Ranks of other sites have other codec states."""
    sizes = [] if groups is None else [str(len(site)) for site in groups.sites]
    return " + ".join(sizes) if len({*sizes}) > 1 else ""


def find(groups: Groups | None, rank: int, world: int, directory: Path) -> FoundCheckpoint | None:
    """Finds the newest complete checkpoint in the directory; returns None if no rank has any checkpoint. All ranks call it
    together."""
    with all_or_none(groups, LOADING), reading(directory):
        mine = find_checkpoints(directory)
    rows = gather_values(groups, mine, list[SaveOnDisk], LIST_NBYTES, "a list of checkpoints")
    faults: list[str] = []
    for number, save in sorted({(held.number, held.save) for row in rows for held in row}, reverse=True):
        on = {r: held for r, row in enumerate(rows) for held in row if (held.number, held.save) == (number, save)}
        mark = next(iter(on.values())).mark
        holders: dict[str, list[int]] = {}
        for r, held in on.items():
            for name in held.files:
                holders.setdefault(name, []).append(r)
        if mark is None or not any(held.sealed for held in on.values()):
            fault = "the save was interrupted"
        elif not any(name.startswith(TRAINING) for name in holders):
            fault = "no rank has its model"
        else:
            refuse_mixture(directory, rows, number, save, mark)
            readers = {name: assign_file_reader(name, holders[name], world) for name in (*mark.files, PLAN) if name in holders}
            exact = mark.world == world and mark.sites == _unlike(groups) and all(
                readers.get(name) == assign_file_reader(name, range(world), world) for name in mark.files)
            if faults and rank == 0:
                log.warning("resume(): loading the checkpoint of step %d, because a newer one is not complete: %s", mark.step,
                            faults[0])
            return FoundCheckpoint(checkpoint_folder(directory, number), mark, exact, readers)
        because = next((f": {held.fault}" for held in on.values() if held.fault), "")
        faults.append(f"{checkpoint_folder(directory, number)}: {fault}{because}")
    if faults:
        raise InvalidInput("E-CHECKPOINT", f"{faults[0]}; there is no complete checkpoint: pass another directory, or an empty "
                                           "one to start from the beginning")
    return None


def refuse_mixture(directory: Path, rows: Sequence[Sequence[SaveOnDisk]], number: int, save: str,
                   mark: CheckpointHeader) -> None:
    """Raises an error if ranks have checkpoints of different trainings, or files of different checkpoints. A rank may have an
    older checkpoint of the same training: its home was away when the others saved."""
    for rank, row in enumerate(rows):
        held = next((held for held in row if held.save == save), None)
        if held is not None and held.foreign:
            raise InvalidInput("E-CHECKPOINT", f"rank {rank}: {held.foreign}: put the right file back, or remove this one (its "
                                               "residuals are then lost)")
        for other in row:
            theirs = other.mark if other.sealed and other.save != save else None
            if theirs is not None and (other.number == number or (held is None and theirs.training_id != mark.training_id)):
                raise InvalidInput("E-CHECKPOINT",
                                   f"{directory}: the checkpoint of step {theirs.step} on rank {rank} and that of step "
                                   f"{mark.step} on other ranks do not belong to one training: remove {FOLDER}{other.number} "
                                   "on the ranks where it is not the one to resume, or pass another directory")


def server_states(job: DistributedJob, undone: dict[int, int]) -> Files:
    """Returns the codec states of the servers that this rank saves. All ranks call it together. `undone`: result of
    Worker.roll_back."""
    undone, contents = job.all_undone(undone), {}
    with all_or_none(job.groups, SAVING):
        for server in _assigned_servers(job):
            tensors: dict[str, torch.Tensor] = {}
            for bucket in _summed_by(job.plan, server):
                data = job.uplink.fetch_state(server, bucket.id, undone.get(bucket.id, 0))
                tensors |= {f"{bucket.id}.{name}": t for name, t in safetensors.torch.load(data).items()}
            contents[f"server-{server}"] = tensors
    job.worker.acknowledge_rollbacks()  # on all ranks: one rank has reported to each server for all of them
    return contents


def load_training(
    groups: Groups | None, rank: int, found: FoundCheckpoint, replica: Replica, extra: Mapping[str, Any],
    shards: Shards = Shards(),
) -> dict[str, torch.Tensor]:
    """Restores model, optimizer, GradScaler and `extra`. A rank without the file receives the state from a rank that has it.
    All ranks call it together. Returns the state of local steps. `shards`: how the model is sharded; the first rank of each
    site has saved the whole model."""
    own_rank = rank - shards.local
    with all_or_none(groups, LOADING), reading(found.folder):
        held = sorted((name for name in files_in(found.folder)
                       if name.startswith(TRAINING)
                       and belongs_to_checkpoint(tensor_file_path(found.folder, name), found.mark)),
                      key=lambda name: (name != f"{TRAINING}{own_rank}", int(name.removeprefix(TRAINING))))
        state = read(found.folder, held[0], found.mark) if held else {}
    having = [row[0] for row in gather(groups, [bool(state)])]
    if groups is not None and not all(having):
        source = having.index(1)
        if rank == 0:
            log.warning("resume(): %d ranks do not have the checkpoint's model; rank %d sends it to them", having.count(0),
                        source)
        data = safetensors.torch.save(state) if rank == source else b""
        data = groups.share_bytes(data, replica.most_nbytes, "the checkpoint's model", source=source)
        try:
            state = state or safetensors.torch.load(data)
        except SafetensorError as error:
            raise CorruptFrame(f"sends a checkpoint that is malformed: {short_line(error, 200)}",
                               peer=f"rank {groups.members.ranks[source]}") from None
    with all_or_none(groups, LOADING), reading(found.folder):
        world = 1 if groups is None else groups.world
        has_own = found.mark.world == world and found.readers.get(f"rank-{rank}") == rank
        own = read(found.folder, f"rank-{rank}", found.mark) if has_own else None
        return replica.load(state, extra, own, buffers=found.exact)


def load_codecs(
    context: JobContext, found: FoundCheckpoint, directory: Path, replica: Replica, local: Mapping[str, torch.Tensor],
) -> None:
    """Restores the state of local steps, `local`, and the codec state of ranks and servers. If a member leaves meanwhile, or
    fails to restore its state, the job ends on all ranks, because some ranks might have restored their state already."""
    mark = found.mark
    context.passes, context.training_id = mark.step, mark.training_id
    if context.rank == 0:
        context.stream.log.append(CheckpointEvent(action="loaded", step=context.passes, directory=str(directory)))
    if not isinstance(context, DistributedJob):
        if mark.plan:
            context.log_decision("resume(): the residuals in the checkpoint are dropped, because this job has one worker")
        return
    try:
        if mark.plan:
            context.first_world = context.worker.units.members = mark.members
        plan = _saved_plan(context, found)
        another = plan is not None and records.digest(plan) != records.digest(context.plan)
        if plan is not None and another and found.exact and context.terms.auto and _fits(context, plan):
            switch(context, plan)  # it can differ from the one with which the saving job started
        if context.local is not None and local:
            context.local.restore(local)
        if found.exact and mark.plan == records.digest(context.plan):
            _restore_unchanged(context, found)
        else:
            _inherit_residuals(context, found, plan, replica)
    except CommError as error:
        raise not_loaded(context, directory, error) from None
    except Exception as error:
        raise not_loaded(context, directory, error) from error


def _fits(context: DistributedJob, plan: Plan) -> bool:
    """Returns whether this job can train with a checkpoint's plan: its ranks can be on other machines than those that saved.
    All ranks call it together, since one of them may refuse the plan."""
    fits = True
    try:
        context.check_plan(plan)
    except InvalidInput:
        fits = False
    return all(row[0] for row in gather(context.groups, [fits]))


def _restore_unchanged(context: DistributedJob, found: FoundCheckpoint) -> None:
    """Restores on each rank and server the codec state that this rank or server had."""
    worker, link = context.worker, context.uplink
    with all_or_none(context.groups, LOADING), reading(found.folder):
        worker.drain()
        states = {name: read(found.folder, name, found.mark)
                  for name in own_files(context.rank, context.world, worker.plan.servers)}
    with all_or_none(context.groups, LOADING):  # no rank may push before every server has its state back
        for server in _assigned_servers(context):
            for bucket in _summed_by(worker.plan, server):
                data = safetensors.torch.save(_tensors_of_bucket(states[f"server-{server}"], bucket.id))
                link.put_state(server, bucket.id, found.mark.round, data)
        restore_worker(context, {"step": found.mark.round, "plan": found.mark.plan, "tensors": states[f"rank-{context.rank}"]})


def _inherit_residuals(context: DistributedJob, found: FoundCheckpoint, plan: Plan | None, replica: Replica) -> None:
    """Replaces this job's residuals by those in the checkpoint of another number of workers or another plan. Each rank inherits
    the residuals in the files that it reads. Momenta of codecs start again from zero."""
    worker, mark = context.worker, found.mark
    with all_or_none(context.groups, LOADING):
        worker.drain()
    with all_or_none(context.groups, LOADING), reading(found.folder):  # no rank may push before every server is reset
        fits = plan is not None and plan.job == worker.plan.job
        late = next((name for name in mark.files if name in found.readers and name.startswith("rank-")), "")
        own = [residuals_in(read(found.folder, name, mark), plan, mark, late=name == late)
               for name in mark.files if plan is not None and fits and found.readers.get(name) == context.rank]
        forget_residuals(context)
    take_residuals(context, merge_residuals(own), lambda: None if found.exact else replica.agree_buffers(worker))
    lost = [name for name in mark.files if name not in found.readers]
    if not mark.plan:
        return  # one worker alone, which has no residuals
    how = f"continue on this job's {context.world}"
    if lost:
        how += f", except those in {', '.join(lost)}, which no rank has"
    if not fits:
        how = "are lost, because " + (f"no rank has {PLAN}" if plan is None else "other tensors are trained now")
    context.log_decision(f"resume(): residuals of the {mark.world} workers that wrote the checkpoint {how}")


def forget_residuals(context: DistributedJob) -> None:
    """Clears the codec states of this rank and of the servers that are assigned to it."""
    worker = context.worker
    for server in _assigned_servers(context) if worker.step else ():  # before the first step, codecs have no state
        for bucket in _summed_by(worker.plan, server):
            empty = CodecOps(make_codec(bucket, plan=worker.plan), bucket, worker.plan.job).snapshot()
            context.uplink.put_state(server, bucket.id, worker.step, empty)
    for each in worker.buckets if worker.step else ():
        each.ledger.clear()
    for each in worker.buckets:
        each.forget()
        each.assumed = float(context.world)
    worker.late.restore({})
    worker.units.rate = 1.0 if worker.plan.steps_locally else context.memory.rate


def take_residuals(context: DistributedJob, own: Residuals, agree: Callable[[], None]) -> None:
    """Adds loaded residuals to those of this rank. All ranks call it together. `agree` records that buffers are equal."""
    residuals = context.site.own_part(own, context.worker.job, context.groups.timeout_s)
    with all_or_none(context.groups, LOADING):
        inherit_residuals(context.worker, residuals, context.memory.gradient_effect)
        if context.local is not None:
            context.local.pending_residuals.inherit(context.worker.pending_residuals)
        agree()


def residuals_in(tensors: Mapping[str, torch.Tensor], plan: Plan, mark: CheckpointHeader, *, late: bool = False) -> Residuals:
    """Returns the residuals in the file of a rank or a server. `late`: with results that would have been applied one step late,
    which the files of all ranks contain."""
    found: list[ResidualSlice] = []
    for bucket in plan.buckets:
        codec = make_codec(bucket, plan=plan)
        names = {f"{RESIDUAL}{bucket.id}", f"{CARRY}{bucket.id}"} & tensors.keys()
        state = _tensors_of_bucket(tensors, bucket.id)
        whole = [tensors[name] for name in names]
        if bucket.served and f"{RESIDUAL}{bucket.id}" not in names:
            whole += [t.reshape(-1) for name, t in state.items() if name.rpartition(".")[2] == "residual"]
        own = [part for values in whole for part in split_by_tensor(bucket.slices, 0, values)]
        if late and "x" in (result := _tensors_of_bucket(tensors, bucket.id, "late.")) and result["weight"]:
            in_means = bucket.path != "allreduce" and (codec.has_residual or codec.has_server_residual)
            factor = 1.0 if in_means else mark.members / float(result["weight"])
            for part, used in zip(split_by_tensor(bucket.slices, 0, result["x"]), result["used"].tolist(), strict=True):
                own += [part.times(factor)] if used else []
        found += [part.times(1.0 / mark.rate if encodes_updates(codec) else 1.0) for part in own]
    pending = [ResidualSlice(int(name.removeprefix(PENDING)), 0, t.reshape(-1))
               for name, t in tensors.items() if name.startswith(PENDING)]
    return Residuals(pending, found) if plan.steps_locally else Residuals(found + pending)


def not_loaded(context: JobContext, directory: Path, error: Exception) -> CommError:
    """Creates the error that ends the job on all ranks after a failed load."""
    cause = error if isinstance(error, CommError) else CommError(f"{type(error).__name__}: {error}")
    if departed := context.members.departed(context.waits.verdict_s):
        peer = departed[0]
        at = blame_position(str(cause), peer)
        cause = PeerLost(str(cause)[at:].partition(": ")[2] if at >= 0 else "is gone", peer=peer)
    elif isinstance(explained := context.explain(cause), CommError):
        cause = explained
    final = cause.located(what=f"{cause.what}; {directory} was not loaded and is unchanged, and all ranks stop: start all "
                               "ranks again")
    if isinstance(context, DistributedJob):
        context.worker.latch(final)
    return final


def _saved_plan(context: DistributedJob, found: FoundCheckpoint) -> Plan | None:
    """Returns the plan under which the checkpoint was saved, which one rank reads for all. Returns None if no rank has the
    plan."""
    source, offered = found.readers.get(PLAN, 0), b""
    with all_or_none(context.groups, LOADING), reading(found.folder):
        if context.rank == source and PLAN in found.readers:
            offered = (found.folder / PLAN).read_bytes()
    shared = context.groups.share_bytes(offered, MAX_PLAN_NBYTES, "a plan", source=source)
    return records.decode(shared, Plan, f"plan {found.folder / PLAN}") if shared else None


def _assigned_servers(context: DistributedJob) -> list[int]:
    """Returns the ids of the servers whose files this rank writes and reads. Each server is assigned to one rank."""
    return [s for s in range(context.plan.servers) if s % context.world == context.rank]


def _summed_by(plan: Plan, server: int) -> list[Bucket]:
    return [b for b in plan.buckets if b.served and b.server == server]


def _tensors_of_bucket(tensors: Mapping[str, torch.Tensor], bucket: int, kind: str = "") -> dict[str, torch.Tensor]:
    prefix = f"{kind}{bucket}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _refuse_under_way(context: DistributedJob) -> None:
    if context.local is not None and context.local.under_way:
        raise InvalidInput("E-CHECKPOINT", "an exchange of local steps is running: call session.flush() on all ranks first")
