"""Decisions of all ranks about links: equal on all of them, except for the search, which only the leading rank orders."""

from __future__ import annotations

import logging

import pytest
from support.autotuning import LINKS, START, seen

from commlayer.autotune import link_policy
from commlayer.autotune.link_policy import WAITED_STEPS
from commlayer.autotune.state import LinkState, LogLine, Measured, Phase, TuningState
from commlayer.observe.link_monitor import FACTOR, IN_A_ROW, PAYLOAD, SETTLED, SeenStep
from commlayer.planner.model import Link

NOW = 7.0


def watching(*, leads: bool) -> TuningState:
    """The state after the first measurement and enough steps of 0.4 s for usual values."""
    state = TuningState(START, leads=leads, phase=Phase.WATCHING)
    state, _ = link_policy.record_measurement(state, Measured(LINKS, 0.4), 0.0, ["ann", "ben"])
    for _ in range(SETTLED):
        state = observed(state, seen(0.4, 0.04, 6e7, 0.1))
    return state


def measured_links(state: TuningState) -> LinkState:
    assert state.links is not None
    return state.links


def observed(state: TuningState, row: SeenStep) -> TuningState:
    return link_policy.observe_step(state, measured_links(state), row, NOW)[0]


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize(("step_s", "waits"), [(0.7, False), (2.0, True)])
def test_slower_links_are_planned_for(leads: bool, step_s: float, waits: bool) -> None:
    state = watching(leads=leads)
    for _ in range(IN_A_ROW):
        state = observed(state, seen(step_s, 0.9 * step_s, 5e6, 0.9))
    assert [link.up_bps for link in measured_links(state).links] == [PAYLOAD * 5e6] * 2
    assert state.agreed == (WAITED_STEPS * step_s if waits else None)
    assert (state.order is not None) is leads
    assert measured_links(state).reprobe.since_s == NOW


def test_faster_downloads_are_used_without_a_search() -> None:
    state, levels = watching(leads=True), set[int]()
    for _ in range(SETTLED):
        state, lines = link_policy.observe_step(state, measured_links(state), seen(0.4, 0.04, 4e8, 0.5), NOW)
        levels |= {line.level for line in lines if isinstance(line, LogLine)}
    assert levels == {logging.DEBUG}
    assert (state.order, state.agreed) == (None, None)
    assert [link.down_bps for link in measured_links(state).links] == [PAYLOAD * 4e8] * 2
    assert measured_links(state).reprobe.since_s == 0.0, "probes count from the time when links were last found no faster"


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize(("up_bps", "faster"), [(FACTOR * 1e8, False), (FACTOR * 1e8 + 1, True), (1e6, False)])
def test_probe_orders_a_search_only_for_faster_links(leads: bool, up_bps: float, faster: bool) -> None:
    before = watching(leads=leads)
    found = [Link(up_bps, 1e6), LINKS[1]]
    state, (line,) = link_policy.apply_probe(before, measured_links(before), found, 0.4, NOW, 0.2)
    assert (state.order is not None) is (faster and leads)
    assert measured_links(state).links[0].up_bps == (up_bps if faster else 1e8)
    assert measured_links(state).reprobe.cost_s == 0.2
    assert isinstance(line, LogLine)
    assert "ann" in line.text if faster else line.text.endswith("no faster than 100/100 Mb/s up/down")
