"""When links count as changed: what slower links make of steps, what scripts and machines make of them, and noise."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from commlayer.observe.link_monitor import (
    COST_S,
    FACTOR,
    IN_A_ROW,
    MORE,
    PAYLOAD,
    SETTLED,
    USUAL,
    Direction,
    LinkWatch,
    Rates,
    SeenStep,
    Throughput,
    differ,
    slower,
)

PLANNED = (Rates(95e6, 95e6),) * 3
COMPUTE_S = 0.3
"""Of each step; the rest all wait."""
QUICK = Throughput(Direction(6e7, 0.1), Direction(7e7, 0.1))
FULL = Throughput(Direction(5e6, 0.9), Direction(5e6, 0.9))
NARROW = Rates(PAYLOAD * 5e6, PAYLOAD * 5e6)


def seen(step_s: float, nodes: list[Throughput], waited_s: float | None = None) -> SeenStep:
    return SeenStep(step_s, step_s - COMPUTE_S if waited_s is None else waited_s, tuple(nodes))


def after(links: LinkWatch, step: SeenStep, times: int = 1) -> LinkWatch:
    """That many steps, which give no reason to plan again."""
    for _ in range(times):
        links, result = links.observe(step)
        assert result is None
    return links


def settled(planned: tuple[Rates, ...] = PLANNED) -> LinkWatch:
    return after(LinkWatch(planned), seen(0.4, [QUICK] * len(planned)), SETTLED)


def reported(links: LinkWatch, step: SeenStep, most: int = 50) -> tuple[int, tuple[Rates, ...] | None]:
    """The number of such steps until other links are reported, and these links."""
    for count in range(1, most + 1):
        links, result = links.observe(step)
        if result is not None:
            return count, result
    return most, None


@pytest.mark.parametrize(("step_s", "steps"), [
    (60.0, IN_A_ROW), (2.0, IN_A_ROW),
    (0.4 + COST_S / 4, 4),  # until they have cost as much as a change of plans
])
def test_all_links_become_slower(step_s: float, steps: int) -> None:
    assert reported(settled(), seen(step_s, [FULL] * 3)) == (steps, (NARROW,) * 3)


def test_one_link_becomes_slower_and_no_other_is_blamed() -> None:
    waiting = Throughput(Direction(6e7, 0.02), Direction(7e7, 0.02))
    assert reported(settled(), seen(2.0, [waiting, FULL, waiting]))[1] == (PLANNED[0], NARROW, PLANNED[2])


# ---- actions of scripts and machines that are no change of links

EMPTY = Throughput(Direction(), Direction())
DISK = Throughput(Direction(1.5e7, 0.95), QUICK.down)
LOADED = Throughput(Direction(2e7, 0.2), Direction(2e7, 0.2))
SCRIPT = {
    "all ranks evaluate": seen(6.4, [QUICK] * 3, 0.1),
    "rank 0 evaluates, the others wait": seen(6.4, [QUICK] * 3, 0.1),
    "rank 0 saves to a disk across its link, the others wait": seen(6.4, [DISK, QUICK, QUICK], 0.1),
    "all save to a disk across their links": seen(6.4, [DISK] * 3, 0.1),
    "a rank's data stall": seen(1.4, [QUICK, Throughput(QUICK.up, Direction(8e6, 0.8)), QUICK], 0.1),
    "all ranks pause in a collective of the script's own": seen(6.4, [FULL] * 3, 0.1),
    "a pause in which all wait: links carry as ever": seen(6.4, [QUICK] * 3),
    "slow computing, links idle": seen(6.4, [Throughput(Direction(5e6, 0.1), Direction(5e6, 0.1))] * 3),
    "a busy machine: transfers take longer, but computing more so": seen(2.0, [LOADED] * 3, 0.6),
    "little is carried, and no step is slower for it": seen(0.42, [FULL] * 3),
    "no counters are read there": seen(6.4, [EMPTY] * 3),
}


@pytest.mark.parametrize("step", SCRIPT.values(), ids=SCRIPT)
@pytest.mark.parametrize("every", [1, 2, 10])
def test_what_is_no_change_of_links(step: SeenStep, every: int) -> None:
    """However often it happens."""
    links = settled()
    for number in range(10 * USUAL):
        links = after(links, seen(0.4, [QUICK] * 3) if number % every else step)


# ---- links that are faster


def carrying(down: float, sent: float = 1.0) -> list[Throughput]:
    """Nodes that receive that times what is planned for, and together send `sent` times as much."""
    bps = down * PLANNED[0].down_bps / PAYLOAD
    return [Throughput(Direction(bps, 0.1 * sent), Direction(bps, 0.1))] * 3


@pytest.mark.parametrize(("down", "sent", "counts"), [
    (0.99 * MORE, 1.0, False), (1.01 * MORE, 1.0, True),
    (10.0, 0.5, False), (10.0, 2.0, False),  # a disk in the same house, or what was lost
])
def test_what_comes_in_can_be_carried(down: float, sent: float, counts: bool) -> None:
    count, result = reported(LinkWatch(PLANNED), seen(0.4, carrying(down, sent)))
    assert result == ((PLANNED[0]._replace(down_bps=pytest.approx(down * 95e6)),) * 3 if counts else None)
    assert count == SETTLED or not counts


# ---- noise


def steps(draw: random.Random, wire_s: float, times: float = 1.0) -> Iterator[SeenStep]:
    """On links that are full for `wire_s` of a step where they carry what is planned for, and so many times as long as that:
    jitter of up to a fifth, and in one of twenty steps something takes five times as long, be it computing or the network."""
    while True:
        jitter, busy_s = draw.uniform(0.8, 1.2), wire_s * times
        whole_s, longer_s, busy = (COMPUTE_S + busy_s) * jitter, 0.0, busy_s
        bps = [95e6 / PAYLOAD / times * draw.uniform(0.8, 1.2) for _ in PLANNED]
        odd = draw.random() < 0.05
        if odd:
            longer_s = 4 * whole_s
        networks = odd and draw.random() < 0.5
        if networks and draw.random() < 0.5:  # all of it went at a fifth of the rate, or else halted
            bps, busy = [each / 5 for each in bps], busy + longer_s
        step_s = whole_s + longer_s
        share = min(1.0, busy / step_s)
        yield SeenStep(step_s, max(0.0, whole_s - COMPUTE_S) + (longer_s if networks else 0.0),
                       tuple(Throughput(Direction(each, share), Direction(each, share)) for each in bps))


@pytest.mark.parametrize("wire_s", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_noise_on_links_that_stay_as_they_are_never_raises_an_alarm(wire_s: float, seed: int) -> None:
    links, result = LinkWatch(PLANNED), steps(random.Random(seed), wire_s)
    for _ in range(10_000):
        links, results = links.observe(next(result))
        if results is not None:
            assert not slower(results, links.planned)
            links = structs.replace(links, planned=results)
    assert not differ(links.planned, PLANNED), "nor does it creep up so far that another plan is looked for"


WITHIN = 40
"""Steps."""


@pytest.mark.parametrize("wire_s", [0.3, 0.6, 0.9])
def test_links_that_carry_half_are_found_in_the_same_noise(wire_s: float) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        links, before, behind = LinkWatch(PLANNED), steps(draw, wire_s), steps(draw, wire_s, 2.0)
        for _ in range(50):
            links, _ = links.observe(next(before))
        result = None
        for _ in range(WITHIN):
            links, result = links.observe(next(behind))
            if result is not None and slower(result, PLANNED):
                break
        assert result is not None, seed


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 10.0), st.floats(0, 1e9), st.floats(0, 1), st.floats(0, 10.0)), max_size=40))
def test_never_by_less_than_the_factor_where_links_are_slower(looks: list[tuple[float, float, float, float]]) -> None:
    links = LinkWatch(PLANNED[:1])
    for step_s, bps, share, waited_s in looks:
        links, result = links.observe(seen(step_s, [Throughput(Direction(bps, share), Direction(bps, share))], waited_s))
        if result is not None:
            (rates,) = result
            assert result != PLANNED[:1]
            assert all(rate == 95e6 or 0 < FACTOR * rate < 95e6 or rate > MORE * 95e6 for rate in rates)
