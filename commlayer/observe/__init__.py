"""What happened: events, traces, drift. Knows values only; who measures and who predicts hand them in."""

from commlayer.observe.drift import Drift
from commlayer.observe.events import Event, Recorder, Step
from commlayer.observe.trace import compare, write_trace

__all__ = ["Drift", "Event", "Recorder", "Step", "compare", "write_trace"]
