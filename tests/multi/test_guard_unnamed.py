"""The guard of an automatic plan without a budget compares gradients with the usual ones, and does not judge the loss."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, play
from support.rank_pool import pool
from torch import nn

from commlayer.autotune import quality as policy
from commlayer.engine.optimizers import job_of
from commlayer.planner import default_plan

WORLD, SERVERS = 2, 2


def rising(run: Run, requested: bool) -> Any:
    """What was said, codecs, and the guard's time, where a loss doubles under a plan found by itself or asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "TIME_PART", 1e9)
        logging.getLogger("commlayer").setLevel(logging.ERROR)
        model = mlp()
        run.wrap(model)
        session = run.sessions[0]
        model(torch.ones(2, 12)).sum().backward()
        session.switch(default_plan(job_of(model), codec="int8(block=32)", path="service", servers=SERVERS,
                                               ranks_per_node=1, fuse_nbytes=2048, cut_nbytes=4096))
        session.inspect.connection.terms.auto = not requested
        before_s = session.metrics()["guard_s"]
        for step in range(130):
            model.zero_grad()
            nn.functional.mse_loss(model(torch.ones(2, 12)), torch.ones(2, 3)).backward()
            session.log_loss(1.0 + (step > 80))
        codecs = {b.codec for b in session.inspect.plan.buckets}
        return session.inspect.decisions(), codecs, session.metrics()["guard_s"] - before_s


@pytest.mark.commit(1)
@pytest.mark.parametrize("requested", [False, True])
def test_a_loss_that_rises_is_nobodys_where_no_budget_is_named(requested: bool) -> None:
    with coordinators(1, WORLD, SERVERS) as jobs:
        setting = Setting("module", (jobs[0].address,), servers=SERVERS, plan="auto")
        results = pool(WORLD).call(play, WORLD, rising, setting, requested)
    for lines, codecs, check_s in results:
        assert not [line for line in lines if "the loss has risen" in line or "codecs are finer" in line]
        assert not requested or codecs == {"int8(block=32)"}
        assert (check_s > 0) is not requested, "a requested plan is not judged without a budget"
