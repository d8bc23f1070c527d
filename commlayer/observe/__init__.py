"""What happened: events, traces, drift. Knows values only; who measures and who predicts hand them in."""

from commlayer.observe.again import Again
from commlayer.observe.carried import Carried, Way
from commlayer.observe.deviation import STEP, Comparison, Row, Seen, rows_of
from commlayer.observe.drift import Drift, Stale
from commlayer.observe.events import EXCHANGE, NO_BUCKET, Event, Recorder, Step
from commlayer.observe.links import Links, Rates, differ, spelled
from commlayer.observe.meter import Meter, counters_towards
from commlayer.observe.trace import by_lane, read_comparison, write_trace

__all__ = [
    "EXCHANGE", "NO_BUCKET", "STEP", "Again", "Carried", "Comparison", "Drift", "Event", "Links", "Meter", "Rates", "Recorder",
    "Row", "Seen", "Stale", "Step", "Way", "by_lane", "counters_towards", "differ", "read_comparison", "rows_of", "spelled",
    "write_trace",
]
