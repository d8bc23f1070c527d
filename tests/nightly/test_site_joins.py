"""A restarted site joins the others, which keep training: its state, its rank, and deaths during the join."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.site_job import MOMENTUM, SIZES, Event, Script, expected, flat, gradients, optimizer_of, run
from support.sites import KILLED, Ended, Sites, all_ended, ended, joined

from commlayer.engine.sync.norm_matching import norm_matching_factor, sum_of_squares

pytestmark = pytest.mark.timeout(300)
DEAD_AT = 3
"""The step in which a site dies."""


class Job:
    """Three sites, one of which dies in step DEAD_AT; its `workers` workers with it."""

    def __init__(self, sites: Sites, script: Script, victim: int, workers: int = 1) -> None:
        self._sites, self._victim, self._workers = sites, victim, workers
        self._script = replace(script, workers=2 + workers, joiners=workers)
        first = replace(self._script, events=(*script.events, *(Event(victim + n, DEAD_AT) for n in range(workers))))
        sites.serve(2 + workers, "--min-workers", "2")
        processes = [self._run(first, site, rank=site) for site in range(3)]
        assert ended(processes[victim]).code == KILLED
        self._left = {site: processes[site] for site in range(3) if site != victim}

    def _run(self, script: Script, site: int, rank: int | None = None) -> Any:
        options = ["--nproc-per-node", str(self._workers)] if site == self._victim else []
        return run(self._sites, script, site, rank=rank, options=options)

    def again(self, **fields: Any) -> Ended:
        """The victim's site, started again, to its end."""
        return joined(lambda: self._run(replace(self._script, **fields), self._victim))

    def reports(self, **fields: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Of the sites that trained on, and of the one that joins."""
        new = self.again(**fields)
        dead = {event.site for event in self._script.events if event.action == "kill"}
        assert new.code == 0, "\n".join([new.errors, *(ended(process).errors for process in self._left.values())])
        ends = all_ended(self._left.values(), *(KILLED if site in dead else 0 for site in self._left))
        old = [end.rows[-1] | {"errors": end.errors} for end in ends if end.rows]
        new_reports = sorted(new.rows, key=lambda one: one["rank"])
        everyone = [*old, *new_reports]
        for name in ("weights", "step", "sums", "plan", "scaler", "members"):
            assert all(one[name] == old[0][name] for one in everyone), name
        assert [one["rank"] for one in everyone] == list(range(len(everyone)))
        return old, new_reports


def test_joining_site_receives_weights_momentum_and_schedule(sites: Sites) -> None:
    """Its first attempt is killed while the others send the state; its second one calls a collective too early."""
    job = Job(sites, Script(momentum=True), 0)
    assert job.again(events=(Event(0, -1, at="install"),)).code == KILLED
    early = job.again(collective=True)
    assert (early.code, early.rows) == (1, []), early.errors
    assert re.search(r"attach\(\).*\[E-COLLECTIVE\]$", early.errors, re.MULTILINE)
    old, (new,) = job.reports()
    counts, first = old[0]["counts"], new["first"]
    assert counts == [3] * DEAD_AT + [2] * (first - DEAD_AT) + [3] * (len(counts) - first)
    assert new["counts"] == counts[first:]
    weights, momentum = expected([[0, 1, 2] if step < DEAD_AT else [1, 2] if step < first else [1, 2, 0]
                                  for step in range(len(counts))], momentum=True)
    for one in (*old, new):
        assert (one["step"], one["exchanges"], one["calls"]) == (len(counts),) * 3
        assert (one["weights"], one["optimizer"]) == (weights, momentum)
    assert f"step {first + 1}: worker 5 joined; continuing with 3 workers" in "".join(old[0]["decisions"])
    assert "joined the running job as worker 5" in "".join(new["decisions"])


def test_workers_of_a_site_join_in_the_same_step(sites: Sites, tmp_path: Path) -> None:
    """Although the second one calls attach() earlier."""
    old, new = Job(sites, Script(momentum=True, folder=str(tmp_path)), 2, workers=2).reports(second_first=True)
    first = new[0]["first"]
    counts = [4] * DEAD_AT + [2] * (first - DEAD_AT) + [4] * (len(old[0]["counts"]) - first)
    assert [one["counts"] for one in (*old, *new)] == [counts, counts, counts[first:], counts[first:]]
    steps = [[0, 1, (2, 3)] if world == 4 else [0, 1] for world in counts]
    assert (old[0]["weights"], old[0]["optimizer"]) == expected(steps, momentum=True)
    assert [one["members"] for one in new] == [[0, 1, 4, 5]] * 2


@pytest.mark.parametrize("modes", [
    {}, {"every": 2}, {"every": 1, "overlap": "round"}, {"every": 2, "overlap": "round"},
], ids=str)
def test_workers_that_wait_at_the_same_time_join_in_the_same_step(sites: Sites, modes: dict[str, Any]) -> None:
    script = Script(attach=modes, momentum=True, events=(Event(0, DEAD_AT, "wait"),))
    old, new = Job(sites, script, 2, workers=2).reports()
    assert [one["first"] for one in new] == [new[0]["first"]] * 2
    assert sorted(old[0]["members"]) == [0, 1, 4, 5]
    joined_lines = [line for line in old[0]["decisions"] if "joined" in line]
    assert len(joined_lines) == 1
    assert re.search("worker [45], worker [45] joined; continuing with 4 workers", joined_lines[0])
    if not modes:
        counts = old[0]["counts"]
        assert counts == sorted(counts[:DEAD_AT], reverse=True) + sorted(counts[DEAD_AT:])
        weights, momentum = expected([[0, 1, (2, 3)] if count == 4 else [0, 1] for count in counts], momentum=True)
        assert [(one["weights"], one["optimizer"]) for one in (*old, *new)] == [(weights, momentum)] * 4


@pytest.mark.parametrize("script", [
    pytest.param(Script(momentum=True, workers=2), id="two"),
    pytest.param(Script(momentum=True, workers=1, joiners=2), id="one"),
    pytest.param(Script("auto", workers=1, more=60), id="automatic plan"),
    pytest.param(Script(attach={"overlap": "forward"}, workers=2), id="forward"),
    pytest.param(Script(attach={"every": 2, "overlap": "round"}, matched=True, workers=2), id="local steps"),
    pytest.param(Script(attach={"every": 1, "overlap": "round"}, matched=True, workers=2), id="every step"),
    pytest.param(Script(attach={"every": 2, "fragments": 2}, workers=2, more=8), id="fragments"),
    pytest.param(Script(attach={"every": 4, "overlap": "round", "fragments": 2}, workers=2, more=14), id="both"),
])
def test_sites_join_a_job_that_started_with_fewer(sites: Sites, script: Script) -> None:
    sites.set(COMMLAYER_LAST_CALL_S="0")
    server = sites.serve(0, "--min-workers", str(script.workers))
    first = [run(sites, script, site, rank=site) for site in range(script.workers)]
    assert first[0].stderr is not None
    assert any("begins with plan" in line for line in iter(first[0].stderr.readline, ""))
    late = [run(sites, script, script.workers + number) for number in range(script.joiners)]
    ends = all_ended([*first, *late])
    reports = sorted((end.rows[-1] for end in ends), key=lambda one: one["rank"])
    assert not [line for one in reports for line in one["decisions"] if "[E-" in line], "automatic plans continue"
    world, counts = script.workers + script.joiners, reports[0]["counts"]
    assert [one["rank"] for one in reports] == list(range(world))
    assert (counts[0], counts[-1], counts) == (script.workers, world, sorted(counts))
    for name in ("weights", "step", "plan", "members", "sums"):
        assert all(one[name] == reports[0][name] for one in reports), name
    if script.momentum or script.attach == {"overlap": "forward"}:
        order = [*zip(reports[0]["members"], (one["site"] for one in reports), strict=True)]
        steps = [[site for _, site in sorted(order[: int(count)])] for count in counts]  # servers add in order of numbers
        weights, momentum = expected(steps, script.momentum)
        assert reports[0]["weights"] == weights
        assert not script.momentum or reports[0]["optimizer"] == momentum
    all_ended([server])


def local_weights(
    matched: bool, steps: int, left: Sequence[int], victim: int, first: int, last: int, followed: int,
) -> torch.Tensor:
    """Weights by hand with an exchange after every second step. `last`: the victim's last exchanged step. It comes back after
    step `first` with the common weights, and with the momentum that the first remaining site had `followed` exchanges
    before."""
    momenta: list[list[torch.Tensor]] = []
    jobs = {site: new_job() for site in (*left, victim)}
    starts = [torch.zeros(size) for size in SIZES]
    sent: list[list[torch.Tensor]] = []
    ends: dict[int, list[torch.Tensor]] = {}

    def merge(sites: Sequence[int]) -> None:
        means = [torch.stack(changes).mean(0) for changes in zip(*sent, strict=True)]
        scale = norm_matching_factor([(1.0, sum_of_squares(change)) for change in sent],
                                     sum_of_squares(means)) if matched else 1.0
        for number, (start, mean) in enumerate(zip(starts, means, strict=True)):
            start -= scale * mean
            for site in sites:
                p = jobs[site][0][number].detach()
                p.copy_(start + (p - ends[site][number]))

    for step in range(steps):
        sites = [site for site in jobs if site != victim or step <= last or step > first]
        if step == first + 1:
            jobs[victim], ends[victim] = new_job(), [start.clone() for start in starts]
            weights, optimizer, _ = jobs[victim]
            optimizer.param_groups[0]["lr"] = jobs[left[0]][1].param_groups[0]["lr"]
            for q, start, momentum in zip(weights, starts, momenta[first - 2 * followed], strict=True):
                q.data.copy_(start)
                optimizer.state[q]["momentum_buffer"] = momentum.clone()
        for site in sites:
            weights, optimizer, scheduler = jobs[site]
            for p, g in zip(weights, gradients(site, step), strict=True):
                p.grad = g
            optimizer.step()
            scheduler.step()
        weights, optimizer, _ = jobs[left[0]]
        momenta.append([optimizer.state[p]["momentum_buffer"].clone() for p in weights])
        if (drained := step == steps - 1) or step % 2:
            if matched and sent:
                merge(sites)
            sent = [[start - p.detach() for start, p in zip(starts, jobs[site][0], strict=True)] for site in sites]
            ends |= {site: [p.detach().clone() for p in jobs[site][0]] for site in sites}
            if not matched or drained:
                merge(sites)
    return torch.tensor(flat(starts))


def new_job() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, Any]:
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    return weights, *optimizer_of(weights, momentum=bool(MOMENTUM))


@pytest.mark.parametrize("overlapped", [False, True])
def test_site_joins_local_steps_after_an_exchange(sites: Sites, overlapped: bool) -> None:
    """If overlapped, with norm-matched averaging."""
    modes: dict[str, Any] = {"every": 2, "overlap": "round"} if overlapped else {"every": 2}
    old, (new,) = Job(sites, Script(attach=modes, matched=overlapped, momentum=True), 1).reports()
    assert new["first"] % 2 == 1, "in the step before an exchange"
    steps = len(old[0]["counts"])
    (followed,) = map(int, re.findall(r"the others have made (\d+) exchanges", "".join(new["decisions"])))
    # Overlapped, the victim's last exchange may be complete or not.
    possible = [local_weights(overlapped, steps, [0, 2], 1, new["first"], last, followed)
                for last in ((1, -1) if overlapped else (1,))]
    distances = [float((torch.tensor(new["weights"]) - weights).abs().max()) for weights in possible]
    assert min(distances) < 2e-3, distances


MEMBERS = ("weights", "step", "plan", "members")


@pytest.mark.parametrize("script", [
    Script("int4()", attach={"every": 2}, outer_momentum=0.9, momentum=True),
    Script("topk(ratio=0.3)", attach={"every": 4, "overlap": "round", "fragments": 2}, matched=True, momentum=True),
    Script(attach={"every": 2, "overlap": "round"}, matched=True, outer_momentum=0.5, scaler=True,
           events=(Event(0, -1, at="give"),)),
], ids=["plain", "fragments", "giver killed"])
def test_others_train_on_while_a_site_catches_up(sites: Sites, script: Script) -> None:
    """The giver is killed in the middle of the transfer, which the others then begin again."""
    script = replace(script, workers=4, uplink_s=2.0)
    sites.serve(4, "--min-workers", "2")
    processes = [run(sites, replace(script, events=(*script.events, Event(3, DEAD_AT))), site, rank=site) for site in range(4)]
    assert ended(processes.pop()).code == KILLED
    new = joined(lambda: run(sites, replace(script, events=()), 3))
    killed = {event.site for event in script.events}
    ends = all_ended(processes, *(KILLED if site in killed else 0 for site in range(3)))
    reports = [end.rows[-1] for end in (*ends, new) if end.rows]
    assert len(reports) == 4 - len(killed), new.errors
    for name in MEMBERS:
        assert all(one[name] == reports[0][name] for one in reports), name
    (followed,) = re.findall(r"the others have made (\d+) exchanges", "".join(reports[-1]["decisions"]))
    assert int(followed) >= 5


def test_plan_switch_ends_an_attempt_to_follow_with_one_line_and_the_site_joins_after_it(sites: Sites) -> None:
    sites.serve(3, "--min-workers", "2")
    script = Script(attach={"every": 2, "overlap": "round"}, matched=True, momentum=True, workers=3, uplink_s=1.0,
                    between="switch if followed")
    processes = [run(sites, replace(script, events=(Event(2, DEAD_AT),)), site, rank=site) for site in range(3)]
    assert ended(processes.pop()).code == KILLED
    new = joined(lambda: run(sites, script, 2), starts=2)
    reports = [end.rows[-1] for end in (*all_ended(processes), new)]
    for name in MEMBERS:
        assert all(one[name] == reports[0][name] for one in reports), name
    assert len(re.findall(r"\[E-JOIN-MISSED\]$", new.errors, re.MULTILINE)) == 1, new.errors
    assert "Traceback" not in new.errors
    assert re.search(r"the others have made [1-9]\d* exchanges", "".join(reports[-1]["decisions"]))


def test_nobody_waits_for_a_site_that_is_killed_while_it_follows(sites: Sites) -> None:
    """The site that comes in its place then follows, too."""
    script = Script(attach={"every": 2, "overlap": "round"}, matched=True, momentum=True, workers=3, uplink_s=1.0)
    sites.serve(3, "--min-workers", "2")
    processes = [run(sites, replace(script, events=(Event(2, DEAD_AT),)), site, rank=site) for site in range(3)]
    assert ended(processes.pop()).code == KILLED
    # The number of results, or rows, that have arrived at the site.
    killed = joined(lambda: run(sites, replace(script, events=(Event(2, -1, at="_answered", number=3),)), 2))
    assert (killed.code, killed.rows) == (KILLED, [])
    new = joined(lambda: run(sites, script, 2))
    ends = [*all_ended(processes), new]
    reports = [end.rows[-1] for end in ends]
    for name in MEMBERS:
        assert all(one[name] == reports[0][name] for one in reports), name
    (own,) = {*reports[0]["members"]} - {0, 1}
    assert own > 3, "the site that was killed had a number of its own"
    assert not re.search(rf"waiting for [^:]*worker ({'|'.join(map(str, range(3, own)))})\b", "".join(e.errors for e in ends))
    assert re.search(r"the others have made [1-9]\d* exchanges", "".join(reports[-1]["decisions"]))


def test_joining_site_receives_grad_scaler_and_adam_and_may_die_at_once(sites: Sites) -> None:
    job = Job(sites, Script("topk(ratio=0.2)", scaler=True, more=8), 2)
    assert job.again(events=(Event(2, 0, at="attached"),)).code == KILLED
    old, (new,) = job.reports()
    assert old[0]["optimizer"] == old[1]["optimizer"] == new["optimizer"]
    assert old[0]["members"][:2] == [0, 1]
    assert old[0]["members"][2] > 3, "a separate worker for each attempt"
    assert old[0]["sums"] == [111.0]
    assert 0 < old[0]["scaler"]["_growth_tracker"] < 3 or old[0]["scaler"]["scale"] != 256.0


@pytest.mark.parametrize("script", [
    Script("topk(ratio=0.2)", ddp=True), Script("fp16()", ddp=True, attach={"every": 2}),
], ids=["steps", "local steps"])
def test_ddp_script_joins_unchanged(sites: Sites, script: Script) -> None:
    """Its constructor calls collectives that the others have completed."""
    old, _ = Job(sites, script, 2).reports()
    assert (old[0]["members"], old[0]["sums"], old[0]["counts"][-1]) == ([0, 1, 3], [111.0], 3)


@pytest.mark.parametrize("dead", [0, 1])
def test_site_death_while_an_outer_step_waits_for_a_joining_site(sites: Sites, dead: int) -> None:
    """Site 0 would send the state to the joining site."""
    script = Script("fp16()", (Event(dead, 0, at="joined", after_s=0.05 * dead),), {"every": 2, "overlap": "round"})
    old, _ = Job(sites, script, 2).reports()
    assert old[0]["members"] == [1 - dead, 3]


def test_automatic_plan_measures_again_after_a_death_and_after_a_join(sites: Sites) -> None:
    old, _ = Job(sites, Script("auto", more=60), 2).reports()
    decisions = "\n".join(old[0]["decisions"])
    links = r"links carry [^,\n]+, [^,\n]+"
    assert re.search(rf"(?s)worker 2 left.*{links} Mb/s up/down\n", decisions), decisions
    assert re.search(rf"(?s)worker 3 joined.*{links}, [^,\n]+ Mb/s up/down\n", decisions), decisions
    assert re.search("switched to plan|kept the current plan", decisions[decisions.rindex("links carry") :]), decisions
    assert all("links carry" in one["errors"] for one in old), "each site logs it"
