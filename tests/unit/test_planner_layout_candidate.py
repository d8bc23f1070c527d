"""What the planner works out in bulk is what it would work out one by one, and refining pays where Espresso was ahead."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec import structs
from support.plans import cluster, toy_job

from bench.reference.espresso_cases import CASES, cluster_of, profile, run
from commlayer.planner import buckets
from commlayer.planner.candidates import options
from commlayer.planner.convergence import LearningRow
from commlayer.planner.costs import Prices
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.layout_candidate import SHARED, LayoutCandidate, SearchInputs
from commlayer.planner.model import DENSE, Cluster, Policy
from commlayer.planner.option_prices import Layout, Ways, alone_s, busy_s, stack
from commlayer.planner.problem import Load, load_of
from commlayer.planner.search import LOOKED_AT, NEVER, SAME, Hosts, _verdict, host_sets, plan
from commlayer.planner.simulation import exact_s
from commlayer.planner.tables import published, rows

CLUSTERS = {
    "homes": cluster(4, "home-100/20", reachable=False),
    "rack": cluster(4, "10g"),
    "two GPUs each": cluster(2, "100m", ranks=2),
    "one server": cluster(3, "home-100/20", reachable=False, servers=1),
}


def ways_of(machines: Cluster, inputs: SearchInputs, hosts: Hosts, *, counts: bool = False) -> Ways:
    prices = Prices(machines, inputs.profile, hosts.places, spread=hosts.parts)
    return Ways(prices, options(prices, inputs.policy), steps_count=counts)


def inputs_of(machines: Cluster, learning: tuple[LearningRow, ...] = ()) -> SearchInputs:
    profile, policy, timing = checked_inputs(toy_job(), machines, None, None)
    return SearchInputs(toy_job(), timing, machines, structs.replace(profile, learning=learning), policy)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_price_of_a_choice_is_that_of_the_plan_it_becomes(name: str) -> None:
    machines = CLUSTERS[name]
    inputs = inputs_of(machines)
    for hosts in host_sets(machines):
        layout = Layout(inputs.job, inputs.timing, buckets.limits(inputs.job)[0])
        entry = LayoutCandidate(inputs, ways_of(machines, inputs, hosts), layout)
        for found in [*entry.uniform[:6], entry.searched]:
            written_s = exact_s(entry.emit(found), inputs.job, machines, inputs.profile, inputs.policy)
            assert entry.exact_s(found) == pytest.approx(written_s, rel=1e-9)


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_plan_is_faster_than_its_coders(name: str) -> None:
    """What is not simulated for that reason could not have been shorter, however finely buckets are cut."""
    machines = CLUSTERS[name]
    inputs = inputs_of(machines)
    for hosts in host_sets(machines):
        entry = LayoutCandidate(inputs, ways_of(machines, inputs, hosts),
                                Layout(inputs.job, inputs.timing, buckets.limits(inputs.job)[0]))
        for found in [*entry.uniform[:12], entry.searched]:
            for finely in (SHARED, 1 << 20):
                written = entry._cut(found, finely)
                assert entry._coded_s(written.parts) <= written.seconds * (1 + 1e-9)


@pytest.mark.parametrize("counts", [False, True], ids=["by the step", "by a loss"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_runner_up_is_the_best_of_the_others(name: str, counts: bool) -> None:
    """By the objective. Or as good as what was chosen, which no other need be then: told by simulating each to its end."""
    machines = CLUSTERS[name]
    inputs = inputs_of(machines, rows() if counts else ())
    ways = ways_of(machines, inputs, host_sets(machines)[0], counts=counts)
    entry = LayoutCandidate(inputs, ways, Layout(inputs.job, inputs.timing, buckets.limits(inputs.job)[0]))
    assert (entry.space.excess is not None) is counts
    for found in (entry.searched, *entry.uniform[:3]):
        now = found.price
        for b, mine in enumerate(entry.useful):
            told, place = _verdict(b, entry, found), found.choice[b]
            steps = entry.space.schedule.sweep(list(found.choice), [b], math.inf)
            excess = [0.0] * len(mine) if entry.space.excess is None else entry.space.excess[b]
            prices = [step_s * (1 + found.excess - excess[place] + more) for step_s, more in zip(steps, excess, strict=True)]
            for said, codes in ((told.dense, False), (told.coded, True)):
                such = [o for o, option in enumerate(mine) if (entry.options[option].codec != DENSE) is codes]
                least = min((prices[o] for o in such), default=None)
                if least is None or least > LOOKED_AT * now:
                    assert said in (None, told.now, NEVER)
                else:
                    assert said is not None
                    assert said.to_loss_s == pytest.approx(least, rel=1e-9) or least < said.to_loss_s <= now * (1 + SAME)
                    assert any(said.step_s == pytest.approx(steps[o], rel=1e-9) for o in such)
            others = [price for o, price in enumerate(prices) if o != place and price <= LOOKED_AT * now]
            runner, least = told.runner.to_loss_s, min(others, default=now)
            assert runner == pytest.approx(least, rel=1e-9) or least < runner <= now * (1 + SAME)


@pytest.mark.parametrize("name", CLUSTERS)
def test_many_sizes_at_once_are_priced_as_each_by_itself(name: str) -> None:
    machines = CLUSTERS[name]
    ways = ways_of(machines, inputs_of(machines), host_sets(machines)[0])
    sizes = [1, 1000, 123_457, 1 << 24]
    templates = [ways.template(option) for option in range(len(ways.options))]
    stacked = stack(templates, np.array(sizes, float))
    for i, size in enumerate(sizes):
        each = [template.way(size) for template in templates]
        assert Load(stacked.shapes, stacked.seconds[i], stacked.latency[i]) == load_of(each)
        assert stacked.held_s[i] == [sum(way.seconds) for way in each]


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_is_left_out_is_beaten_on_every_lane(name: str) -> None:
    machines = CLUSTERS[name]
    ways = ways_of(machines, inputs_of(machines), host_sets(machines)[0])
    sizes = np.array([2.0**19, 2.0**20])
    kept = ways.unbeaten(1 << 19, 1 << 20)
    every = range(len(ways.options))
    priced = [(busy_s(ways.template(o), sizes), alone_s(ways.template(o), sizes), ways.losses[o]) for o in every]
    zero = np.zeros(2)

    def beats(a: int, b: int) -> bool:
        (busy, alone, loss), (other, other_alone, other_loss) = priced[a], priced[b]
        longer = any((seconds > other.get(lane, zero)).any() for lane, seconds in busy.items())
        return not longer and bool((alone <= other_alone).all()) and loss <= other_loss

    left = [option for option in every if option not in kept]
    assert left or not machines.reachable, "over servers alone every option loses less or ends sooner than any other"
    assert all(any(beats(a, option) for a in kept) for option in left)


@pytest.mark.parametrize("model", ["vgg16"])
def test_a_plan_is_no_longer_than_espressos(model: str) -> None:
    case = next(case for case in CASES if case.model == model)
    made = plan(published(model), cluster_of(case.testbed), profile(case.codec), Policy(whole_tree=True))
    assert made.step_s <= run(case).espresso_s
