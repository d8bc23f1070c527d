"""Lets this worker join a running job: registers, waits until the others reach a step, and receives their state.

regroup.py is the other side. Until this worker has its complete state, the others can continue as if it had not come.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch

from commlayer.cluster import messages
from commlayer.cluster.collectives import Groups, RowChannel
from commlayer.cluster.epoch_change import wire_generation
from commlayer.cluster.process_groups import Members
from commlayer.cluster.uplink import Uplink
from commlayer.config import Config, judged_s, reconnect_window_s
from commlayer.engine.agreement import AWAY, Word
from commlayer.engine.connection import Connection, Joined
from commlayer.engine.regroup import Regrouping, new_world
from commlayer.engine.replica import Replica
from commlayer.engine.state_relay import Relay
from commlayer.engine.view_words import Newer, ViewWords
from commlayer.errors import CommError, DeadlineExceeded, PeerLost
from commlayer.records import Job, View

log = logging.getLogger("commlayer")


def enter(
    made: Connection, job: Job, device: torch.device, replica: Replica, request: messages.Join, config: Config, home: str,
    check: Callable[..., None],
) -> None:
    """Returns as a member, in the step in which all others are. `check`: ValueError for a plan that cannot run with that many
    `workers`."""
    made.groups = Groups(1, config.deadline_s, device, Members())
    made.rows = RowChannel(made.groups.members, config.deadline_s)
    made.on_close.append(made.rows.close)
    made.uplink = link = Uplink(config)
    link.join(config.join, request)
    words = ViewWords(link.view, made.waits.notice_s, reconnect_window_s(config))

    def offer(view: View) -> None:
        words.newest = view

    link.subscribe_epochs(offer)
    log.warning("joins a job that runs, as worker %d: waits for the others to come to a step", made.id)
    begin, dialled = time.monotonic(), False
    while True:
        view = words.newest
        try:
            _check_givers(view, made.id, link)
            try:
                ready = words.tell(view, "ready", made.id, Word(-1, 1.0), time.monotonic() + config.deadline_s)
            except DeadlineExceeded:
                # Their plan defines how long an exchange takes; the coordinator reports members that have died.
                log.warning("waits for the others still, %.0f s so far: under local steps it is let in at an exchange that is "
                            "due, and a script that drains more often than rounds end leaves none", time.monotonic() - begin)
                continue
            if AWAY in ready:
                raise CommError("members were lost while the job was saving, changing plans or being drained, and nobody is "
                                "taken in there: run the same command again", code="E-JOIN-MISSED")
            if not dialled:  # servers know this worker now
                link.dial(time.monotonic() + config.join_deadline_s)
                dialled = True
            fits = functools.partial(check, workers=len(view.members))
            given, plan, local, restore = Relay(words, view, made.id, Word(-1, 1.0), config.deadline_s, judged_s(config)).take(
                functools.partial(replica.take, check=fits))
            break
        except Newer:
            continue
    made.uplink.switch_view(view)
    new_world(made, config, home, view)
    made.plan, made.terms.auto, made.matched = plan, given.automatic, given.matched
    made.joined, made.fresh = Joined(local, restore, dict(given.followed)), True
    made.passes = given.passes - int(plan.steps_locally)  # local steps count at the end of their backward pass
    made.entered = given.carried
    worker = made.worker_for(plan, job, device, wire_generation(view))
    worker.step, worker.counters.exchanges = given.step, given.counted
    worker.units.regroup(sum(word.weight for word in ready))
    made.members = Regrouping(made, config, home)
    made.follow(worker)
    made.say(f"joined the running job as worker {made.id}, with weights, buffers and optimizer's state of its workers, "
             f"{time.monotonic() - begin:.1f} s after it had come; this is rank {made.rank} of {made.world}, in step "
             f"{made.passes}")


def _check_givers(view: View, mine: int, link: Uplink) -> None:
    """Raises if this worker was dropped, or if all members that have the state are gone."""
    link.check()
    ids = [m.rank for m in view.members]
    if mine not in ids:
        raise PeerLost("has gone on without this home", peer=f"coordinator {link.address}", code="E-JOIN-MISSED")
    if ids[0] == mine:
        raise CommError("the job ended before this home was taken in: no worker is left who has its weights",
                        code="E-JOIN-MISSED")
