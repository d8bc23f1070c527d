"""The plan of the first steps, as pure functions.

Before the first step only the links are known, not how long a step computes. Over far links, training begins with overlapped
local steps, as few as the links allow. They wait for no exchange if computing takes STEP_S. If an exchange takes less than
SHORT_S, gradients are averaged instead, and results arrive during the next forward pass. Over near links, which are mostly
fast, training begins with compression only if it makes an exchange faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from msgspec import structs

from commlayer.compressors import parse
from commlayer.planner import default_plan
from commlayer.planner.buckets import most_fragments
from commlayer.planner.model import Link, Question
from commlayer.planner.simulation import step_seconds
from commlayer.records import MAX_BUCKET_NBYTES, Job, Plan, Timing

FAR_S = 0.005
"""Links with a round trip of at least this many seconds are far. Nearer links are rarely slow."""
STEP_S, SHORT_S = 0.6, 0.1
"""Assumed seconds of a step's computing, which is not known yet. Exchanges shorter than SHORT_S cost less than local steps."""
EVERY = (1, 2, 4, 8, 16, 32)
"""Possible numbers of local steps. Many bring less progress."""
LEAST_FRAGMENTS = 2
"""Minimum number of fragments of two local steps or more. If there are more fragments, one is exchanged every two steps."""


def exchange_s(plan: Plan, links: Sequence[Link]) -> float:
    """Returns the seconds of one exchange over the slowest link, if the link sends first and receives afterwards."""
    up, down = (8.0 * sum(parse(codec).bound(b.spec) for b in plan.buckets if (codec := getattr(b, name) or b.codec))
                for name in ("codec", "down"))
    return max(up / link.up_bps + down / link.down_bps + 4 * link.alpha_s for link in links)


def opening_plan(job: Job, plan: Plan, links: Sequence[Link], *, forward: bool) -> Plan | None:
    """Returns a plan of overlapped local steps with the codecs of `plan`. If exchanges over these links are fast, returns
    `plan` with results during the next forward pass; None if the job does not allow that (`forward`)."""
    took_s = exchange_s(plan, links)
    if took_s < SHORT_S:
        return structs.replace(plan, overlap="forward") if forward else None
    every = next((every for every in EVERY if every * STEP_S >= took_s), EVERY[-1])
    largest, fragments = max(plan.buckets, key=attrgetter("numel")), min(every, max(LEAST_FRAGMENTS, every // 2))
    layout = default_plan(job, codec=largest.codec, down=largest.down, path="service", servers=plan.servers,
                          ranks_per_node=plan.ranks_per_node, fuse_nbytes=MAX_BUCKET_NBYTES, cut_nbytes=MAX_BUCKET_NBYTES,
                          fragments=fragments)
    return structs.replace(layout, hosts=plan.hosts, ratio_over=plan.ratio_over, local_steps=every, overlap="round",
                           codes="updates", fragments=most_fragments(fragments, every, len(layout.buckets)))


def is_no_slower(plain: Plan, plan: Plan, inputs: Question) -> bool:
    """Returns whether an exchange under `plain` takes at most as long as under `plan`. Computing time, which is not known yet,
    counts as none. It would hide the exchange's time, but not the codecs' work on the CPU."""
    none = (0.0,) * len(inputs.job.tensors)
    exchange = inputs._replace(job=structs.replace(inputs.job, timing=Timing(none, none, 0.0, 0.0)))
    return step_seconds(plain, exchange) <= step_seconds(plan, exchange)
