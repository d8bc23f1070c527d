"""Homes that train differently: each of them names what differs. Run as a script: that training."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.sites import Homes, ended

HOMES, STEPS = 2, 4


def main(how: str) -> None:
    import torch
    from support.attached import data, mlp
    from torch import nn

    import commlayer

    rank = int(os.environ["RANK"])
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 if how == "rate" and rank == 1 else 0.01)
    with commlayer.attach(model, optimizer, plan="int4()") as session:
        for step in range(-STEPS if how == "resumed" else 0, STEPS):
            if how == "resumed" and step < 0:  # what each home would load of its own
                for p in model.parameters():
                    optimizer.state[p] = {"step": torch.tensor(9.0), "exp_avg": torch.full_like(p, 0.01 * rank),
                                          "exp_avg_sq": torch.full_like(p, 0.5)}
                continue
            x, y = data(rank, step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            (loss * float("nan") if how == "nan" and rank == 1 and step == 2 else loss).backward()
            optimizer.step()
        kept = [*model.parameters(), *(t for p in model.parameters() for t in optimizer.state[p].values())]
        sha = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in kept)).hexdigest()
        print(json.dumps({"rank": rank, "sha": sha, "decisions": session.inspect.decisions()}), flush=True)


@pytest.fixture
def homes() -> Iterator[Homes]:
    made = Homes()
    yield made
    made.close()


def run(homes: Homes, how: str) -> list[tuple[int, list[dict[str, Any]], str]]:
    homes.serve(HOMES)
    return [ended(p) for p in [homes.run("launch", "--join", homes.address, __file__, how) for _ in range(HOMES)]]


def test_another_learning_rate_at_one_home_is_a_line_at_all(homes: Homes) -> None:
    for code, _, errors in run(homes, "rate"):
        assert code != 0
        assert re.search(r"\blr .*0\.01 on rank 0 \(.*0\.02 on rank 1 \(.*\[E-RANKS-DIFFER\]$", errors, re.MULTILINE)


@pytest.mark.parametrize(("how", "named"), [
    ("resumed", "the optimizer's state of 0.weight, 0.bias, 2.weight and 3 more differs on rank 1"),
    ("nan", "gradients of rank 1, first in 4.bias, are not finite: the step is dropped on all ranks"),
])
def test_all_homes_name_what_is_wrong_and_go_on_alike(homes: Homes, how: str, named: str) -> None:
    results = run(homes, how)
    assert [code for code, _, _ in results] == [0] * HOMES
    assert len({rows[0]["sha"] for _, rows, _ in results}) == 1
    for _, rows, errors in results:
        assert named in errors
        assert len([line for line in rows[0]["decisions"] if named in line]) == 1


if __name__ == "__main__":
    main(*sys.argv[1:])
