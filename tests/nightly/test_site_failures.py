"""Sites that die, hang, leave or violate the protocol at any moment of a job, and what the remaining sites do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.coordinators import until
from support.site_job import (
    COARSE,
    DEADLINE_S,
    EXACT,
    FINE,
    RAISED,
    STEPS,
    Event,
    Script,
    expected,
    joiner_waits,
    members,
    one_save,
    outcome,
    run,
    start,
)
from support.sites import KILLED, WAIT_S, Sites, all_ended, ended

pytestmark = pytest.mark.timeout(300)
ODD = 4
WHY = {
    "backward": rf"sent nothing for {DEADLINE_S} s while others waited in step {ODD} \(reported by server 0\).* deadline_s",
    "between": rf"was dropped: \d others waited {DEADLINE_S} s for it .* deadline_s",
    "payload": r"got codec 99, weight 1\.0 and total weight 0\.0",
    "frame": "sent a HELLO frame after the handshake",
}
"""Why a site is evicted that hangs in a backward pass or between steps, or breaks the protocol."""


def continued(sites: Sites, script: Script, steps: str, *others: str) -> tuple[list[dict[str, Any]], list[Any], Any]:
    """Runs the job. Its remaining sites must have trained with the members `steps` (or `others`), to exactly those weights, or
    to weights that conserve all gradients. Returns their reports, all sites' ends, and the server's."""
    server, processes = start(sites, len(members(steps)[0]), script)
    ends, reports = outcome(processes, script)
    runs = [members(text) for text in (steps, *others)]
    counts = [[len(step) for step in run if step] for run in runs]
    for report in reports:
        assert report["weights"] == reports[0]["weights"]
        assert report["counts"] in counts, report["counts"]
        assert report["exchanges"] == len(report["counts"])
        assert report["rank"] == sum(site < report["site"] for site in runs[0][-1])
    if script.codec == EXACT:
        assert reports[0]["weights"] == expected(runs[counts.index(reports[0]["counts"])])[0]
    else:
        put, residuals = (torch.tensor([one[what] for one in reports]).double().sum(0) for what in ("put", "residuals"))
        assert residuals.abs().max() > 0.1
        torch.testing.assert_close(residuals - torch.tensor(reports[0]["weights"]).double(), put, atol=1e-4, rtol=1e-4)
    lost = [site for site in runs[0][0] if site not in runs[0][-1]]
    decisions = "\n".join(reports[0]["decisions"])
    assert all(re.search(rf"worker [\d, worker]*\b{site}\b[\d, worker]* left, with .*; continuing with \d workers", decisions)
               for site in lost), decisions
    return reports, ends, server


@pytest.mark.commit(1)
@pytest.mark.parametrize(("script", "steps"), [
    pytest.param(Script(events=(Event(0, ODD, after_s=0.004),), sums=True), ["012*4 12*8", "012*5 12*7"], id="killed"),
    pytest.param(Script(events=(Event(1, ODD, after_s=0.008),), ddp=True), ["012*4 02*8", "012*5 02*7"], id="killed under DDP"),
    # One has the step, and waits in the script's own collective for the other, which waits for results.
    pytest.param(Script(events=(Event(0, ODD, at="step"), Event(1, ODD, "slow")), sums=True), ["012*5 12*7"], id="first, slow"),
    pytest.param(Script(events=(Event(2, ODD, at="step"), Event(1, ODD, "slow")), sums=True), ["012*5 01*7"], id="last, slow"),
    pytest.param(Script(events=(Event(0, ODD), Event(1, ODD, "abort"))), ["012*4 - 12*7"], id="aborted while one dies"),
    # backward() returns at once, so the last step may not be sent yet.
    pytest.param(Script(events=(Event(0, ODD, after_s=0.004),), attach={"overlap": "forward"}),
                 ["012*3 12*9", "012*4 12*8", "012*5 12*7"], id="killed under forward overlap"),
])
def test_site_death_inside_a_step(sites: Sites, script: Script, steps: list[str]) -> None:
    reports, _, _ = continued(sites, script, *steps)
    assert [one["calls"] for one in reports] == [STEPS] * 2
    assert all(one["sums"] == reports[0]["sums"] for one in reports)
    if script.sums:
        left = sum(10.0**one["site"] for one in reports)
        assert set(reports[0]["sums"]) == {111.0, left}, "sums that the script makes are of the old or the new members, too"


@pytest.mark.parametrize("attach", [
    {"every": 2}, {"every": 1, "overlap": "round"}, {"every": 2, "overlap": "round"}, {"every": 2, "fragments": 2},
    {"every": 4, "fragments": 2, "overlap": "round"},
], ids=["local", "every step", "overlapped", "fragments", "overlapped fragments"])
def test_site_death_inside_an_outer_step(sites: Sites, attach: dict[str, Any]) -> None:
    """Its local steps since the last exchange are lost with it; those of each fragment since that fragment's exchange."""
    script = Script(events=(Event(0, 5, after_s=0.001),), attach=attach)
    _, reports = outcome(start(sites, 3, script)[1], script)
    assert reports[0]["weights"] == reports[1]["weights"]
    assert reports[0]["counts"][-1] == 2
    possible = torch.tensor([expected(members(f"012*{first} 12*{STEPS - first}"))[0] for first in range(1, 7)])
    near = torch.isclose(torch.tensor(reports[0]["weights"]), possible, atol=1e-4)
    assert near.any(0).all() if "fragments" in attach else near.all(1).any()


def test_site_deaths_below_min_workers_end_the_job_with_their_names(sites: Sites) -> None:
    script = Script("topk(ratio=0.1)", (Event(0, 3, after_s=0.001), Event(2, 3, after_s=0.004), Event(1, 8)))
    ends = all_ended(start(sites, 4, script)[1], KILLED, KILLED, KILLED, 1)
    assert re.search(r"^commlayer: worker 1: .*\b1\b.*min_workers \(2\).*\[E-PEER-LOST\]$", ends[3].errors, re.MULTILINE)
    assert all(f"worker {site}" in ends[3].errors for site in (0, 2))


def test_site_with_an_error_and_site_with_fewer_batches_leave(sites: Sites) -> None:
    script = Script(events=(Event(0, 4, "raise"), Event(2, 8, "leave")))
    ends = all_ended(start(sites, 3, script, least=1)[1], 1, 0, 0)
    steps = members("012*4 12*4 1*4")
    for end, count in ((ends[1], 12), (ends[2], 8)):
        (report,) = end.rows
        assert report["counts"] == [len(sites) for sites in steps[:count]]
        assert report["weights"] == expected(steps[:count])[0]


def test_site_that_cannot_continue_with_other_members_ends_with_the_cause(sites: Sites) -> None:
    script = Script(events=(Event(0, ODD), Event(2, ODD, "fail", at="new_world"), Event(2, ODD + 1, "fail", at="new_world")))
    ends = all_ended(start(sites, 4, script)[1], KILLED, 0, 1, 0)
    assert "RuntimeError: new_world fails" in ends[2].errors
    assert [end.rows[0]["counts"][-1] for end in (ends[1], ends[3])] == [2, 2]


@pytest.mark.parametrize(("action", "why"), [("hang", "backward"), ("payload", "payload"), ("frame", "frame")])
def test_hung_or_violating_site_is_evicted_and_named(
    sites: Sites, action: str, why: str,
) -> None:
    sites.set(COMMLAYER_DEADLINE_S=DEADLINE_S)
    script = Script(events=(Event(1, ODD, action, at="backward"),))
    _, ends, server = continued(sites, script, "012*4 02*8")
    if action == "hang":
        assert re.search(rf"worker 1 .*: was dropped: {WHY[why]}.*\[E-PEER-LOST\]$", ends[1].errors, re.MULTILINE)
    errors = ended(server).errors
    assert re.search(rf"worker 1: .*{WHY[why]}", errors), errors
    assert "continuing with 2 workers; left: worker 1" in errors


@pytest.mark.parametrize(("script", "codes", "error"), [
    (Script(events=(Event(1, ODD, "hang", at="backward"),)), (1, 1, 1), r"worker 1: .*\(server 0 .*\[E-DEADLINE\]$"),
    (Script(events=(Event(1, 3, "hang", at="end"),), between="save"), (1, 1, 1),
     rf"{DEADLINE_S} s from rank 1\b.*\[E-DEADLINE\]$"),
    (Script(events=(Event(1, ODD, "payload", at="backward"),)), (1, 9, 1),
     rf"^commlayer: worker 1: .*\(by server 0\): {WHY['payload']}.*\[E-FRAME\]$"),
], ids=["backward", "save", "payload"])
def test_without_min_workers_a_death_ends_all_sites_with_its_name(
    sites: Sites, tmp_path: Path, script: Script, codes: tuple[int, ...], error: str,
) -> None:
    sites.set(COMMLAYER_DEADLINE_S=DEADLINE_S)
    _, processes = start(sites, 3, replace(script, folder=str(tmp_path)), least=0)
    ends = all_ended(processes, *codes)
    for site in (0,) if script.between else (0, 2):
        assert re.search(error, ends[site].errors, re.MULTILINE), ends[site].errors


def kill(site: int, step: int, at: str, number: int, joiner: bool = False) -> Event:
    return Event(site, step, at=at, number=number, joiner=joiner)


@pytest.mark.parametrize(("events", "steps"), [
    ((kill(0, 3, "gather_all", 5), kill(2, 7, "gather_all", 2)), "0123*4 123*4 13*4"),  # the first at a save's end
    ((kill(0, 3, "gather_all", 4), kill(1, 3, "gather_all", 8)), "0123*4 23*8"),  # the second in its repetition
])
def test_site_death_during_a_checkpoint_repeats_it_on_the_others(
    sites: Sites, tmp_path: Path, events: tuple[Event, ...], steps: str,
) -> None:
    continued(sites, Script(events=events, between="save", folder=str(tmp_path)), steps)
    assert one_save(tmp_path) == (2, STEPS)


@pytest.mark.parametrize(("between", "events", "steps", "codecs", "decision"), [
    # The second dies after the server has received the plan, which the others do not know.
    ("switch", (kill(3, 3, "gather_all", 2), kill(0, 7, "send_plan", 1)), "0123*4 012*4 12*4", [COARSE, FINE, COARSE], ""),
    ("switch of rank 0", (kill(0, 3, "share_bytes", 1),), "012*4 12*8", [COARSE, COARSE, FINE], "plan switch was cancelled"),
    ("own switch", (kill(3, 3, "gather_all", 2), kill(0, 7, "send_plan", 1)), "0123*4 012*4 12*4", [COARSE, COARSE, FINE], ""),
])
def test_site_death_during_a_plan_switch(
    sites: Sites, between: str, events: tuple[Event, ...], steps: str, codecs: list[str], decision: str,
) -> None:
    """A switch requested by scripts is completed by the remaining sites.

    Any other switch is dropped unless servers may have the plan.
    """
    reports, _, _ = continued(sites, Script(COARSE, events, between=between), steps)
    assert all(one["codecs"] == [codec for codec in codecs for _ in range(4)] for one in reports)
    assert all(decision in "".join(one["decisions"]) for one in reports)


@pytest.mark.parametrize(("between", "events", "steps"), [
    ("save", (kill(3, 3, "gather_all", 2), kill(2, 7, "gather_all", 2, joiner=True)), "0123*4 012*4 01*4"),
    ("switch", (kill(3, 3, "gather_all", 2), kill(0, 7, "send_plan", 1, joiner=True)), "0123*4 012*4 12*4"),
    ("drain", (kill(3, 3, "drain", 1), kill(2, 7, "drain", 1, joiner=True)), "0123*4 012*4 01*4"),
])
def test_site_joins_after_a_death_between_steps(
    sites: Sites, tmp_path: Path, between: str, events: tuple[Event, ...], steps: str,
) -> None:
    """It registers while a call of all sites waits for the dead one. The others first repeat that call."""
    script = Script(COARSE if between == "switch" else EXACT, events, {"every": 3} if between == "drain" else {},
                    between=between, folder=str(tmp_path), workers=4)
    _, processes = start(sites, 4, script)
    until(joiner_waits(tmp_path).exists, "a site is about to die", WAIT_S)
    late = run(sites, replace(script, events=()), 4)
    _, reports = outcome([*processes, late], script)
    first, left = reports[-1]["first"], members(steps)[-1]
    assert first >= 9
    assert all(one["weights"] == reports[0]["weights"] for one in reports)
    assert [one["rank"] for one in reports] == [0, 1, 2]
    if between != "drain":
        run_of = members(steps)[:8] + [left] * (first - 8) + [[*left, 4]] * (len(reports[0]["counts"]) - first)
        assert [one["counts"] for one in reports[:2]] == [[len(step) for step in run_of]] * 2
    if between == "save":
        assert reports[0]["weights"] == expected(run_of)[0]


@pytest.mark.parametrize(("between", "events", "steps"), [
    ("save", (Event(1, 3, "hang", at="end"), Event(3, 7, "hang", at="end")), "0123*4 023*4 02*4"),
    ("switch", (Event(1, 3, "hang", at="end"), Event(3, 7, "hang", at="end")), "0123*4 023*4 02*4"),
    ("sum", (Event(1, 3, "hang", at="end"), Event(3, 7, "hang", at="end")), "0123*4 023*4 02*4"),
    # The others wait for its message in which step they continue: the death is known long before the hang.
    ("save", (Event(1, 3, "hang", at="end"), Event(3, 3, at="end")), "0123*4 02*8"),
])
def test_site_that_hangs_between_steps_is_evicted_and_named(
    sites: Sites, tmp_path: Path, between: str, events: tuple[Event, ...], steps: str,
) -> None:
    sites.set(COMMLAYER_DEADLINE_S=DEADLINE_S, COMMLAYER_RECONNECT_S="1")
    reports, ends, server = continued(sites, Script(events=events, between=between, folder=str(tmp_path)), steps)
    errors = ended(server).errors
    for event in events:
        if event.action == "hang":
            assert re.search(rf"{WHY['between']}.*\[E-PEER-LOST\]$", ends[event.site].errors, re.MULTILINE)
            assert re.search(rf"worker {event.site}: {WHY['between']}", errors)
    if between == "save":
        assert one_save(tmp_path)[0] == 2
    elif between == "switch":
        assert len(set(reports[0]["buckets"])) == 3
    else:
        assert [one["sums"] for one in reports] == [[1101.0, 101.0, 101.0]] * 2


@pytest.mark.parametrize("event", [
    pytest.param(kill(2, 4, "gather_all", 3), id="before a save is chosen"),
    pytest.param(kill(0, 4, "put_state", 1), id="with a part of it at the server"),
    pytest.param(kill(1, 4, "gather_all", 7), id="restored"),
])
def test_site_death_during_a_load_stops_the_others_with_one_line(sites: Sites, tmp_path: Path, event: Event) -> None:
    _, processes = start(sites, 3, Script("topk(ratio=0.3)", (event,), between="load", folder=str(tmp_path)))
    ends = all_ended(processes, *(KILLED if site == event.site else RAISED for site in range(3)))
    reports = [ends[site].rows[0] for site in range(3) if site != event.site]
    assert reports[0]["weights"] == reports[1]["weights"]
    for first, then in (report["errors"] for report in reports):
        assert re.search(rf"worker {event.site}: .*{tmp_path}.*\[E-PEER-LOST\]$", first)
        assert then.endswith("[E-PEER-LOST]"), "no site trains with half a save"
    assert one_save(tmp_path) == (3, 4)
