"""Plan search for a running job: measured clusters, sync modes that the script allows, link contention, and the search process.
"""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from support.autotuning import JOB, plan_of
from support.coordinators import until
from support.jobs import FakeJob
from support.planner import PROFILE as PROFILE_PRICE
from support.planner import flat, home

from commlayer import planner
from commlayer.autotune import plan_limits
from commlayer.autotune.measure import calibration
from commlayer.autotune.measure.measurements import RankMeasurement, measured_cluster, number_server_nodes
from commlayer.autotune.planning import search
from commlayer.autotune.planning.candidate import LEAVES, estimate_factor
from commlayer.autotune.planning.contention import MOST_FACTOR, factor, scale_processing_costs
from commlayer.autotune.planning.planning_process import PlanningProcess
from commlayer.autotune.planning.search import NEARLY, SearchOrder, number_servers_by_job, predict_price, sped_up
from commlayer.autotune.planning.search import search as process_search
from commlayer.balance import Communication
from commlayer.cluster.processes.channels import node_ranks
from commlayer.codec_spec import parse_spec
from commlayer.engine.job.plan_checks import node_problems
from commlayer.engine.sync.sync_modes import LocalSteps, requested_modes
from commlayer.engine.worker.site import LocalSite
from commlayer.errors import InvalidInput, InvalidState
from commlayer.planner import default_plan, simulate
from commlayer.planner.convergence import LearningRow
from commlayer.planner.data.models import builtin, published_job
from commlayer.planner.data.tables import node, profile_from_tables
from commlayer.planner.inputs import cluster_from_line, cluster_of_homes
from commlayer.planner.model import Cluster, LinearCost, Link, Node, Policy, Profile, Question
from commlayer.planner.shards import Shards
from commlayer.planner.simulation import step_seconds
from commlayer.records import Epoch, Plan, ServerInfo

ROWS = tuple(
    LearningRow("adam", codes, codec, every, overlap, False, 0, 1.0 + more, 1.02 + more, more, more, 5, 5)
    for codec, costs in (("int4()", 0.01), ("topk(ratio=0.1)", 0.3), ("topk(ratio=0.01)", 1.5))
    for codes, every, overlap, more in (("gradients", 1, "", costs), ("updates", 1, "", costs),
                                        ("updates", 16, "", costs + 0.1), ("updates", 16, "round", costs + 0.2)))


FAST = "100/100Gb"


def inputs(links: str, **policy: Any) -> Question:
    cluster = cluster_from_line(f"2xrtx3060@{links}")
    profile: Profile = structs.replace(profile_from_tables(cluster), learning=ROWS)
    return Question(published_job("resnet101") if links == FAST else JOB, cluster, profile, Policy(optimizer="adam", **policy))


@pytest.mark.parametrize(("links", "exact", "away"), [
    ("2/2Mb", False, True), ("2/2Mb", True, False), (FAST, False, False),
])
def test_local_steps_replace_gradient_averaging_on_slow_links_and_log_the_reason(
    links: str, exact: bool, away: bool,
) -> None:
    result = search.best_plan(inputs(links, exact=exact), plan_of(0.0, "int4()"))
    plan, leaves = result.plan, result.leaves
    assert plan.synchronous is not away
    assert bool(leaves) is away
    if away:
        assert leaves.startswith("switching to 16 local steps")
        assert "sync='step'" in leaves
        again = search.best_plan(inputs(links, exact=exact), plan)
        assert again == search.BestPlan(plan), "said once"


@pytest.mark.parametrize("links", ["2/2Mb", "50/50Mb", FAST])
def test_search_after_different_optimizer_states_finds_the_best_plan_without_averaged_gradients(links: str) -> None:
    question = inputs(links, exact=False)

    def to_loss_s(plan: Plan) -> float:
        return step_seconds(plan, question) * estimate_factor(plan, question)

    found = search.best_plan(question, plan_of(0.0, "int4()"), apart=True).plan
    averaged = search.best_plan(inputs(links, exact=True), plan_of(0.0, "int4()"), apart=True).plan
    assert found.steps_locally
    assert averaged.steps_locally
    assert averaged.local_steps == 1
    assert to_loss_s(found) <= to_loss_s(averaged) * 1.001


def test_slightly_faster_local_steps_are_returned_as_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = search.best_plan(inputs("2/2Mb", exact=False), plan_of(0.0, "int4()"))
    sooner = taken.plan.step_s * taken.plan.steps_high
    kept = search.best_plan(inputs("2/2Mb", exact=True), plan_of(0.0, "int4()"))
    enough = sooner / (kept.plan.step_s * kept.plan.steps_high)
    assert enough < LEAVES
    monkeypatch.setattr(search, "LEAVES", 0.9 * enough)
    made_from = inputs("2/2Mb", exact=False)
    assert search.best_plan(made_from, plan_of(0.0, "int4()")) == taken, "one machine alone is faster than averaged gradients"
    monkeypatch.setattr(search, "_fastest_alone_s", lambda _: math.inf)
    result = search.best_plan(inputs("2/2Mb", exact=False), plan_of(0.0, "int4()"))
    assert result == search.BestPlan(kept.plan, local=taken.plan, for_local=taken.leaves)
    assert kept.local is None, "averaged gradients"


@pytest.mark.parametrize(("suggests", "links", "hinted"), [
    (True, "2/2Mb", True), (False, "2/2Mb", False), (True, FAST, False),
])
def test_search_under_gradient_averaging_reports_the_gain_of_local_steps(suggests: bool, links: str, hinted: bool) -> None:
    current = plan_of(0.0, "int4()")
    kept = search.best_plan(inputs(links, exact=True), current)
    result = search.best_plan(inputs(links, exact=True), current, suggests=suggests)
    assert result == kept._replace(hint=result.hint, auto_times=result.auto_times)
    assert result.plan.synchronous
    assert bool(result.hint) is hinted
    if hinted:
        away = search.best_plan(inputs(links, exact=False), current).plan
        times = kept.plan.step_s * kept.plan.steps_high / (away.step_s * away.steps_high)
        assert result.auto_times == pytest.approx(times)
        assert result.hint.startswith(f"{away.local_steps} local steps would reach a loss {times:.1f} times as fast")
        assert "sync='auto'" in result.hint


def families(plan: Plan) -> set[str]:
    return {parse_spec(codec).core.family for b in plan.buckets for codec in (b.codec, b.down) if codec}


@pytest.mark.parametrize(("links", "factor", "sparse"), [
    ("2/2Mb", search.NOTHING_ELSE, True),  # nothing finer is at a loss in twice the time
    ("2/2Mb", 1e9, False), ("1000/1000Mb", search.NOTHING_ELSE, False),
])
def test_early_training_avoids_coarse_codecs_unless_links_require_them(
    links: str, factor: float, sparse: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "NOTHING_ELSE", factor)
    made_from, current = inputs(links, exact=True), plan_of(0.0, "int4()")
    young = search.best_plan(made_from, current, young=True).plan
    assert ("topk" in families(young)) is sparse
    if links == "2/2Mb":
        assert "topk" in families(search.best_plan(made_from, current).plan), "which is what an older one takes"
    assert sparse or families(young) <= set(search.FINE)


def test_search_space_is_limited_to_what_the_script_allows() -> None:
    connection = FakeJob()
    connection.terms.optimizer = "adam"
    policy, suggests, young = plan_limits.collect_plan_limits(connection)
    assert (policy.optimizer, policy.exact, policy.forward) == ("adam", True, True)
    assert suggests
    assert young
    connection.terms.suggested = True
    assert not plan_limits.collect_plan_limits(connection).suggests, "once"
    connection.terms.requested, connection.terms.suggested = requested_modes("auto"), False
    policy, suggests, _ = plan_limits.collect_plan_limits(connection)
    assert (policy.exact, suggests) == (False, False)
    connection.terms.requested = requested_modes("step")
    assert connection.terms.allowed_modes() == {"forward"}
    assert connection.terms.forbidden_modes()["local"] == "attach() was given sync='step'"
    policy, suggests, _ = plan_limits.collect_plan_limits(connection)
    assert (policy.exact, policy.forward, suggests) == (True, True, False)
    connection.terms.forbids = lambda mode: "no optimizer" if mode != "forward" else ""
    for sync in (None, "auto"):
        connection.terms.requested = requested_modes(sync)
        policy, suggests, _ = plan_limits.collect_plan_limits(connection)
        assert (policy.exact, suggests) == (True, False)
    for passes, young in ((plan_limits.YOUNG - 1, True), (plan_limits.YOUNG, False)):
        connection.passes = passes
        assert plan_limits.collect_plan_limits(connection).young is young


@pytest.mark.parametrize(("sites", "matched", "exact"), [
    ([[0, 1], [2, 3]], True, False), ([[0, 1], [2]], False, False), ([[0, 1], [2]], True, True)])
def test_sharded_sites_of_unlike_sizes_take_no_local_steps_scaled_to_a_norm(
    sites: list[list[int]], matched: bool, exact: bool,
) -> None:
    connection = FakeJob(site=LocalSite(Shards(2, 0, frozenset({0}))), groups=SimpleNamespace(sites=sites), matched=matched)
    connection.terms.requested = requested_modes("auto")
    assert plan_limits.collect_plan_limits(connection).policy.exact is exact


def test_auto_chooses_fragments_unless_the_script_does() -> None:
    connection = FakeJob()
    for sync, elastic, allowed in ((None, False, True), (LocalSteps(4, fragments=2), False, False), (None, True, True)):
        connection.terms.requested, connection.members.elastic = requested_modes(sync), elastic
        assert plan_limits.collect_plan_limits(connection).policy.fragments is allowed


@pytest.mark.parametrize(("sync", "may"), [
    (None, True), ("step", True), ("auto", True), ("forward", True), (LocalSteps(1), False), (LocalSteps(4), False),
])
def test_forward_overlap_is_allowed_but_stale_results_are_not(sync: Any, may: bool) -> None:
    """A script that reads `.grad` waits for the results of this step; results one step late would change what it reads."""
    connection = FakeJob()
    connection.terms.requested = requested_modes(sync)
    policy = plan_limits.collect_plan_limits(connection).policy
    assert policy.forward is may
    assert policy.staleness is False
    connection.terms.forbids = lambda mode: "DistributedDataParallel ends backward() only when" if mode == "forward" else ""
    assert not plan_limits.collect_plan_limits(connection).policy.forward


def test_budget_is_passed_to_the_planner_without_a_loss_model() -> None:
    result, connection = inputs("100/100Mb"), FakeJob()
    assert result.profile is not None
    assert result.policy is not None
    assert plan_limits.limit_to_budget(connection, result.profile, result.policy)[1].max_loss == result.policy.max_loss
    connection.terms.max_loss = 0.02
    profile, policy = plan_limits.limit_to_budget(connection, result.profile, result.policy)
    assert (profile, policy.max_loss) == (result.profile, 0.02)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("links", ["2/2Mb", FAST])
def test_after_local_steps_only_local_step_plans_are_compared(links: str, exact: bool) -> None:
    made_from = inputs(links, exact=exact, staleness=False)
    current = structs.replace(plan_of(0.0, "int4()"), codes="updates", local_steps=16)
    result = search.best_plan(made_from, current, apart=True)
    plan = result.plan
    assert plan.steps_locally
    assert (result.leaves, result.local) == ("", None)
    assert not exact or (plan.codes, plan.local_steps, plan.overlap) == ("updates", 1, "")
    assert plan.step_s == pytest.approx(step_seconds(plan, made_from)), "priced as it runs, by the step"


LINKS = [Link(1e8, 1e8, 0.01)] * 3
ROWS_REPLAN = [RankMeasurement(0.1 * (1 + rank), 0.2, 1e8, 1e8, 0.01) for rank in range(3)]
INSIDE = calibration.CollectiveCosts()
JOB_REPLAN = published_job("resnet50")


def costs() -> Profile:
    """The host's, as a job measures them."""
    profile = profile_from_tables(measured_cluster(LINKS, ROWS_REPLAN, INSIDE, [0]))
    kept = tuple(cost for cost in profile.codecs if cost.device == "cpu")
    return Profile(kept, profile.server, profile.bucket_s, LinearCost(0.0, 1e-10), source="measured")


def test_dedicated_server_is_not_a_site() -> None:
    """Sites at 20/100 Mb/s receive from the server at 100 Mb/s and send to it at 20 Mb/s each; one site shares its machine."""
    links = [Link(20e6, 100e6, 0.01), Link(20e6, 90e6, 0.01), Link(1e10, 1e10, 0.0)]
    assert measured_cluster(links, ROWS_REPLAN, INSIDE, [3]).nodes[3].link == Link(100e6, 1e10 + 40e6, 0.0)
    assert measured_cluster(links, ROWS_REPLAN, INSIDE, [3], elsewhere_bps=3e8).nodes[3].link.up_bps == 3e8


@pytest.mark.parametrize("bps", [1e8, 1e9, 1e10])
@pytest.mark.parametrize("cuda", [False, True])
def test_plan_for_a_gpu_model_runs_on_the_gpu(bps: float, cuda: bool) -> None:
    links = [Link(bps, bps, 0.001)] * 3
    cluster = measured_cluster(links, ROWS_REPLAN, INSIDE, [0, 1, 2], cuda=cuda)
    plan = planner.plan(JOB_REPLAN, cluster, costs(), Policy(devices=("cpu",)))
    assert node_problems(planner.lower(plan), 3, 1, cuda=cuda) == []


@pytest.mark.parametrize("world", [2, 3])
def test_server_nodes_are_numbered_after_the_present_sites(world: int) -> None:
    """Three sites registered, so servers got the next numbers; since then one site has left, or another has replaced it."""
    epoch = Epoch(5, (), (ServerInfo(0, "a", 3), ServerInfo(1, "b", 4), ServerInfo(2, "b", 4)))
    groups = SimpleNamespace(sites=node_ranks(world, 1))
    simple_namespace: Any = SimpleNamespace(uplink=SimpleNamespace(epoch=epoch), elastic=True, groups=groups)
    nodes = number_server_nodes(simple_namespace)
    assert nodes == [world, world + 1, world + 1]
    cluster = measured_cluster(LINKS[:world], ROWS_REPLAN[:world], INSIDE, nodes)
    assert [node.server for node in cluster.nodes] == [False] * world + [True] * 2
    plan = planner.plan(JOB_REPLAN, cluster, costs(), Policy(devices=("cpu",)))
    assert number_servers_by_job(plan, nodes).servers == (3 if plan.servers else 0)
    simple_namespace.elastic = False
    assert number_server_nodes(simple_namespace) == [3, 4, 4], "all must stay, so nodes are those of the beginning"


@pytest.mark.parametrize(("order", "speeds"), [((0, 1, 2), (1.0, 1 / 2, 1 / 3)), ((2, 0, 1), (1.0, 3.0, 1.5))])
def test_speeds_are_relative_to_rank_0(order: tuple[int, ...], speeds: tuple[float, ...]) -> None:
    cluster = measured_cluster(LINKS, [ROWS_REPLAN[rank] for rank in order], INSIDE, [0])
    assert [node.speed for node in cluster.nodes] == pytest.approx(speeds)


def test_sites_behind_nat_get_no_collectives_from_search_or_controller() -> None:
    links = [Link(1e10, 1e10, 0.0001)] * 3  # so fast that collectives would win
    apart, together = (measured_cluster(links, ROWS_REPLAN, INSIDE, [3], reachable=reachable) for reachable in (False, True))
    plan = planner.lower(planner.plan(JOB_REPLAN, apart, costs(), Policy(devices=("cpu",))))
    assert {b.path for b in plan.buckets} == {"service"}
    assert node_problems(plan, 3, 1, reachable=False) == []
    other = planner.lower(planner.plan(JOB_REPLAN, together, costs(), Policy(devices=("cpu",))))
    assert "service" not in {b.path for b in other.buckets}
    assert "has a collective between nodes that can reach only a server" in node_problems(other, 3, 1, reachable=False)[0]
    assert node_problems(other, 3, 1) == []


CLUSTER = cluster_from_line("2xrtx3060@20/20Mb")
CURRENT = plan_of(0.0, "int4()")


def order(measured_s: float = 1.0) -> SearchOrder:
    inputs = Question(JOB, CLUSTER, profile_from_tables(CLUSTER), Policy(optimizer="adam", exact=True))
    return SearchOrder(CURRENT, None, (0, 1), inputs, measured_s)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Those that are started."""
    result = list[subprocess.Popen[bytes]]()

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            result.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return result


@pytest.fixture
def process() -> Iterator[PlanningProcess]:
    planning_process = PlanningProcess()
    yield planning_process
    planning_process.close()


def test_search_process_finds_the_same_plan_as_a_search_in_process(process: PlanningProcess) -> None:
    for measured_s in (0.5, 2.0):
        result, local = process.search(order(measured_s)), process_search(order(measured_s))
        assert result.candidate == local.candidate
        assert result.contention == local.contention


def test_slowest_uplink_helps_most_on_slow_lines(process: PlanningProcess) -> None:
    """A machine without ranks has no number."""
    cluster = cluster_of_homes("rtx3060@100/50Mb,rtx3060@100/2Mb", "1Gb")
    question = inputs("2/2Mb", exact=True)._replace(cluster=cluster)
    gains = process.gains(question)
    assert gains is not None
    assert gains.homes == (1,)
    assert 1.5 < gains.uplink_times < 2.5
    assert gains.uplink_times > gains.home_times > 0


def test_one_child_works_at_a_time_and_searches_go_first(
        process: PlanningProcess, children: list[subprocess.Popen[bytes]]) -> None:
    with ThreadPoolExecutor(1) as threads:
        process.start()
        children[0].send_signal(signal.SIGSTOP)
        searching = threads.submit(process.search, order())
        until(process._runs.locked, "the search runs")
        assert process.gains(inputs("2/2Mb")) is None
        children[0].send_signal(signal.SIGCONT)
        assert searching.result(60).candidate.plan.buckets
        process.start()
        children[1].send_signal(signal.SIGSTOP)
        asking = threads.submit(process.gains, inputs("2/2Mb"))
        until(lambda: process._asks and process._searches, "the question runs")
        assert process.search(order()).candidate.plan.buckets
        with pytest.raises(InvalidState, match="E-PLANNER-ENDED"):
            asking.result(60)


def test_search_process_error_is_raised_and_the_next_search_works(process: PlanningProcess) -> None:
    wrong = order()._replace(inputs=order().inputs._replace(policy=Policy(max_local_steps=-1)))
    with pytest.raises(InvalidInput, match=r"max_local_steps is -1\b.*E-PLAN-INPUT"):
        process.search(wrong)
    assert process.search(order()).candidate.plan.buckets


def test_killed_search_process_is_reported_and_restarted(
        process: PlanningProcess, children: list[subprocess.Popen[bytes]]) -> None:
    process.start()
    children[0].kill()
    with pytest.raises(RuntimeError, match=r"exit code -9\b.*E-PLANNER-ENDED"):
        process.search(order())
    assert process.search(order()).candidate.plan.buckets


def test_close_ends_a_running_search(process: PlanningProcess, children: list[subprocess.Popen[bytes]]) -> None:
    lines: list[InvalidState] = []

    def searching() -> None:
        try:
            process.search(order())
        except InvalidState as error:
            lines.append(error)

    process.start()
    children[0].send_signal(signal.SIGSTOP)  # it never answers
    thread = threading.Thread(target=searching)
    thread.start()
    time.sleep(0.1)
    process.close()
    thread.join(10.0)
    assert not thread.is_alive()
    (error,) = lines
    assert error.code == "E-PLANNER-ENDED"
    assert "exit code -9" in error.what


def test_links_are_at_least_as_fast_as_the_measured_step_requires() -> None:
    alone = profile_from_tables(CLUSTER)
    copy = structs.replace(CURRENT, hosts=(0,))

    def seconds(cluster: Cluster) -> float:
        return step_seconds(copy, Question(JOB, cluster, alone, Policy()))

    true_s = seconds(CLUSTER)
    slow = structs.replace(CLUSTER, nodes=tuple(
        structs.replace(node, link=structs.replace(node.link, up_bps=node.link.up_bps / 1.4)) for node in CLUSTER.nodes))
    assert seconds(slow) > true_s * (1 + NEARLY)
    result = sped_up(slow, seconds, true_s)
    assert seconds(result) == pytest.approx(true_s, rel=0.1)
    assert [node.link.down_bps for node in result.nodes] == [node.link.down_bps for node in slow.nodes]
    assert sped_up(CLUSTER, seconds, 2 * true_s) == CLUSTER, "time beyond the links' is not attributed to them"
    assert sped_up(slow, seconds, 1e-6) == slow, "no rate does"


def test_slow_step_is_attributed_to_the_dedicated_server_link_first() -> None:
    home, elsewhere = Link(20e6, 100e6, 0.01), Link(1e9, 1e9, 0.01)
    fast = Cluster((*(Node(f"n{n}", 1, "cpu", home, 0.0, 0.0) for n in range(3)), Node("n3", 0, "cpu", elsewhere, server=True)))
    slow = structs.replace(fast, nodes=(*fast.nodes[:3], structs.replace(fast.nodes[3], link=Link(20e6, 1e9, 0.01))))
    alone, copy = profile_from_tables(fast), structs.replace(CURRENT, hosts=(3,))

    def seconds(cluster: Cluster) -> float:
        return step_seconds(copy, Question(JOB, cluster, alone, Policy()))

    assert seconds(slow) > 1.2 * seconds(fast)
    result = sped_up(slow, seconds, seconds(fast))
    assert result.nodes[:3] == slow.nodes[:3]
    assert seconds(result) == pytest.approx(seconds(fast), rel=0.1)


CLUSTER_CONTENTION = Cluster(tuple(node(f"n{i}", "cpu", "10g") for i in range(4)))
PROFILE = profile_from_tables(CLUSTER_CONTENTION)


@pytest.mark.parametrize(("compute_s", "work_s", "measured_s", "expected"), [
    (1.0, 0.5, 1.0, 1.0),  # no longer than priced
    (1.0, 0.5, 1.5, 1.0),
    (1.0, 0.5, 2.0, 2.0),
    (1.0, 0.5, 3.5, 5.0),
    (1.0, 0.5, 1.0 + 0.5 * MOST_FACTOR + 0.1, 1.0),  # more than processors can be blamed for
])
def test_contention_factor_makes_the_predicted_time_equal_the_measured_time(
    compute_s: float, work_s: float, measured_s: float, expected: float,
) -> None:
    assert factor(measured_s, lambda f: compute_s + work_s * f) == pytest.approx(expected, rel=0.05)


def test_contention_of_many_senders_is_fitted_by_simulation() -> None:
    job, policy = builtin("lstm"), Policy(devices=("cpu",))
    plan = default_plan(job, codec="int8()", path="service", servers=4, ranks_per_node=1, fuse_nbytes=1 << 20,
                        cut_nbytes=1 << 21)

    def step_s(crowd: float) -> float:
        return simulate(plan, job, CLUSTER_CONTENTION, scale_processing_costs(PROFILE, crowd), policy).step_s

    assert factor(step_s(3.0), step_s) == pytest.approx(3.0, rel=0.05)


JOB_PRICE = published_job("resnet50")
POLICY = Policy(devices=("cpu",))


@pytest.mark.parametrize("link", [Link(1e9, 1e9, 1e-4), Link(20e6, 20e6, 0.01), home()])
def test_price_of_a_plan_is_the_simulated_time(link: Link) -> None:
    inputs = Question(JOB_PRICE, flat(3, link), PROFILE_PRICE, POLICY)
    plan = planner.plan(JOB_PRICE, inputs.cluster, PROFILE_PRICE, POLICY)
    line = planner.simulate(plan, inputs.job, inputs.cluster, PROFILE_PRICE, POLICY)
    comm_s, overlap = predict_price(plan, inputs)
    assert 0 <= overlap <= 1
    price = Communication(comm_s, overlap)
    assert price.exposed_s(line.compute_s) == pytest.approx(line.exposed_s, rel=1e-6, abs=1e-9)
