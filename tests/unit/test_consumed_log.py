"""The log of consumed samples: each position of an epoch once, also when shares change and workers die, join or resume."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.balance.consumed_log import TABLE, ConsumedLog, ConsumedLogState, Permutation, merged, size

LENGTH = 300
GOLDEN = {1000: (125, 697, 303, 443, 285, 560), 4 * TABLE: (1112160, 746553, 2574298, 2094468, 12460, 1031196)}


def positions(ranges: list[tuple[int, int]]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_each_position_is_done_once(data: st.DataObject) -> None:
    """An independent count of what was applied against what the log says is left."""
    log = ConsumedLog(data.draw(st.integers(0, LENGTH)))
    workers = {0, 1, 2}
    step, newest = 0, 2
    given_out: dict[int, dict[int, list[tuple[int, int]]]] = {}
    applied: list[int] = []
    for _ in range(data.draw(st.integers(0, 30))):
        event = data.draw(st.sampled_from(["give", "give", "commit", "die", "join", "resume"]))
        if event == "give":
            counts = {w: data.draw(st.integers(0, 40)) for w in sorted(workers)}
            if sum(counts.values()) <= log.left:
                given_out[step] = log.assign(step, counts)
                assert {w: size(r) for w, r in given_out[step].items()} == counts
                step += 1
        elif event == "commit" and given_out:
            oldest = min(given_out)
            missing = data.draw(st.sets(st.sampled_from(sorted(given_out[oldest])))) if given_out[oldest] else set()
            log.commit(oldest, missing)
            applied += [i for w, r in given_out.pop(oldest).items() if w not in missing for i in positions(r)]
        elif event == "die" and len(workers) > 1:
            dead = data.draw(st.sampled_from(sorted(workers)))
            workers.discard(dead)
            before = log.left
            lost = [i for gone in given_out.values() for i in positions(gone.pop(dead, []))]
            assert log.take_back(dead) == len(lost) == log.left - before
        elif event == "join":
            newest += 1
            workers.add(newest)
        elif event == "resume":
            log = ConsumedLog.of(msgspec.json.decode(msgspec.json.encode(log.state), type=ConsumedLogState))
        assert sorted(applied) == positions(log.done)
    for open_step in sorted(given_out):
        log.commit(open_step)
        applied += [i for r in given_out[open_step].values() for i in positions(r)]
    while log.left:
        applied += [i for r in log.assign(step, {0: min(7, log.left)}).values() for i in positions(r)]
        log.commit(step)
        step += 1
    assert sorted(applied) == list(range(log.length))
    assert log.done == merged([(0, log.length)])


def test_a_ledger_stays_small() -> None:
    log = ConsumedLog(10**12)
    for step in range(200):
        log.assign(step, {w: 1000 + w for w in range(8)})
        if step >= 10:
            log.commit(step - 10)
    assert len(msgspec.json.encode(log.state)) < 5000


@pytest.mark.parametrize(("act", "text"), [
    (lambda log: log.assign(0, {0: 1}), r"step 0\b.*E-SAMPLER-ARGUMENT"),
    (lambda log: log.assign(1, {0: 9}), r"step 1\b.*\b9\b.*\b8\b.*E-SAMPLER-ARGUMENT"),
    (lambda log: log.commit(5), r"step 5\b.*E-SAMPLER-ARGUMENT"),
    (lambda log: ConsumedLog.of(ConsumedLogState(4, [(0, 9)], {})), r"0 to 3\b.*E-SAMPLER-STATE"),
    (lambda log: ConsumedLog.of(ConsumedLogState(4, [(0, 2)], {0: {1: [(1, 3)]}})),
     r"position 1\b.*E-SAMPLER-STATE"),
])
def test_misuse_is_named(act: Any, text: str) -> None:
    log = ConsumedLog(10)
    log.assign(0, {0: 2})
    with pytest.raises(ValueError, match=text) as caught:
        act(log)
    assert "\n" not in str(caught.value)


# ---- the stream's order


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(-5, 2**70), st.integers(0, 10**6), st.booleans())
def test_orders_are_permutations(length: int, seed: int, epoch: int, walk: bool) -> None:
    # The way of long streams, too, at a length that can be counted.
    order = Permutation(length, seed, epoch, longest_table=0 if walk else length)
    cut = length // 3
    assert sorted(order.at([(0, cut), (cut, length)])) == list(range(length))


def test_long_streams_take_no_memory() -> None:
    length = 10**11
    order = Permutation(length, 3, 0)
    seen = order.at([(0, 500), (length - 500, length)])
    assert len(set(seen)) == 1000
    assert all(0 <= i < length for i in seen)
    # The mean of 1000 even draws is within five of its deviations of the middle.
    assert abs(sum(seen) / 1000 / length - 0.5) < 5 * 0.2887 / 1000**0.5


@pytest.mark.parametrize("length", [1000, 4 * TABLE])
def test_orders_differ_by_seed_and_epoch_and_never_by_machine(length: int) -> None:
    orders = {key: tuple(Permutation(length, *key).at([(0, 6)])) for key in [(0, 0), (0, 1), (1, 0)]}
    assert len(set(orders.values())) == 3
    # Written down once: all members of a job must agree on it, whatever they run on.
    assert orders[0, 0] == GOLDEN[length]
