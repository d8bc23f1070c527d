"""Random-k: all members draw alike, another entry each step; servers add values alone; sums go out exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, randomk, seed
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

N = 5000


def keyed(codec: Codec, sender: int, job: str = "job") -> dict[str, object]:
    state = codec.init(Spec((N,)))
    seed(state, job, 3, sender)
    return state


def test_members_draw_alike_and_steps_differ() -> None:
    codec = randomk(ratio=0.02)
    states = [keyed(codec, sender) for sender in (0, 1)] + [keyed(codec, 0, "another job")]
    before = None
    for _ in range(3):
        one, two, other = (kit.decoded(codec, kit.encode(codec, torch.ones(N), state), N) for state in states)
        assert torch.equal(one, two)
        assert not torch.equal(one, other)
        assert before is None or not torch.equal(one, before)
        assert int(one.sum()) == codec.entries(N)
        before = one


def test_every_entry_is_drawn_in_its_turn() -> None:
    codec, hits = randomk(ratio=0.1), torch.zeros(N)
    state = keyed(codec, 0)
    for _ in range(200):
        hits += kit.decoded(codec, kit.encode(codec, torch.ones(N), state), N)
    assert float(hits.min()) >= 3
    assert float(hits.mean()) == pytest.approx(20, rel=1e-3)


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16"])
def test_a_server_holds_values_alone_and_sends_their_float32_sum(values: str) -> None:
    codec = randomk(ratio=0.1, values=values)
    cluster = kit.Cluster(codec, Spec((N,)), 3)
    xs = [kit.noise(N, i) for i in range(3)]
    sums = cluster.step(xs)
    assert len(cluster.accs[0]["sum"]) == 500
    sent = torch.stack([kit.decoded(codec, payload, N) for payload in cluster.payloads])
    assert torch.equal(sums[0], sent[0] + sent[1] + sent[2])
    assert cluster.payloads[0].nbytes == 16 + 500 * (4 if values == "fp32" else 2)


def test_a_contribution_of_another_draw_is_refused_and_changes_nothing() -> None:
    codec = randomk(ratio=0.1)
    acc = codec.zeros(Spec((N,)), 0)
    first, other = keyed(codec, 0), keyed(codec, 1, "another job")
    codec.add(0, kit.encode(codec, kit.noise(N), first), acc, first=True)
    before = acc["sum"].copy()
    with pytest.raises(CorruptFrame, match="seed.*E-PAYLOAD"):
        codec.add(0, kit.encode(codec, kit.noise(N), other), acc, first=False)
    assert np.array_equal(acc["sum"], before)
    codec.add(0, kit.encode(codec, kit.noise(N), other), acc, first=True)
