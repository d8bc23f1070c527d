"""plan="auto" on given links: fine codecs on fast links, coarser codecs or rarer exchanges on slow ones, measured by bytes
sent. Real processes over loopback with separate servers, and links made slow inside the processes. Collective costs are
fabricated for slow links, because collectives bypass them.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from support.attached import Run, Setting, data, mlp, play, sharded, whole
from support.rank_pool import pool
from support.slow_links import slow_link
from torch import nn

from commlayer.autotune import job_actions, start
from commlayer.autotune.measure import calibration
from commlayer.autotune.measure.calibration import CollectiveCosts
from commlayer.cluster.calls.home_traffic import HomeTraffic
from commlayer.codec_spec import parse_spec
from commlayer.engine.job import run_events
from commlayer.last_run import list_remembered
from commlayer.observe.caps import Caps, Hours
from commlayer.planner.model import LinearCost
from commlayer.transport.flow.traffic import TRAFFIC

WORLD, SERVERS = 2, 2
FINE = {"identity()", "fp16()", "bf16()", "int8()", "int4()"}
SETTLED, MOST = 40, 4000
"""Steps after which a plan counts as final; steps in all."""
COMPUTING_S, SLOW_BPS = 0.03, 1.5e5


def train(run: Run, slow: bool, sync: str | None, cache: str, share: float = 1.0) -> dict[str, Any]:
    """`share`: of its uplink that the home of rank 1 may use."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        if share < 1:
            stack.enter_context(capped(run.rank, SLOW_BPS / share, share))
        if slow:
            stack.enter_context(slow_link(SLOW_BPS, SLOW_BPS, 0.005))
        if slow or share < 1:
            patch.setattr(calibration, "measure_collectives", lambda _groups,
                          _budget_s: CollectiveCosts(LinearCost(1.0), LinearCost(1.0)))
        model = mlp(width=128) if run.world == WORLD else sharded(mlp(width=128), run.world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.wrap(model, optimizer=optimizer, sync=sync)
        session, sent, plans = run.sessions[0], [0.0], []
        same, judged = 0, torch.zeros(1)
        while len(plans) < MOST and not (judged and same > SETTLED):
            x, y = data(run.rank, len(plans))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            time.sleep(COMPUTING_S)
            loss.backward()
            optimizer.step()
            sent.append(session.metrics()["sent_nbytes"])
            same = same + 1 if plans and session.inspect.plan == plans[-1] else 0
            plans.append(session.inspect.plan)
            judged.fill_((not cache or bool(list_remembered(Path(cache)))) and any(
                "under plan" in one or "kept the current plan" in one for one in session.inspect.decisions()))
            dist.broadcast(judged, 0)
        steps = [after - before for before, after in itertools.pairwise(sent)]
        session.flush()
        limited = TRAFFIC.gradients.bps
        # Where steps are slow enough the second is the last under the first plan.
        return {"plans": (plans[0], plans[-1]), "limited": limited, "first": max(steps[:8]), "last": sum(steps[-32:]) / 32,
                "decisions": session.inspect.decisions(),
                "weights": torch.cat([whole(p).view(-1) for p in model.parameters()])}


@contextlib.contextmanager
def capped(rank: int, link_bps: float, share: float) -> Iterator[None]:
    """The home of rank 1 may use a share of its uplink."""
    home = HomeTraffic()
    with slow_link(link_bps, link_bps, 0.005), pytest.MonkeyPatch.context() as patch:
        for module in (job_actions, start, run_events):
            patch.setattr(module, "HOME", home)
        home._caps, home._deadline_s = Caps(0.0, ((Hours(0, 0), share),) if rank else ()), 600.0
        try:
            yield
        finally:
            TRAFFIC.gradients.set(0.0)


def train_with_a_given_plan(run: Run) -> float:
    """Returns the limit of this rank after a step."""
    with capped(run.rank, 5e6, 0.1):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.wrap(model, optimizer=optimizer)
        x, y = data(run.rank, 0)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        run.sessions[0].flush()
        return TRAFFIC.gradients.bps


def codecs(plan: Any) -> set[str]:
    return {str(parse_spec(codec).core) for b in plan.buckets for codec in (b.codec, b.down) if codec}


def ran(slow: bool, sync: str | None, cache: str = "", share: float = 1.0,
        world: int = WORLD) -> list[dict[str, Any]]:
    """The results of all ranks. A model of more than two ranks is sharded over those of each of two sites."""
    setting = Setting("module", servers=SERVERS, plan="auto", fields=(("cache", cache),))
    return list(pool(world).call(play, world, train, setting, slow, sync, cache, share))


def test_a_plan_fits_the_share_of_an_uplink_that_one_home_allows() -> None:
    results = ran(False, "auto", share=0.03)
    for r in results:
        assert r["plans"][1].steps_locally, "\n".join(r["decisions"])
    assert results[0]["limited"] == 0.0
    assert SLOW_BPS / 2 < results[1]["limited"] < SLOW_BPS * 1.5
    assert "the caps of homes hold: training takes" in "\n".join(results[0]["decisions"])
    assert torch.equal(results[0]["weights"], results[1]["weights"])


def test_a_home_with_a_given_plan_measures_its_uplink_for_a_share() -> None:
    setting = Setting("module", servers=SERVERS)
    free, limited = pool(WORLD).call(play, WORLD, train_with_a_given_plan, setting)
    assert free == 0.0
    assert 0.02 * 5e6 < limited < 0.15 * 5e6


def test_fast_links_keep_fine_codecs() -> None:
    results = ran(False, "auto")
    for r in results:
        first, last = r["plans"]
        assert codecs(first) == {"identity()"}
        assert codecs(last) <= FINE, "\n".join(r["decisions"])
        assert not last.steps_locally
    assert torch.equal(results[0]["weights"], results[1]["weights"])


def test_the_next_run_begins_with_the_plan_that_was_found(tmp_path: Path) -> None:
    first, again = (ran(True, "auto", str(tmp_path)) for _ in range(2))
    assert [r["plans"][0] for r in again] == [structs.replace(r["plans"][1], servers=SERVERS) for r in first]
    assert all(r["plans"][1].steps_locally for r in again), "measuring confirms it"


def test_a_sharded_model_takes_local_steps_over_slow_links() -> None:
    results = ran(True, "auto", world=2 * WORLD)
    for r in results:
        assert r["plans"][1].steps_locally, "\n".join(r["decisions"])
        assert r["plans"][1].step_s, "a plan was found"
        assert r["plans"] == results[0]["plans"]
        assert torch.equal(r["weights"], results[0]["weights"])


@pytest.mark.parametrize("sync", [None, "auto"])
def test_slow_links_send_less(sync: str | None) -> None:
    """Local steps are used if the script allows them; otherwise rank 0 logs their gain once."""
    results = ran(True, sync)
    for r in results:
        first, last = r["plans"]
        assert codecs(first) == {"int4()"}
        assert r["last"] < 0.7 * r["first"], "\n".join(r["decisions"])
        away = last.steps_locally or any(b.stale for b in last.buckets)
        assert not (sync is None and away), "only steps on the average of all gradients"
        left, hinted = ([one for one in r["decisions"] if text in one] for text in (
            "sync='step' would keep", "attach(..., sync='auto') allows them"))
        leads = r is results[0]
        # Under "auto" the job begins with local steps already.
        assert (len(left), len(hinted)) == (away and leads and not first.steps_locally, sync is None and leads)
    assert results[0]["plans"] == results[1]["plans"]
    assert torch.equal(results[0]["weights"], results[1]["weights"])
