"""What happened: events, traces, drift. Knows values only; who measures and who predicts hand them in."""

from commlayer.observe.deviation import STEP, Comparison, Row, Seen, rows_of
from commlayer.observe.drift import Drift, Stale
from commlayer.observe.events import EXCHANGE, NO_BUCKET, Event, Recorder, Step
from commlayer.observe.trace import by_lane, read_comparison, write_trace

__all__ = [
    "EXCHANGE", "NO_BUCKET", "STEP", "Comparison", "Drift", "Event", "Recorder", "Row", "Seen", "Stale", "Step", "by_lane",
    "read_comparison", "rows_of", "write_trace",
]
