"""What `bench scale` computes, and one exchange of its light members with a real server."""

from __future__ import annotations

import math
import os

import pytest

from bench import scale


def test_members_carried_counts_exchanges_and_heartbeats() -> None:
    assert scale.members_carried(0.1, 20.0, 0.0) == pytest.approx(200.0)
    assert scale.members_carried(0.1, 20.0, 0.005) == pytest.approx(100.0)


def test_summary_scales_the_cost_of_an_exchange_to_gpt2() -> None:
    model_mb = 4 * scale.GPT2_NUMEL / 1e6 / 8
    rows = [{"what": "idle", "members": n, "core": 0.001 * n} for n in (16, 64)]
    rows += [{"what": "flat out", "members": 32, "model_mb": model_mb, "payload_mb": 8.25, "exchange_ms": 18.5,
              "exchange_s": 2.0}]
    summary = scale.summary_of(rows)
    assert summary["idle_ms_per_member_s"] == pytest.approx(1.0)
    found = {name.split(",")[0]: value for name, value in summary.items()}
    assert found["members_at_line"] == pytest.approx(1 / (0.132 / 26.4 + 0.001))
    assert found["members_at_rhythm"] == pytest.approx(1 / (0.132 / 64 + 0.001))


def test_the_scaled_model_is_divided_into_equal_buckets_among_servers() -> None:
    job, plan = scale.plan_for(4 << 20, 2)
    assert len({bucket.numel for bucket in plan.buckets}) == 1
    assert [sum(b.numel for b in plan.buckets if b.server == server) for server in (0, 1)] == [2 << 20, 2 << 20]
    assert sum(math.prod(tensor.shape) for tensor in job.tensors) == 4 << 20


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_light_members_exchange_with_a_real_server() -> None:
    cores = os.sched_getaffinity(0)
    with scale.place(numel=1 << 18, most=3, bps=100e6, tls=True) as its:
        its.join(3)
        its.exchange(2)
        its.exchange(1, late=True)
        assert its.usage.threads > 6, "a thread for sending and one for receiving of each member"
        assert sum(each.received_nbytes for each in its.connections) > 9 * its.payload_nbytes
    assert os.sched_getaffinity(0) == cores
