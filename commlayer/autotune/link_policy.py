"""Decisions of all ranks about links, as pure functions: when a plan for other links is needed, and whether training waits for
it. Each rank decides from the same observations."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec import structs

from commlayer.autotune import plan_policy
from commlayer.autotune.reprobe import ReprobeSchedule
from commlayer.autotune.state import Decided, LinkState, LogLine, Measured, Reason, TuningState, extract_rates
from commlayer.observe.link_monitor import Rates, SeenStep, differ, slower
from commlayer.planner.model import Link

SOON_S, LINKS_HOLD = 0.75, 1 / 3
"""Links count as limiting if a step takes at least SOON_S, and all ranks wait for communication for at least the fraction
LINKS_HOLD of it. Then a plan for shorter steps is worth more than exact measurements: the first steps are measured at the end
of the warm-up, and all ranks wait for the plan. No plan shortens computing, which takes longest in the first steps."""
WAITED_STEPS = 2
"""All ranks wait for a plan for at most the time of this many steps."""
UNEVEN, UNEVEN_S = 1.5, 0.005
"""A rank counts as slow if its computing takes this many times as long as that of the fastest rank, and this many seconds
longer. Contention for processors and a few system calls explain less."""


def links_hold(step_s: float, waited_s: float) -> bool:
    """Returns whether communication makes steps slow, so that a plan can shorten them."""
    return step_s >= SOON_S and waited_s >= LINKS_HOLD * step_s


def record_measurement(state: TuningState, measured: Measured, now: float, names: Sequence[str]) -> Decided:
    """Records a measurement. `names`: display name of each node."""
    links = (LinkState.of(measured.links, measured.step_s, now, tuple(names), state.plan.exchange_steps) if state.links is None
             else state.links.measured(measured.links, now))
    lines: list[Reason] = [LogLine(f"links carry {links.format_rates()}")]
    if line := _uneven(measured):
        lines.append(LogLine(line))
    return structs.replace(state, links=links, uncapped=measured.uncapped), lines


def _uneven(measured: Measured) -> str:
    """Returns a log line that names a rank which computes much longer than the others. No plan can change that. Returns "" if
    all ranks are about equally fast."""
    computing_s = measured.computing_s
    if not computing_s or max(computing_s) < max(UNEVEN * min(computing_s), min(computing_s) + UNEVEN_S):
        return ""
    slowest = max(range(len(computing_s)), key=computing_s.__getitem__)
    times = max(computing_s) / min(computing_s)
    remedy = ": a Sampler with a LoadBalancer would give it a smaller share of the batch" if measured.shares else ""
    return f"{measured.names[slowest]} computes {times:.1f} times as long as the fastest, and all wait for it{remedy}"


def observe_step(state: TuningState, links: LinkState, row: SeenStep, now: float) -> Decided:
    """Starts a new search if steps show that links have become slower. Faster links make no step slower, so rank 0 orders that
    search later (plan_policy.on_faster_links)."""
    planned = links.format_rates()
    watch, rates = links.watch.observe(row)
    links = structs.replace(links, watch=watch)
    if rates is None:
        return structs.replace(state, links=links), []
    if not slower(rates, watch.planned):
        line = f"links are faster than planned: {links.format_rates(rates)} in steps, planned {planned}"
        # The links may be even faster, so the probe schedule counts from the time when they were last found no faster.
        faster = structs.replace(links.measured(links.with_rates(rates), 0.0), reprobe=links.reprobe)
        # Only for debugging: a link that is repeatedly found faster would log many such lines.
        return structs.replace(state, links=faster), [LogLine(line, logging.DEBUG)]
    line = (f"links have changed from {planned} to {links.format_rates(rates)}: steps take {1e3 * row.step_s:.1f} ms instead "
            f"of {1e3 * watch.usual_s:.1f} ms")
    return _plan_for(state, links, rates, row.step_s, row.waited_s, now), [LogLine(line)]


def apply_probe(state: TuningState, links: LinkState, found: Sequence[Link], step_s: float, now: float,
                took_s: float, *, collapsed: bool = False) -> Decided:
    """Starts a new search if a probe of `took_s` seconds has found faster links. A short probe may measure too low a rate:
    steps show whether a link has become slower. `collapsed`: True: an exchange has shown that a link is much slower, so lower
    rates count, too."""
    planned, rates = links.watch.planned, extract_rates(found)
    if not collapsed:
        rates = tuple(Rates(*map(max, zip(new, old, strict=True))) for new, old in zip(rates, planned, strict=True))
    changed = differ(rates, planned)
    # What the next probe costs on a collapsed link is not known.
    reprobe = ReprobeSchedule().changed(now) if collapsed else links.reprobe.after_probe(now, took_s, found=changed)
    links = structs.replace(links, reprobe=reprobe)
    result = f"{links.format_rates(rates)} instead of" if changed else "as planned," if collapsed else "no faster than"
    line = LogLine(f"probed the links in {1e3 * took_s:.0f} ms: {result} {links.format_rates()}")
    if not changed:
        return structs.replace(state, links=links), [line]
    return _plan_for(state, links, rates, step_s, links.watch.waited_s, now), [line]


def _plan_for(
    state: TuningState, links: LinkState, rates: Sequence[Rates], step_s: float, waited_s: float, now: float,
) -> TuningState:
    """Starts a search for links whose rates have changed, and lets training wait if links make steps slow. Codec and computing
    costs are not measured again."""
    pace_s = plan_policy.pace_since(state, links.watch.slow_s)
    agreed = WAITED_STEPS * step_s if links_hold(step_s, waited_s) else state.agreed
    state = structs.replace(state, links=links.measured(links.with_rates(rates), now), agreed=agreed)
    return plan_policy.begin_search(state, step_s, pace_s)
