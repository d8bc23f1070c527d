"""commlayer.integrations with the real frameworks: equal to their own DDP bit for bit; a resumed run equals an uninterrupted
one. Ranks are kept over all tests, because a framework takes seconds to import.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_pool
from support.rank_pool import Pool, Servers, clean_environment
from torch import nn
from torch.utils.data import DataLoader

WORLD, IMPORT_S, MICRO = 2, 90.0, 2
EXAMPLES = Path(__file__).parents[2] / "examples"
MISSING = "needs {}, which `make recipes` installs"
RECIPES = [
    ("char_gpt", "torch", ["--compressions", "topk(ratio=0.05)", "--steps", "6", "--save-at", "3"]),
    ("with_accelerate", "accelerate", ["--batches", "16", "--save-at", "8"]),
    ("with_trainer", "transformers", ["--steps", "8", "--save-at", "4"]),
    ("with_lightning", "lightning", ["--epochs", "4", "--save-at", "2", "--devices", "1", "--nodes", "2"]),
]
Options = dict[str, Any]
Weights = dict[str, torch.Tensor]


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(MISSING.format(package))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Separate processes: frameworks change the behaviour of a process in many places."""
    pool = Pool(WORLD)
    yield pool
    pool.close()


def called(rank: int, module: str, function: str, arguments: list[Any], address: str) -> Any:
    sys.path[:0] = [str(EXAMPLES)] if str(EXAMPLES) not in sys.path else []
    # By TORCHELASTIC_RUN_ID Lightning recognizes torchrun, and starts no ranks.
    settings = {f"COMMLAYER_{k.upper()}": str(v) for k, v in rank_pool.quick(join=address).items()}
    settings |= {"TORCHELASTIC_RUN_ID": "1", "HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        return getattr(importlib.import_module(module), function)(*arguments)


def trained(rank: int, *call: Any) -> Weights:
    """The weights that an example's main() trains."""
    return {name: tensor.detach().clone() for name, tensor in called(rank, *call).state_dict().items()}


def run(ranks: Pool, function: Any, *call: Any) -> list[Any]:
    # The first call imports the framework before it joins.
    with Servers(WORLD, join_deadline_s=IMPORT_S) as servers:
        return ranks.call(function, *call, servers.address, timeout_s=IMPORT_S)


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("recipe", "package", "arguments"), RECIPES, ids=[row[0] for row in RECIPES])
def test_resumed_run_equals_the_uninterrupted_run(
    recipe: str, package: str, arguments: list[str], ranks: Pool, tmp_path: Path,
) -> None:
    need(package)
    arguments = [*arguments, "--out", str(tmp_path)]
    result = run(ranks, trained, recipe, "main", [arguments])
    assert equal(*result), "ranks differ"
    assert sorted(tmp_path.rglob("manifest.json")), "residuals were saved"
    for rank, resumed in enumerate(run(ranks, trained, recipe, "main", [[*arguments, "--resume"]])):
        assert equal(resumed, result[rank])


def alone(tmp_path: Path, *line: str) -> str:
    """What a command with that script of examples/ prints."""
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "HOME": os.environ.get("HOME", ""), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_lightning_starts_the_ranks(tmp_path: Path) -> None:
    need("lightning")
    out = alone(tmp_path, str(EXAMPLES / "with_lightning.py"), "--epochs", "2", "--save-at", "1", "--out", ".")
    lines = [line for line in out.splitlines() if line.startswith("step 10: loss ")]
    assert len(lines) == 1
    assert int(lines[0].split(", ")[1].split()[0]) > 0, "the ranks have met"
    assert [p.name for p in sorted(tmp_path.glob("*.commlayer"))] == ["epoch=0.ckpt.commlayer", "epoch=1.ckpt.commlayer"]


def test_lora_sends_adapters_only(tmp_path: Path) -> None:
    need("peft", "trl")
    short = ("--base-steps", "5", "--steps", "6")
    out = alone(tmp_path, *TORCHRUN, str(EXAMPLES / "lora_homes.py"), *short, "--compression", "int4")
    (line,) = re.findall(r"^loss on code .*$", out, re.MULTILINE)
    frozen, adapters, nbytes = map(float, re.findall(r"; (\d+) weights frozen, (\d+) in adapters; ([\d.]+) bytes", line)[0])
    assert frozen > 10 * adapters
    assert 0.4 < nbytes < 0.7, "4 bits for each adapter weight, and nothing for others"


def test_image_classifier_learns_with_few_bytes_and_is_plotted(tmp_path: Path) -> None:
    need("matplotlib")
    out = alone(tmp_path, *TORCHRUN, str(EXAMPLES / "images.py"), "--steps", "64", "--plot", "images.png")
    accuracies, sent = zip(*re.findall(r"^every .*: accuracy ([\d.]+), ([\d.]+) MB sent$", out, re.MULTILINE), strict=True)
    assert all(float(accuracy) > 0.8 for accuracy in accuracies)
    dense, coded, local = map(float, sent)
    assert dense > 7 * coded > 7 * 7 * local
    assert (tmp_path / "images.png").stat().st_size > 5000


def test_slow_gpu_gets_a_smaller_share(tmp_path: Path) -> None:
    out = alone(tmp_path, *TORCHRUN, str(EXAMPLES / "two_cards.py"), "--epochs", "2", "--slow-ms", "2")
    first, second = map(int, re.findall(r"^epoch 2: shares (\d+) and (\d+) of 96", out, re.MULTILINE)[0])
    assert first + second == 96
    assert first > 1.5 * second


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))


def samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(1))
    return list(zip(x, x[:, :4].argmax(1), strict=True))


class ModelWithLoss(nn.Module):
    """As the Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model_of()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def with_trainer(options: Options | None, out: str, steps: int, save_at: int, resume: bool) -> tuple[Weights, Options]:
    from transformers import Trainer, TrainingArguments

    from commlayer.integrations.transformers import CommlayerCallback

    arguments = TrainingArguments(
        out, max_steps=steps, save_steps=save_at, per_device_train_batch_size=4, gradient_accumulation_steps=MICRO,
        learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, logging_steps=1,
        remove_unused_columns=False)
    data = [{"x": x, "labels": y} for x, y in samples(4 * WORLD * MICRO * 16)]
    trainer = Trainer(ModelWithLoss(), arguments, train_dataset=data)
    callback = CommlayerCallback(trainer, **options) if options is not None else None
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{save_at}" if resume else None)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer.model.state_dict(), {"losses": losses} | ({} if callback is None else callback.session.metrics())


def with_accelerate(options: Options | None, out: str, steps: int, save_at: int, resume: bool) -> tuple[Weights, Options]:
    from accelerate import Accelerator

    from commlayer.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(4 * WORLD * MICRO * 16), 4))
    session = attach(accelerator, model, optimizer, **options) if options is not None else None
    first, losses = 0, []
    if resume:
        accelerator.load_state(out)
        first, loader = save_at, accelerator.skip_first_batches(loader, save_at * MICRO)
    for number, (x, y) in enumerate(loader, 1 + first * MICRO):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if number == save_at * MICRO and not resume:
            accelerator.save_state(out)
        if number == steps * MICRO:
            break
    metrics = {}
    if session is not None:
        session.flush()
        metrics = session.metrics()
        session.close()
    return accelerator.unwrap_model(model).state_dict(), {"losses": losses} | metrics


def with_lightning(options: Options | None, out: str, steps: int, save_at: int, resume: bool) -> tuple[Weights, Options]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from commlayer.integrations.lightning import CommlayerStrategy

    seen: Options = {"losses": []}

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model_of()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            seen["losses"].append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_train_end(self) -> None:
            if options is not None:
                seen.update(self.trainer.strategy.session.metrics())

    strategy = DDPStrategy() if options is None else CommlayerStrategy(**options)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, num_nodes=WORLD, max_epochs=-(-steps // save_at),
        accumulate_grad_batches=MICRO, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(out, filename="{step}", save_top_k=-1)])
    model = Module()
    # Whole epochs, each with a save at its end: Lightning resumes no loader in the middle of one.
    trainer.fit(model, DataLoader(samples(4 * WORLD * MICRO * save_at), 4),
                ckpt_path=f"{out}/step={save_at}.ckpt" if resume else None)
    return model.state_dict(), seen


FRAMEWORKS = [("with_trainer", "transformers"), ("with_accelerate", "accelerate"), ("with_lightning", "lightning")]
STEPS, SAVE_AT = 8, 6


def played(rank: int, framework: str, arguments: list[Any], address: str) -> tuple[Weights, Options]:
    weights, seen = called(rank, __name__, framework, arguments, address)
    return {name: tensor.detach().clone() for name, tensor in weights.items()}, seen


@pytest.mark.parametrize(("framework", "package"), FRAMEWORKS)
def test_equals_ddp(framework: str, package: str, ranks: Pool, tmp_path: Path) -> None:
    need(package)
    own, other = (run(ranks, played, framework, [options, str(tmp_path / str(number)), STEPS, STEPS, False])
                  for number, options in enumerate((None, {"compression": "identity()"})))
    for rank in range(WORLD):
        assert equal(own[rank][0], other[rank][0])
        assert own[rank][1]["losses"] == other[rank][1]["losses"]
        assert other[rank][1]["exchanges"] == STEPS, "micro-batches are not exchanged"


@pytest.mark.parametrize(("framework", "package"), FRAMEWORKS)
def test_local_steps_resume(framework: str, package: str, ranks: Pool, tmp_path: Path) -> None:
    """A checkpoint inside an outer step: weights are made equal first, and each rank keeps its own optimizer state."""
    need(package)
    import commlayer

    arguments = [{"compression": "int4", "sync": commlayer.LocalSteps(4)}, str(tmp_path), STEPS + 2, SAVE_AT]
    result = run(ranks, played, framework, [*arguments, False])
    assert equal(result[0][0], result[1][0]), "the end makes weights equal"
    resumed = run(ranks, played, framework, [*arguments, True])
    for rank in range(WORLD):
        assert equal(resumed[rank][0], result[rank][0])


def failing(_: int, out: str) -> tuple[str, bool, bool]:
    """The error of a training, and what the Trainer's module and the model have kept of it."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers import trainer as trainer_module
    from transformers.trainer_pt_utils import nested_gather

    from commlayer.integrations import transformers

    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert "no_sync" in vars(trainer.model)
            trainer_module.nested_gather = transformers._nested_gather  # as in a job whose workers may leave
            raise ArithmeticError("the script's own")

    arguments = TrainingArguments(out, max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False)
    trainer = Trainer(ModelWithLoss(), arguments, train_dataset=[{"x": x, "labels": y} for x, y in samples(64)])
    callback = transformers.CommlayerCallback(trainer)
    trainer.add_callback(callback)
    trainer.add_callback(Fails())
    try:
        trainer.train()
    except ArithmeticError as error:
        callback.session.close()
        return str(error), trainer_module.nested_gather is nested_gather, "no_sync" in vars(trainer.model)
    return "", False, False


def test_trainer_that_fails_leaves_nothing_replaced(ranks: Pool, tmp_path: Path) -> None:
    need("transformers")
    assert run(ranks, called, __name__, "failing", [0, str(tmp_path)]) == [("the script's own", True, False)] * WORLD


def sharded(rank: int, address: str, framework: str) -> list[torch.Tensor]:
    """Two sites of two ranks, each of which shards the model itself: under Accelerate, or as plain torch does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import commlayer

    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))["shard"]
    for layer in (*model, model):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    how: Options = {"compression": "int8()", "config": rank_pool.quick(join=address)}
    generator = torch.Generator().manual_seed(rank)
    if framework:
        from accelerate import Accelerator

        from commlayer.integrations.accelerate import attach

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare_optimizer(optimizer)
        session, backward = attach(accelerator, model, optimizer, **how), accelerator.backward
    else:
        session, backward = commlayer.attach(model, optimizer, **how), torch.Tensor.backward
    with session:
        for _ in range(4):
            optimizer.zero_grad()
            backward(model(torch.randn(5, 12, generator=generator)).square().mean())
            optimizer.step()
        return [p.full_tensor() for p in model.parameters()]


def test_accelerate_trains_a_sharded_model_as_torch_does() -> None:
    need("accelerate")
    ranks = Pool(4)
    try:
        results = []
        for framework in ("", "accelerate"):
            with Servers(4, join_deadline_s=IMPORT_S) as servers:
                results += ranks.call(sharded, servers.address, framework, timeout_s=IMPORT_S)
    finally:
        ranks.close()
    assert len({tuple(torch.cat([p.flatten() for p in each]).tolist()) for each in results}) == 1
