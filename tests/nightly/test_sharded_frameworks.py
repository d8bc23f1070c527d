"""The frameworks' own FSDP2 settings: each site of two ranks shards the model, and commlayer averages between two sites."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_pool
from support.attached import assert_refused, outcome
from support.rank_pool import Pool, Servers
from torch import nn

import commlayer

SITES, RANKS, STEPS, IMPORT_S = 2, 2, 4, 90.0
WORLD = SITES * RANKS


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    pool = Pool(WORLD)
    yield pool
    pool.close()


def run(ranks: Pool, function: Any, *arguments: Any) -> list[Any]:
    package = function.__name__.removeprefix("with_").partition("_")[0]
    if importlib.util.find_spec({"trainer": "transformers"}.get(package, package)) is None:
        pytest.skip(f"needs {package}, which `make recipes` installs")
    with Servers(WORLD, join_deadline_s=IMPORT_S) as servers:
        return ranks.call(function, servers.address, *arguments, timeout_s=IMPORT_S)


class Net(nn.Module):
    """As the Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(2))
    return [{"x": row, "labels": row[:3]} for row in x]


def whole(model: nn.Module) -> list[torch.Tensor]:
    """All weights, each of which is sharded over the ranks of one site."""
    assert all(p.device_mesh.size() == RANKS for p in model.parameters()), "FSDP2 has sharded it"  # type: ignore[attr-defined]
    return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def quick(address: str) -> Any:
    return rank_pool.quick(join=address)


def fsdp_on_cpus(patch: pytest.MonkeyPatch) -> None:
    """Lets Accelerate use FSDP on CPUs, as it does on GPUs."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    begin = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    patch.setattr(AcceleratorState, "__init__", init)


def with_torch(rank: int, address: str) -> list[torch.Tensor]:
    """As a script does that shards by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (SITES, RANKS), mesh_dim_names=("site", "shard"))
    model: Any = fully_shard(Net(), mesh=mesh["shard"])
    return steps(rank, model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.Tensor.backward,
                 lambda *of: commlayer.attach(*of, compression="int8()", config=quick(address)))


def with_accelerate(rank: int, address: str) -> list[torch.Tensor]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from commlayer.integrations.accelerate import SiteParallelism, attach

    with pytest.MonkeyPatch.context() as patch:
        fsdp_on_cpus(patch)
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
            parallelism_config=SiteParallelism(dp_replicate_size=SITES, dp_shard_size=RANKS))
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        return steps(rank, model, optimizer, accelerator.backward,
                     lambda *of: attach(accelerator, *of, compression="int8()", config=quick(address)))


def steps(rank: int, model: Any, optimizer: Any, backward: Any, attach: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    with attach(model, optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(5, 12, generator=generator)
            backward(model(x, x[:, :3])["loss"])
            optimizer.step()
        return whole(model)


def test_accelerate_shards_each_site(ranks: Pool) -> None:
    results = [*run(ranks, with_torch), *run(ranks, with_accelerate)]
    for result in results:
        assert all(map(torch.equal, result, results[0]))


def trainer_of(address: str, out: str, *, saves: bool = False, **options: Any) -> tuple[Any, Any]:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from commlayer.integrations.transformers import CommlayerCallback

    arguments = TrainingArguments(
        out, max_steps=2 * STEPS, save_strategy="steps" if saves else "no", save_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False, remove_unused_columns=False, **options)
    trainer = Trainer(Net(), arguments, train_dataset=samples(4 * WORLD * 2 * STEPS))
    trainer.remove_callback(PrinterCallback)
    found = CommlayerCallback(trainer, compression="int8()", config=quick(address))
    trainer.add_callback(found)
    return trainer, found


def with_trainer(rank: int, address: str, out: str, resume: bool | None) -> tuple[list[torch.Tensor], float]:
    from commlayer.integrations.accelerate import SiteParallelism

    with pytest.MonkeyPatch.context() as patch:
        fsdp_on_cpus(patch)
        # Torch leaves a gathered state on CPUs pending, which cannot be saved, so that states are saved as shards.
        trainer, callback = trainer_of(address, out, saves=resume is not None, fsdp=True,
                                       fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},
                                       parallelism_config=SiteParallelism(dp_replicate_size=SITES, dp_shard_size=RANKS))
        trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{STEPS}" if resume else None)
        return whole(trainer.model), callback.session.metrics()["exchanges"]


def with_trainer_refused(rank: int, address: str, out: str) -> list[str]:
    from accelerate import ParallelismConfig

    lines = []
    for config in (None, ParallelismConfig(dp_replicate_size=SITES, dp_shard_size=RANKS)):
        with pytest.MonkeyPatch.context() as patch:
            fsdp_on_cpus(patch)
            trainer, _ = trainer_of(address, out, fsdp=True, parallelism_config=config)
            lines.append(outcome(trainer.train))
    return lines


def test_meshes_across_sites_are_refused_with_the_line_to_write(ranks: Pool, tmp_path: Path) -> None:
    for lines in run(ranks, with_trainer_refused, str(tmp_path)):
        for line in lines:
            assert_refused(line, "E-SHARDED")
            assert "SiteParallelism(" in line


def with_lightning(rank: int, address: str, out: str, resume: bool | None) -> tuple[list[torch.Tensor], float]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    from commlayer.integrations.lightning import CommlayerModelParallelStrategy

    seen: list[Any] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_train_end(self) -> None:
            seen.extend([whole(self.net), self.trainer.strategy.session.metrics()["exchanges"]])  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": rank % RANKS, "GROUP_RANK": rank // RANKS,
                            "LOCAL_WORLD_SIZE": RANKS}.items():
            patch.setenv(name, str(value))
        trainer = Trainer(
            strategy=CommlayerModelParallelStrategy("int8()", config=quick(address)), accelerator="cpu", devices=RANKS,
            num_nodes=SITES, max_epochs=2, accumulate_grad_batches=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=resume is not None,
            callbacks=[] if resume is None else [ModelCheckpoint(out, filename="{step}", save_top_k=-1)])
        trainer.fit(Module(), DataLoader(samples(4 * WORLD * STEPS), 2),  # type: ignore[arg-type]
                    ckpt_path=f"{out}/step={STEPS}.ckpt" if resume else None)
    return seen[0], seen[1]


TRAININGS = [with_trainer, with_lightning]


@pytest.mark.parametrize("training", TRAININGS)
def test_trainers_shard_each_site(training: Any, ranks: Pool, tmp_path: Path) -> None:
    results = run(ranks, training, str(tmp_path), None)
    assert [exchanges for _, exchanges in results] == [2 * STEPS] * WORLD, "micro-batches are not exchanged"
    for weights, _ in results:
        assert all(map(torch.equal, weights, results[0][0]))


@pytest.mark.parametrize("training", TRAININGS)
def test_resumed_training_equals_the_uninterrupted_one(training: Any, ranks: Pool, tmp_path: Path) -> None:
    results = [weights for resume in (False, True) for weights, _ in run(ranks, training, str(tmp_path), resume)]
    for weights in results:
        assert all(map(torch.equal, weights, results[0]))
