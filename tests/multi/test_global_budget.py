"""Ratios over a whole plan and warm-up, as a user asks for them: settings of a session. Real ranks and two servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.arguments import sync_of
from support.attached import Run, Setting, loss_of, mlp, weights
from support.rank_pool import Servers, pool, quick

import commlayer

WORLD, SERVERS, WARMUP, STEPS = 2, 2, 6, 10
FIELDS = (("ratio_over", "plan"), ("warmup", WARMUP))


def encoded(worker: Any) -> list[Any]:
    """The buckets that this rank encodes."""
    return [bucket for bucket in worker.buckets if bucket.ledger.encoders]


class Training:
    def __init__(self, rank: int, setting: Setting) -> None:
        self.run, self.model = Run(rank, WORLD, setting), mlp(width=64)
        self.wrapped = self.run.wrap(self.model)
        self.session = self.run.sessions[0]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.sent: list[int] = []
        """Entries in the payloads of each step."""

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.run, self.wrapped, step).backward()
            self.optimizer.step()
            coded = encoded(self.session.inspect.connection.worker)
            self.sent.append(sum(int.from_bytes(bucket.coder.payload[8:12], "little") for bucket in coded))

    def told(self) -> dict[str, Any]:
        worker = self.session.inspect.connection.worker
        asked = [bucket.ledger.state["inner"]["entries"] for bucket in encoded(worker)]
        plain = [-(-bucket.numel // 20) for bucket in encoded(worker)]
        return weights(self.model) | {"sent": self.sent, "asked": asked, "plain": plain}


def setting(servers: Servers, how: str = "module", per_node: int = 1) -> Setting:
    return Setting(how, (servers.address,), "topk(ratio=0.05)", per_node, SERVERS, fields=FIELDS)


def plainly(rank: int, where: Setting) -> dict[str, Any]:
    job = Training(rank, where)
    job.train(0, STEPS)
    told = job.told()
    job.run.close()
    return told


@pytest.mark.parametrize(("how", "per_node"), [("module", 1), ("ddp", 1), ("module", 2)])
def test_two_settings_are_all_that_it_takes(how: str, per_node: int) -> None:
    """Of two ranks in a node each divides among the buckets that it owns."""
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(plainly, setting(servers, how, per_node))
    for told in results:
        assert told["sent"][0] > 2.5 * told["sent"][-1]
        assert sum(told["asked"]) == sum(told["plain"])
        assert told["asked"] != told["plain"]
    for name in weights(mlp(width=64)):
        assert torch.equal(results[0][name], results[1][name])


def over_to_another(rank: int, where: Setting, fields: dict[str, Any]) -> dict[str, Any]:
    job = Training(rank, where)
    job.train(0, 4)
    job.session.switch(replace(job.session.inspect.plan, **fields))
    job.train(4, STEPS)
    told = job.told()
    job.run.close()
    return told


def test_a_warmup_goes_on_behind_a_change_of_plan() -> None:
    """Codecs start afresh then, but the job does not."""
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(over_to_another, setting(servers), {"step_s": 1.0})
    for told in results:
        assert told["sent"][4] < 1.2 * told["sent"][3]
        assert told["sent"][4] < 0.7 * told["sent"][0]
        assert sum(told["asked"]) == sum(told["plain"])


def saved_and_loaded(rank: int, where: Setting, after: Setting, directory: str, half: int) -> list[Any]:
    job = Training(rank, where)
    job.train(0, half)
    kept = weights(job.model)
    job.session.checkpoint(directory, model=False)
    job.train(half, STEPS)
    whole = job.told()
    job.run.close()
    again = Training(rank, after)
    again.model.load_state_dict({name.removeprefix("0."): value for name, value in kept.items()})
    again.session.resume(directory)
    again.train(half, STEPS)
    second = again.told()
    again.run.close()
    return [whole, second]


@pytest.mark.parametrize("half", [3, 8])
def test_what_was_saved_goes_on_bit_for_bit(half: int, tmp_path: Any) -> None:
    """In the midst of the warm-up and behind it."""
    with Servers(WORLD, SERVERS) as servers, Servers(WORLD, SERVERS) as others:
        results = pool(WORLD).call(saved_and_loaded, setting(servers), setting(others), str(tmp_path), half)
    for whole, second in results:
        assert second["sent"] == whole["sent"][half:]
        assert second["asked"] == whole["asked"]
        for name in weights(mlp(width=64)):
            assert torch.equal(whole[name], second[name]), name


def locally(rank: int, address: str, how: dict[str, Any]) -> dict[str, Any]:
    run, model = Run(rank, WORLD, None), mlp(width=64)
    run.parts = [rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = quick(join=address, **dict(FIELDS))
    with commlayer.attach(model, optimizer, compression=commlayer.compressors.topk(ratio=0.05), config=config,
                          sync=sync_of(**how)) as session:
        for step in range(32):
            optimizer.zero_grad()
            loss_of(run, model, step).backward()
            optimizer.step()
        session.flush()
        coded = encoded(session.inspect.connection.worker)
        return weights(model) | {"asked": [bucket.ledger.state["inner"]["entries"] for bucket in coded],
                                 "plain": [-(-bucket.numel // 20) for bucket in coded]}


@pytest.mark.parametrize("how", [{"codes": "updates"}, {"every": 4}, {"every": 4, "overlap": "round", "fragments": 2}], ids=str)
def test_changes_of_weights_are_divided_likewise(how: dict[str, Any]) -> None:
    """Also where a part of the buckets goes in each turn."""
    with Servers(WORLD) as servers:
        results = pool(WORLD).call(locally, servers.address, how)
    for told in results:
        assert sum(told["asked"]) == sum(told["plain"])
        assert told["asked"] != told["plain"]
    for name in weights(mlp(width=64)):
        assert torch.equal(results[0][name], results[1][name])
