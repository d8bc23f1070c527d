"""Short summaries of a plan for tables and logs."""

from __future__ import annotations

from commlayer.records import Plan


def way_of(made: Plan) -> str:
    """The plan's sync mode in a few words; empty for an exchange in every step."""
    parts = [f"H={made.local_steps}"] if made.local_steps > 1 else ["updates"] if made.codes == "updates" else []
    parts += [made.overlap] if made.overlap else []
    parts += [f"fragments={made.fragments}"] if made.fragments > 1 else []
    late = sum(b.numel for b in made.buckets if b.stale) / max(1, sum(b.numel for b in made.buckets))
    return " ".join([*parts, *([f"{late:.0%} late"] if late else [])])


def most_used(made: Plan) -> str:
    by: dict[str, int] = {}
    for bucket in made.buckets:
        name = bucket.codec + (f" down {bucket.down}" if bucket.down else "")
        by[name] = by.get(name, 0) + bucket.numel
    return max(by, key=by.__getitem__, default="")


def in_words(made: Plan) -> str:
    """
    >>> in_words(Plan("job", (), local_steps=4, step_s=0.02))
    '0 buckets, H=4, 20.0 ms a step predicted'
    """
    codec = f", mostly {most_used(made)}" if made.buckets else ""
    predicted = f"{1e3 * made.step_s:.1f} ms a step predicted" if made.step_s else ""
    return ", ".join(part for part in (f"{len(made.buckets)} buckets{codec}", way_of(made), predicted) if part)
