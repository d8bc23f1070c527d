"""Features that jobs of several kinds can have: for each a small training that uses it. Run as a script: one worker of a home.

tests/multi/test_features.py runs each of them in each kind of job that matrix.py names.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader

import commlayer
from commlayer.autotune import quality
from commlayer.engine.observers import spacing
from commlayer.records import Plan
from support.attached import data, mlp, plan_of
from support.rank_pool import quick
from support.site_job import digest

STEPS, DIES_AT, MORE, SETTLED = 16, 6, 16, 4
"""Steps of a job that no home joins; the forward pass in which a home dies; steps after a home joins. Averages are compared
with those by hand if members did not change in SETTLED steps before and after: in the step of a death, they may lack it."""
PAUSE_S, MOST = 0.05, 2400
"""Least seconds per step, and the last step, while a home is awaited."""
LENGTH, BATCH = 96, 24
SMALL = {"fuse_nbytes": 2048, "cut_nbytes": 4096}
EXACT, CODED, COARSE = "identity()", "int4(block=64)", "topk(ratio=0.01)"
GATHERED = "encode@cpu all.allgather decode@cpu"


class Part(msgspec.Struct, frozen=True):
    """What one worker is to do."""

    feature: str
    kind: str
    folder: str
    world: int
    dies: bool = False


class Training:
    """One worker's."""

    def __init__(self, part: Part) -> None:
        self.part, self.feature, self.folder = part, FEATURES[part.feature], Path(part.folder)
        self.model: nn.Module = mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session: Any = None
        self.several = "gpus" in (part.kind.split("_")[0], part.feature)
        unplanned = self.feature.package or part.feature == "auto"  # commlayer then runs collectives inside a machine only
        self.per_node = part.world if part.kind == "collectives" and unplanned else 2 if self.several else 1
        self.config: dict[str, Any] = dict(SMALL)
        if part.kind in ("collectives", "servers"):
            self.config = quick(ranks_per_node=self.per_node, servers="each")
        self._awaits, self.passes, self.first = part.kind.endswith("leave") and self.feature.joins, 0, 0
        self._members: list[list[int]] = []
        self._averages: list[list[tuple[Any, Any]]] = []
        """Of each step: the averages, and those by hand."""
        self.resumed: int | None = None
        self.shares: dict[int, int] = {}
        self.compared = self.buckets = self.fewer = 0
        """`fewer`: how many steps fewer than worker 0 this one makes."""
        self.model.register_forward_pre_hook(self.before_pass)

    def before_pass(self, *_: Any) -> None:
        self.passes += 1
        if self.part.dies and self.passes == DIES_AT:
            first = next(self.model.parameters())  # the last one of the backward pass: others are on their way
            first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    def planned(self, **changes: Any) -> Plan:
        usual = {"codec": CODED}
        if self.part.kind == "collectives":
            usual |= {"path": GATHERED} if self.per_node == 1 else {"codec": EXACT, "path": "allreduce"}
        servers = self.part.world // self.per_node if self.part.kind == "servers" else 1
        return plan_of(self.model, **usual | {"servers": servers, "ranks_per_node": self.per_node} | changes)

    def attach(self) -> Any:
        return self.begin(commlayer.attach(self.model, self.optimizer, **self.options))

    def begin(self, session: Any) -> Any:
        """Trains with that session. A home that has joined tells the others its first step."""
        self.session, self.first = session, session.step
        if self.session.joined:
            new = self.folder / f"arrives-{os.getpid()}"
            new.write_text(str(self.session.step))
            new.rename(self._arrival)
        return self.session

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of attach()."""
        extra = self.feature.attach(self)
        extra["config"] = self.config | extra.get("config", {})
        codec = extra.pop("compression", CODED)
        if "plan" in extra:
            return extra
        if self.part.kind != "collectives":
            return extra | {"compression": codec}
        return extra | ({"plan": self.planned(codec=codec)} if self.per_node == 1 else {})

    @property
    def _arrival(self) -> Path:
        """A file with the first step of the home that joined."""
        return self.folder / "arrived"

    def is_over(self) -> bool:
        step = self.session.step + self.fewer
        if not self._awaits:
            return bool(step - (self.resumed or 0) >= STEPS)
        if self._arrival.exists():
            return bool(step >= int(self._arrival.read_text()) + MORE + self.feature.more)
        assert step < MOST, "no home has joined"
        time.sleep(PAUSE_S)
        return False

    @property
    def id(self) -> int:
        """The rank with which this worker joined the job."""
        return int(self.session.inspect.members[self.session.rank])

    def steps(self) -> Iterator[int]:
        while not self.is_over():
            yield self.session.step

    def step(self, step: int, weights: Callable[[int], float] | None = None) -> None:
        """`weights`: by worker, if the average has to equal the one by hand."""
        x, y = data(self.id, step)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        if weights is not None:
            self._compare(step, weights)
        self.session.log_loss(loss)
        self.optimizer.step()

    def _compare(self, step: int, weights: Callable[[int], float]) -> None:
        members = list(self.session.inspect.members)
        self._members.append(members)
        model, total = mlp(), sum(map(weights, members))
        model.load_state_dict(self.model.state_dict())
        for member in members:
            x, y = data(member, step)
            (nn.functional.mse_loss(model(x), y) * (weights(member) / total)).backward()
        self._averages.append([(p.grad.clone(), q.grad)
                               for p, q in zip(self.model.parameters(), model.parameters(), strict=True)])
        if self._members[-2 * SETTLED :] != [members] * 2 * SETTLED:
            return
        self.compared += 1
        for average, by_hand in self._averages[-SETTLED]:
            torch.testing.assert_close(average, by_hand, rtol=1e-4, atol=1e-5)

    def finish(self) -> dict[str, Any]:
        """Makes weights equal on all workers, and returns this worker's report."""
        session = self.session
        if not self.feature.package and session.flush():
            self.optimizer.step()
        if self.resumed is not None:
            session.checkpoint(self.folder / "save")
        plan = session.inspect.plan
        report = {"used": self.feature.used(self), "step": session.step, "world": session.world_size, "resumed": self.resumed,
                  "servers": plan.servers, "per_node": plan.ranks_per_node, "sha": digest(self.model.parameters())}
        session.close()
        return report


def plain(job: Training) -> None:
    job.attach()
    for step in job.steps():
        job.step(step)


def averaged_by_hand(job: Training) -> None:
    job.attach()
    for step in job.steps():
        job.step(step, lambda _: 1.0)


def weighted(job: Training) -> None:
    job.attach()
    for step in job.steps():
        def weight(member: int, step: int = step) -> float:
            return 1.0 + (member + step) % 3

        job.session.weight(weight(job.id))
        job.step(step, weight)


def uneven(job: Training) -> None:
    session = job.attach()
    job.fewer = 2 * (job.id % 3)
    with session.join():
        for step in job.steps():
            job.step(step)


def switching(job: Training) -> None:
    session = job.attach()
    while session.step < DIES_AT // 2:
        job.step(session.step)
    if not session.joined:
        job.buckets = len(plan_of_job(job).buckets)
        session.switch(job.planned(nbytes=(512, 1024)))
    for step in job.steps():
        job.step(step)


def resuming(job: Training) -> None:
    session = job.attach()
    job.resumed = session.step if session.resume(job.folder / "save") else 0
    for step in job.steps():
        job.step(step)


def moving_shares(job: Training) -> None:
    from commlayer.balance import Sampler

    spacing.MOST_STEPS = 1  # a row after each step, whatever it costs
    session = job.attach()
    x, y = data(0, 0, n=LENGTH)
    sampler = Sampler(LENGTH, BATCH)
    loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_sampler=sampler)
    own = job.id
    balancer = commlayer.LoadBalancer(session, sampler, measure=lambda _, samples: 1e-3 * (1 + samples * (1 + own)))
    epoch = 0
    while not job.is_over():
        sampler.set_epoch(epoch)
        for a, b in balancer.follow(loader):
            (nn.functional.mse_loss(job.model(a), b) * sampler.fraction).backward()
            if sampler.last:
                job.optimizer.step()
                job.optimizer.zero_grad()
                if job.is_over():
                    break
        epoch += 1
    job.shares = dict(balancer.shares)


def guarded(job: Training) -> None:
    quality.TIME_PART = 1e9  # type: ignore[attr-defined]  # compares as often as possible
    plain(job)


class Loss(nn.Module):
    """A model as the Trainer calls it."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def rows(job: Training) -> list[Any]:
    return list(zip(*data(0, 0, n=4 * job.part.world * STEPS), strict=True))


def with_trainer(job: Training) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(job.folder), max_steps=MOST, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False, logging_steps=4, remove_unused_columns=False, save_strategy="no")
    trainer = Trainer(Loss(job.model), arguments, train_dataset=[{"x": x, "labels": y} for x, y in rows(job)])
    run(trainer, job)


def run(trainer: Any, job: Training) -> None:
    """Trains until the job is over."""
    from transformers import PrinterCallback, TrainerCallback

    from commlayer.integrations.transformers import CommlayerCallback

    class Ends(TrainerCallback):
        def on_train_begin(self, _arguments: Any, state: Any, *_: Any, **__: Any) -> None:
            job.begin(callback.session)
            assert state.global_step == job.session.step

        def on_step_end(self, _arguments: Any, _state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = job.is_over()

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(callback := CommlayerCallback(trainer, **job.options))
    trainer.add_callback(Ends())
    trainer.train()


def with_accelerate(job: Training) -> None:
    from accelerate import Accelerator

    from commlayer.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, DataLoader(rows(job), 4))
    job.session = attach(accelerator, model, optimizer, **job.options)
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    job.session.flush()


def with_lightning(job: Training) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from commlayer.integrations.lightning import CommlayerStrategy

    class Strategy(CommlayerStrategy):
        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            job.session = self.session

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = job.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    ranks = 2 if job.several else 1
    trainer = Trainer(strategy=Strategy(**job.options), accelerator="cpu", devices=ranks, num_nodes=job.part.world // ranks,
                      max_steps=STEPS, logger=False, enable_progress_bar=False, enable_model_summary=False,
                      enable_checkpointing=False)
    trainer.fit(Module(), DataLoader(rows(job), 4))


def with_trl(job: Training) -> None:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    datasets, trl = map(importlib.import_module, ("datasets", "trl"))  # which have no types
    words = Tokenizer(models.WordLevel({str(n): n for n in range(32)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    torch.manual_seed(0)
    job.model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                             num_attention_heads=2, max_position_embeddings=8))
    job.model.register_forward_pre_hook(job.before_pass)
    tokens = torch.randint(2, 32, (4 * job.part.world * STEPS, 8), generator=torch.Generator().manual_seed(1)).tolist()
    arguments = trl.SFTConfig(str(job.folder), max_steps=MOST, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
                              use_cpu=True, save_strategy="no", dataloader_pin_memory=False)
    trainer = trl.SFTTrainer(job.model, args=arguments, processing_class=tokenizer,
                             train_dataset=datasets.Dataset.from_dict({"input_ids": tokens}))
    run(trainer, job)


class Feature(NamedTuple):
    """`attach`: further arguments of attach(). `used`: whether the job had the feature. `joins`: a home joins where homes come
    and go. `package`: what it needs. `more`: further steps after a home has joined."""

    used: Callable[[Training], bool]
    train: Callable[[Training], None] = plain
    attach: Callable[[Training], dict[str, Any]] = lambda _: {}
    joins: bool = True
    package: str = ""
    more: int = 0


def plan_of_job(job: Training) -> Plan:
    plan = job.session.inspect.plan
    assert plan is not None
    return plan


def ran_out(job: Training) -> bool:
    """Whether the others have made as many steps more than this worker as they should have."""
    return bool(job.passes + job.fewer == job.session.step - job.first)


def exchanged(job: Training) -> bool:
    return job.session.metrics()["exchanges"] >= STEPS


FEATURES: dict[str, Feature] = {
    "step": Feature(lambda job: job.compared > 0, averaged_by_hand,
                    lambda _: {"sync": "step", "compression": EXACT}),
    "forward": Feature(lambda job: plan_of_job(job).overlap == "forward", plain,
                       lambda _: {"sync": "forward"}),
    "local": Feature(lambda job: (plan_of_job(job).local_steps, plan_of_job(job).fragments) == (4, 1), plain,
                     lambda _: {"sync": commlayer.LocalSteps(4, fragments=1)}),
    "fragments": Feature(lambda job: (plan_of_job(job).local_steps, plan_of_job(job).fragments) == (4, 2),
                         plain, lambda _: {"sync": commlayer.LocalSteps(4, fragments=2)}),
    "late": Feature(lambda job: any(b.stale for b in plan_of_job(job).buckets), plain,
                    lambda job: {"plan": job.planned(bucket={"stale": True})}),
    "auto": Feature(lambda job: bool(job.session.inspect.context.terms.auto), plain,
                    lambda _: {"sync": "auto", "compression": None}),
    "gpus": Feature(lambda job: plan_of_job(job).ranks_per_node > 1, plain,
                    lambda job: {"plan": job.planned()}),
    "join": Feature(ran_out, uneven, lambda _: {"sync": "step"}),
    "join_local": Feature(ran_out, uneven, lambda _: {"sync": commlayer.LocalSteps(4)}),
    "shares": Feature(lambda job: len(set(job.shares.values())) > 1, moving_shares, more=80),
    "weight": Feature(lambda job: job.compared > 0, weighted, lambda _: {"compression": EXACT}),
    "resume": Feature(exchanged, resuming, joins=False),
    "guard": Feature(lambda job: job.session.metrics()["guard_s"] > 0, guarded,
                     lambda _: {"compression": COARSE, "config": {"guard": "act", "max_loss": 0.005}}),
    "switch": Feature(lambda job: len(plan_of_job(job).buckets) != job.buckets, switching),
    "trainer": Feature(exchanged, with_trainer, package="transformers"),
    "accelerate": Feature(exchanged, with_accelerate, joins=False, package="accelerate"),
    "lightning": Feature(exchanged, with_lightning, joins=False, package="lightning"),
    "trl": Feature(exchanged, with_trl, package="trl"),
}


def train(_rank: int, part: Part) -> dict[str, Any]:
    """Trains, and returns this worker's report; what was refused, if anything was."""
    job = Training(part)
    try:
        job.feature.train(job)
        return job.finish()
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    job = Training(msgspec.json.decode(sys.argv[1], type=Part))
    job.feature.train(job)
    report = json.dumps(job.finish())
    with Path("/proc/self/fd/1").open("w") as lock:  # workers of one home share a pipe, which does not keep long lines apart
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(report, flush=True)
