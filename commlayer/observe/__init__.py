"""What happened: events, traces, drift. Knows values only; who measures and who predicts hand them in."""

from commlayer.observe.again import Again
from commlayer.observe.carried import Carried, Way
from commlayer.observe.drift import Drift
from commlayer.observe.events import Event, Recorder, Step
from commlayer.observe.links import Links, Rates, differ, spelled
from commlayer.observe.meter import Meter, counters_towards
from commlayer.observe.trace import compare, write_trace

__all__ = [
    "Again", "Carried", "Drift", "Event", "Links", "Meter", "Rates", "Recorder", "Step", "Way", "compare", "counters_towards",
    "differ", "spelled", "write_trace",
]
