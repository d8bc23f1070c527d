"""Ratios over a whole plan and warm-up, as a user asks for them: settings of a session. Real ranks and two servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attached import Run, Setting, loss_of, mlp, weights
from support.rank_pool import Servers, pool

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


def setting(servers: Servers, how: str) -> Setting:
    return Setting(how, (servers.address,), "topk(ratio=0.05)", 1, SERVERS, fields=FIELDS)


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


@pytest.mark.parametrize(("half", "how"), [(3, "module"), (8, "ddp")])
def test_two_settings_are_all_that_it_takes_and_what_was_saved_goes_on_bit_for_bit(half: int, how: str, tmp_path: Any) -> None:
    """Saved during the warm-up, and after it."""
    with Servers(WORLD, SERVERS) as servers, Servers(WORLD, SERVERS) as others:
        results = pool(WORLD).call(saved_and_loaded, setting(servers, how), setting(others, how), str(tmp_path), half)
    for whole, second in results:
        assert second["sent"] == whole["sent"][half:]
        assert second["asked"] == whole["asked"]
        assert sum(whole["asked"]) == sum(whole["plain"])
        assert whole["asked"] != whole["plain"]
        assert whole["sent"][0] > 2.5 * whole["sent"][-1]
        for name in weights(mlp(width=64)):
            assert torch.equal(whole[name], second[name]), name
