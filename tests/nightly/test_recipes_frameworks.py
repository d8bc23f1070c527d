"""The examples with frameworks' loops: a resumed run equals one without a stop, bit for bit, thanks to saved residuals.

Ranks are kept over all of them, since a framework takes seconds to import. Lightning's own launcher starts its script itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import rank_pool
from support.rank_pool import Pool, Servers, clean_environment

WORLD, IMPORT_S = 2, 90.0
EXAMPLES = Path(__file__).parents[2] / "examples"
MISSING = "needs {}, which `make recipes` installs"
RECIPES = [
    ("with_accumulation", "torch", ["--steps", "8", "--save-at", "4"]),
    ("with_accelerate", "accelerate", ["--batches", "16", "--save-at", "8"]),
    ("with_trainer", "transformers", ["--steps", "8", "--save-at", "4"]),
    ("with_lightning", "lightning", ["--epochs", "4", "--save-at", "2", "--devices", "1", "--nodes", "2"]),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Processes of their own: frameworks change what a process does in many places."""
    pool = Pool(WORLD)
    yield pool
    pool.close()


def train(rank: int, recipe: str, arguments: list[str], address: str) -> dict[str, torch.Tensor]:
    """The weights that an example trains."""
    sys.path[:0] = [str(EXAMPLES)] if str(EXAMPLES) not in sys.path else []
    # By TORCHELASTIC_RUN_ID Lightning knows torchrun, and starts no ranks of its own.
    settings = {f"COMMLAYER_{k.upper()}": str(v) for k, v in rank_pool.quick(join=address).items()}
    settings |= {"TORCHELASTIC_RUN_ID": "1", "HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        model = importlib.import_module(recipe).main(arguments)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def run(ranks: Pool, recipe: str, arguments: list[str]) -> list[dict[str, torch.Tensor]]:
    # The first call imports the framework before it joins.
    with Servers(WORLD, join_deadline_s=IMPORT_S) as servers:
        return ranks.call(train, recipe, arguments, servers.address, timeout_s=IMPORT_S)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("recipe", "package", "arguments"), RECIPES, ids=[row[0] for row in RECIPES])
def test_a_resumed_run_equals_the_one_that_went_on(
    recipe: str, package: str, arguments: list[str], ranks: Pool, tmp_path: Path,
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(MISSING.format(package))
    arguments = [*arguments, "--out", str(tmp_path)]
    result = run(ranks, recipe, arguments)
    assert equal(*result), "ranks differ"
    assert sorted(tmp_path.rglob("manifest.json")), "residuals were saved"
    for rank, resumed in enumerate(run(ranks, recipe, [*arguments, "--resume"])):
        assert equal(resumed, result[rank])


def test_lightning_starts_the_ranks_itself(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip(MISSING.format("lightning"))
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "HOME": os.environ.get("HOME", "")}
    script = [str(EXAMPLES / "with_lightning.py"), "--epochs", "2", "--save-at", "1", "--out", "."]
    done = subprocess.run([sys.executable, *script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step 10: loss ")]
    assert len(lines) == 1
    assert int(lines[0].split(", ")[1].split()[0]) > 0, "the ranks have met"
    assert [p.name for p in sorted(tmp_path.glob("*.residuals"))] == ["epoch=0.ckpt.residuals", "epoch=1.ckpt.residuals"]
