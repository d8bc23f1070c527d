"""A training job on several sites that fail, leave or join at given moments. Run as a script: the training of one site.

Gradients are random numbers of a site and a step, so tests compute the weights by hand.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import structs
from safetensors.torch import load
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.cluster.calls.site_client import KvClient
from commlayer.cluster.membership import client
from commlayer.cluster.processes.collectives import Groups
from commlayer.cluster.servers.worker_client import WorkerClient
from commlayer.compressors import parse, wrap
from commlayer.compressors.residual_slices import split_by_tensor
from commlayer.engine.buckets.current_step import Arrivals
from commlayer.engine.checkpoints import checkpoint_files
from commlayer.engine.epochs import changing_members
from commlayer.engine.epochs.plan_switch import switch
from commlayer.engine.epochs.replica import Replica
from commlayer.engine.model.shard_parameters import gather_whole_tensor
from commlayer.engine.start import result_follower
from commlayer.engine.sync.local_steps import OuterSteps
from commlayer.errors import CommError, StepAbandoned
from commlayer.planner import default_plan
from commlayer.transport.protocol import SERVER_BASE, Header, Kind
from support.attached import Raises, sync_of
from support.components import Calls
from support.jobs import distributed_job
from support.residuals import by_tensor, slices_of
from support.sites import KILLED, WAIT_S, Ended, Process, Sites, all_ended

STEPS, SIZES = 12, [(40, 30), (700,), (3, 5, 7)]
EXACT, COARSE, FINE = "identity()", "onebit(block=64)", "topk(ratio=0.3)"
DEADLINE_S, SLOW_S, SECOND_S, PAUSE_S, MOST = "8", 4.0, 1.0, 0.05, 4800
"""PAUSE_S: least seconds per step of a job that a site joins. MOST: its last step if no site joins."""
LARGE_NBYTES = 6000
"""More than any value in the coordinator's store has in such a job, apart from parts of a state."""
BROKEN, RAISED = 9, 3
"""Exit codes of a site that broke the protocol, and of one whose script caught an error of commlayer."""
MOMENTUM, DECAY = 0.5, 0.999


class Event(msgspec.Struct, frozen=True):
    """What happens to a site, and when.

    `at`: "start" of the step, "backward" (inside it), "step" (after the backward pass), "end" (after the optimizer's step),
    "give" (a part of a state, if uplinks are slow), "install" (of the state that the others send), "attached", or a function
    that a save or a switch calls.
    """

    site: int
    step: int
    action: str = "kill"
    at: str = "start"
    number: int = 1
    """The call before which the site dies (after it, for functions of the uplink), counted from the start of the step."""
    after_s: float = 0.0
    joiner: bool = False
    """The site dies only after another one has registered."""


class Script(msgspec.Struct, frozen=True):
    """What all sites run."""

    codec: str = EXACT
    events: tuple[Event, ...] = ()
    attach: dict[str, Any] = {}
    matched: bool = False
    outer_momentum: float = 0.0
    uplink_s: float = 0.0
    """Seconds that each part of a state takes on the uplink of a site."""
    ddp: bool = False
    scaler: bool = False
    """With AdamW and a GradScaler that meets infinities."""
    momentum: bool = False
    """With momentum and a learning rate that decays."""
    between: str = ""
    """After every fourth step: "save", "load", "drain", "switch", "switch of rank 0", "own switch" (not requested), "sum",
    "switch if followed" (once, while a worker follows)."""
    sums: bool = False
    """The script sums a number over all ranks in each step."""
    folder: str = ""
    workers: int = 0
    """If a site joins: the number of workers at the start. Otherwise 0, and the job ends after STEPS."""
    joiners: int = 1
    more: int = 5
    """Steps after all joiners have joined."""
    collective: bool = False
    """The script calls a collective before attach()."""
    shard: str = ""
    """The model is sharded over the workers of each site: by a "mesh" of equal sites, or by a "group" of a site's workers."""
    second_first: bool = False
    """At a joining site, local rank 1 calls attach() before local rank 0."""


class Linear(nn.Module):
    """Its gradients are its inputs. If it `aborts`, its backward pass ends after the first of them."""

    aborts = False

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        parts = [Raises.apply(p, True) if self.aborts and n == 0 else p for n, p in enumerate(self.parts)]
        return torch.stack([(p * g).sum() for p, g in zip(parts, gradients, strict=True)]).sum()


def gradients(site: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + site)
    return [torch.randn(size, generator=generator) for size in SIZES]


def flat(tensors: Iterable[torch.Tensor]) -> list[float]:
    return torch.cat([gather_whole_tensor(t).detach().double().reshape(-1) for t in tensors]).tolist()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(gather_whole_tensor(t).detach().numpy().tobytes() for t in tensors)).hexdigest()


def shard(model: nn.Module, how: str) -> None:
    """Shards the model over the workers of this site. In a "group", a site of one worker keeps a whole model."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if how == "mesh":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // local, local), mesh_dim_names=("site", "shard"))
        fully_shard(model, mesh=mesh["shard"])
    elif local > 1:
        first = dist.get_rank() - int(os.environ["LOCAL_RANK"])
        group = dist.new_group([*range(first, first + local)], use_local_synchronization=True)
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))


def optimizer_of(parameters: Iterable[nn.Parameter], momentum: bool, adam: bool = False) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=0.01) if adam else torch.optim.SGD(parameters, lr=1.0,
                                                                                    momentum=MOMENTUM * momentum)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY if momentum else 1.0)


def members(text: str) -> list[list[int]]:
    """The sites of each step: "012*4 12*8" is sites 0, 1 and 2 in four steps, then 1 and 2. "-": a step that is dropped."""
    steps: list[list[int]] = []
    for part in text.split():
        sites, _, count = part.partition("*")
        steps += [[int(site) for site in sites.strip("-")]] * int(count or 1)
    return steps


def expected(steps: Sequence[Sequence[int | Sequence[int]]], momentum: bool = False) -> tuple[list[float], str]:
    """Weights by hand, and a digest of their momentum. Each step applies the mean over its sites, added in their order; first
    over the workers of a site, if it is given as a sequence."""
    weights = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    optimizer, scheduler = optimizer_of(weights, momentum)
    for step, sites in enumerate(steps):
        if sites:
            workers = [[site] if isinstance(site, int) else site for site in sites]
            parts = [added([gradients(worker, step) for worker in site]) for site in workers]
            for p, total in zip(weights, added(parts), strict=True):
                p.grad = total.mul_(1.0 / sum(map(len, workers)))
            optimizer.step()
            scheduler.step()
    return flat(weights), digest(optimizer.state[p]["momentum_buffer"] for p in weights) if momentum else ""


def added(parts: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The sum of each tensor, in order."""
    totals = [part.clone() for part in parts[0]]
    for part in parts[1:]:
        for total, x in zip(totals, part, strict=True):
            total += x
    return totals


def residuals_of(connection: Any) -> list[torch.Tensor]:
    """Residuals of this worker and, on rank 0, of the servers, per unit of the weights; between two steps."""
    undone = connection.worker.roll_back()
    shards, job = connection.site.shards, connection.worker.job
    parts = [part._replace(start=part.start + shards.elements(job.tensors[part.tensor].shape, shards.local)[0])
             if part.tensor in shards.tensors else part for part in slices_of(connection.worker)]
    if connection.rank == 0:
        for bucket in connection.plan.buckets:
            state = load(connection.uplink.fetch_state(bucket.server, bucket.id, undone.get(bucket.id, 0)))
            parts += [part for name, x in state.items() if "residual" in name
                      for part in split_by_tensor(bucket.slices, 0, x.view(-1))]
    return [total / connection.first_world for total in by_tensor(parts, SIZES)]


def means_of(put: Sequence[Sequence[torch.Tensor]], counts: Sequence[float]) -> list[torch.Tensor]:
    """This worker's part of the mean gradients of all steps, given the number of contributors to each."""
    total = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    for step, count in zip(put, counts, strict=True):
        for part, g in zip(total, step, strict=True):
            part += g.double() / count
    return total


def one_save(folder: Path) -> tuple[int, int]:
    """The only save in the folder, which is complete: how many workers wrote it, and after which step."""
    (save,) = checkpoint_files.find_checkpoints(folder)
    assert save.sealed
    assert save.mark is not None
    assert not save.fault
    return save.mark.world, save.mark.step


def start(sites: Sites, count: int, script: Script, least: int = 2) -> tuple[Process, list[Process]]:
    """The server and `count` sites that run the script."""
    server = sites.serve(count, *(["--min-workers", str(least)] if least else []))
    return server, [run(sites, script, site, rank=site) for site in range(count)]


def run(sites: Sites, script: Script, site: int, **place: Any) -> Process:
    return sites.launch(__file__, str(site), msgspec.json.encode(script).decode(), **place)


CODES = {"kill": KILLED, "hang": 1, "raise": 1, "leave": 0, "payload": BROKEN, "frame": BROKEN}


def outcome(processes: list[Process], script: Script) -> tuple[list[Ended], list[dict[str, Any]]]:
    """Checks exit codes. Returns all ends, and the reports of sites that trained to the end."""
    codes = {event.site: CODES[event.action] for event in script.events if event.action in CODES}
    ends = all_ended(processes, *(codes.get(site, 0) for site in range(len(processes))))
    return ends, [end.rows[-1] for site, end in enumerate(ends) if site not in codes]


def joiner_waits(folder: str | Path) -> Path:
    """A file that exists while a site delays its death until another one registers."""
    return Path(folder) / "waits"


class Faults:
    """The events of this site."""

    def __init__(self, site: int, script: Script) -> None:
        self.events = [event for event in script.events if event.site == site]
        self.failed = threading.Event()
        self._memberships: list[Any] = []
        self._folder, self._step, self._calls = script.folder, -1, dict[str, int]()

    def install(self) -> None:
        """Wraps the functions at which this site can fail; before attach()."""
        join, expect, arrived = client.join, Arrivals.expect, Arrivals.arrived

        def watched_join(address: str, request: Any, config: Any, on_failure: Callable[[Any], None], **named: Any) -> Any:
            def failed(error: Any) -> None:
                self.failed.set()
                on_failure(error)

            self._memberships.append(join(address, request, config, failed, **named))
            return self._memberships[-1]

        counts: dict[Any, int] = {}

        def counted_expect(arrivals: Any, count: int) -> None:
            counts[arrivals] = count
            expect(arrivals, count)

        def late_arrived(arrivals: Any) -> None:
            """The last result of the step is decoded after the news that a site is lost."""
            counts[arrivals] = counts.get(arrivals, 0) - 1
            if counts[arrivals] == 0 and any(event.step == self._step for event in self.at("slow")):
                time.sleep(SLOW_S)
            arrived(arrivals)

        client.join = watched_join
        Arrivals.expect, Arrivals.arrived = counted_expect, late_arrived
        for owner, name in ((Groups, "gather_all"), (Groups, "share_bytes"), (WorkerClient, "send_plan"),
                            (WorkerClient, "put_state"), (OuterSteps, "drain"), (OuterSteps, "exchange"), (Replica, "install"),
                            (changing_members, "new_world"), (result_follower._Stream, "_answered")):
            self._watch(owner, name, after=owner is WorkerClient)

    def slow_uplink(self, seconds: float) -> None:
        """Delays large values for the coordinator's store: parts of a state. Before each of them, this site can fail."""
        request = KvClient.request

        def slow(client: KvClient, *args: Any, **named: Any) -> Any:
            if sum(len(value) for _, value in named.get("put", ())) > LARGE_NBYTES:
                self._calls["give"] = self._calls.get("give", 0) + 1
                self.due("give")
                time.sleep(seconds)
            return request(client, *args, **named)

        KvClient.request = slow  # type: ignore[method-assign]

    def at(self, action: str) -> list[Event]:
        return [event for event in self.events if event.action == action]

    def begin(self, step: int) -> None:
        self._step = step
        if all(step <= event.step for event in self.events):
            self._calls.clear()

    def due(self, at: str) -> str:
        """Kills this site if its time has come. Returns another action that is due."""
        for event in self.events:
            if event.step <= self._step and event.at == at:
                if event.action == "kill" and self._calls.get(at, event.number) >= event.number:
                    self._die(event)
                elif event.step == self._step and event.action != "kill":
                    return event.action
        return ""

    def joined_by(self, count: int) -> bool:
        """Whether the newest epoch has that many members more than the one of this site."""
        return any(len({m.rank for m in one.newest.members} - {m.rank for m in one.epoch.members}) >= count
                   for one in self._memberships)

    def await_joiners(self, count: int, pause_s: float = 0.01) -> None:
        until = time.monotonic() + WAIT_S
        while not self.joined_by(count) and time.monotonic() < until:
            time.sleep(pause_s)

    def die_with_joiner(self, after_s: float) -> None:
        self.await_joiners(1, 0.001)
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        """Until another site, or this one, has left the job. Heartbeats continue."""
        self.failed.wait(4 * WAIT_S)

    def break_protocol(self, connection: Any, how: str) -> None:
        """Sends a payload that no codec decodes, or a frame that is not allowed. Then lives on until it is evicted."""
        if how == "payload":
            bucket = next(b.id for b in connection.plan.buckets if b.server == 0)
            header = Header(Kind.PUSH, connection.worker.now.generation, connection.worker.step, bucket, codec=99,
                            sender=connection.id, weight=1.0)
            connection.uplink.transport.request(SERVER_BASE, header, b"no payload of this codec")
        else:
            connection.uplink.transport.send(SERVER_BASE, Header(Kind.HELLO, sender=connection.id))
        self.failed.wait(WAIT_S)
        os._exit(BROKEN)

    def _watch(self, owner: Any, name: str, *, after: bool) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            self._calls[name] = self._calls.get(name, 0) + 1
            if not after and self.due(name) == "fail":
                raise RuntimeError(f"{name} fails")
            result = real(*args, **named)
            if after:
                self.due(name)
            return result

        setattr(owner, name, watched)

    def _die(self, event: Event) -> None:
        if event.joiner:
            joiner_waits(self._folder).touch()
            self.await_joiners(1, 0.05)
        if event.at == "start" and event.after_s:
            threading.Timer(event.after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if self._step > event.step:  # the process may have passed that step before the signal
                time.sleep(WAIT_S)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def make_codec(plan: Any) -> str:
    """COARSE, FINE or EXACT: the codec of the plan's weights. Its buffer keeps another one."""
    return next((codec for codec in (COARSE, FINE) if any(codec.partition("(")[0] in b.codec for b in plan.buckets)), EXACT)


def other_plan(connection: Any, step: int) -> Any:
    """A plan with the other codec; of an exact plan, one with other buckets."""
    plan, used = connection.plan, make_codec(connection.plan)
    if used == EXACT:
        return default_plan(connection.worker.job, codec=EXACT, path="service", servers=1, ranks_per_node=1, fuse_nbytes=1,
                            cut_nbytes=256 * step)
    codec = str(wrap(parse(FINE if used == COARSE else COARSE)))
    return structs.replace(plan, buckets=tuple(structs.replace(b, codec=codec, down=codec) if used.partition("(")[0] in b.codec
                                               else b for b in plan.buckets))


def main(site: int, script: Script) -> None:
    faults, model, local_rank = Faults(site, script), Linear(), int(os.environ["LOCAL_RANK"])
    faults.install()
    changing_members.FOLLOW_NBYTES = 0  # as of a large model
    if script.uplink_s:
        faults.slow_uplink(script.uplink_s)
    with torch.no_grad():
        for p in model.parts:
            p += site - local_rank * bool(script.shard)  # unequal, as in a script that sets no seed; rank 0's are 0
    if script.shard:
        shard(model, script.shard)
    optimizer, scheduler = optimizer_of(model.parameters(), script.momentum, adam=script.scaler)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=script.scaler)
    wrapped: Any = model
    if script.collective or script.ddp:
        dist.init_process_group("gloo")
    if script.collective:
        dist.all_reduce(torch.zeros(1))
    if script.ddp:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    second = Path(script.folder) / "second is attached"
    if script.second_first and local_rank == 1:
        second.touch()
    while script.second_first and local_rank == 0 and not second.exists():
        time.sleep(0.05)
    time.sleep(SECOND_S * (script.second_first and local_rank == 0))
    put = list[list[torch.Tensor]]()
    counts, sums, codecs, buckets, errors = list[float](), list[float](), list[str](), list[int](), list[str]()
    momentum = script.outer_momentum
    outer = commlayer.optim.OuterSGD(matched=script.matched, momentum=momentum) if script.matched or momentum else None
    sync = sync_of(outer=outer, **dict(script.attach))
    with commlayer.attach(wrapped, optimizer, compression=None if script.codec == "auto" else script.codec, sync=sync,
                          grad_scaler=scaler if script.scaler else None) as session:
        first, again = session.step, MOST
        if first and not script.ddp:
            session.resume("nowhere")  # as in a script that begins with it
        faults.begin(first)
        faults.due("attached")
        if any(event.at == "joined" for event in faults.events):
            threading.Thread(target=faults.die_with_joiner, args=(faults.events[0].after_s,), daemon=True).start()
        scheduler.last_epoch = first
        connection: Any = None

        def after_step() -> None:
            connection = distributed_job(session)
            counts.append(connection.worker.units.total)
            codecs.append(make_codec(connection.plan))
            buckets.append(len(connection.plan.buckets))
            if script.between == "own switch" and connection.exchanges in (4, 8):
                switch(connection, other_plan(connection, 0), by_itself=True)

        local = "every" in script.attach
        if not local:
            session.inspect.components.add(Calls(end_step=after_step))

        def train(step: int) -> None:
            own = gradients(site, step)
            if script.codec in (COARSE, FINE) and faults.at("kill"):
                own = [torch.zeros_like(g) for g in own]  # no residual is lost with this site
            loss = wrapped(own)
            if script.scaler and step % 7 == 0 and site == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            put.append(own)
            if local:
                counts.append(distributed_job(session).worker.units.total)
            faults.due("step")
            if script.sums:
                sum_sites()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()

        def sum_sites() -> None:
            x = torch.tensor([10.0**site])
            dist.all_reduce(x)
            sums.append(x.item())

        def save(_: int) -> None:
            session.checkpoint(script.folder, model=False)

        def switch_plan(step: int, *, wanted: bool = True) -> None:
            session.switch(other_plan(distributed_job(session), step) if wanted else None)  # type: ignore[arg-type]

        def switch_if_followed(step: int) -> None:
            members = distributed_job(session).members
            if not first and not followed and members.followers - members.admitted:
                followed.append(step)
                switch_plan(step)

        followed = list[int]()
        between: dict[str, Callable[[int], None]] = {
            "switch if followed": switch_if_followed,
            "": lambda _: None, "own switch": lambda _: None, "save": save, "load": save, "drain": lambda _: session.flush(),
            "sum": lambda _: sum_sites(), "switch": switch_plan,
            "switch of rank 0": lambda step: switch_plan(step, wanted=session.rank == 0),
        }

        def attempt(act: Callable[[], object]) -> None:
            try:
                act()
            except CommError as error:
                errors.append(str(error))

        for step in range(first, MOST + script.more if script.workers else STEPS):
            connection = session.inspect.context
            faults.begin(step)
            action = faults.due("start")
            if action == "raise":
                raise RuntimeError("this site has had enough")
            if action == "leave":
                break
            if action == "wait":
                faults.await_joiners(script.joiners)
            model.aborts = action == "abort"
            action = faults.due("backward")
            if action == "hang":
                model.parts[0].register_hook(lambda _: faults.hang())
            elif action:
                model.parts[0].register_hook(lambda _, how=action, at=connection: faults.break_protocol(at, how))
            try:
                train(step)
            except (ArithmeticError, StepAbandoned):
                optimizer.zero_grad()
                continue
            if faults.due("end") == "hang":
                faults.hang()
            if script.workers:
                # A worker that dies in its first step is a member until the others know.
                complete = sum(m >= script.workers for m in session.inspect.members) == script.joiners
                again = min(again, step) if complete else MOST
                if step + 1 == again + script.more + again % 2:
                    break
                time.sleep(PAUSE_S)
            if script.between == "load" and step == 4:
                attempt(lambda: session.resume(script.folder))
                attempt(lambda: train(4))
                break
            if step % 4 == 3:
                between[script.between](step)
        report: dict[str, Any] = {"site": site, "errors": errors}
        if not errors:
            session.flush()
            if len(counts) < len(put):
                after_step()  # under sync="forward", components are called when the next step begins
            connection = session.inspect.context
            if script.workers:
                sum_sites()
            report |= {
                "first": first, "rank": connection.rank, "members": session.inspect.members, "counts": counts, "sums": sums,
                "step": session.step, "exchanges": connection.exchanges, "calls": model.calls.item(),
                "decisions": session.inspect.decisions(), "put": flat(means_of(put, counts)),
                "residuals": flat(residuals_of(connection)) if script.codec in (COARSE, FINE) else [],
                "optimizer": digest(v for p in model.parts for v in optimizer.state[p].values() if v is not None),
                "scaler": scaler.state_dict(), "plan": commlayer.records.digest(connection.plan), "codecs": codecs,
                "buckets": buckets}
        report["weights"] = flat(model.parts)
    with Path("/proc/self/fd/1").open("w") as lock:  # workers of one site share a pipe, which does not keep long lines apart
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(json.dumps(report), flush=True)
    sys.exit(RAISED if errors else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]) + int(os.environ["LOCAL_RANK"]), msgspec.json.decode(sys.argv[2], type=Script))
