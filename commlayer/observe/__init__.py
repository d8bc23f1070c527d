"""Observability: events, traces, link monitoring, and comparison with predictions. Pure values; callers supply measurements."""

from commlayer.observe.deviation import STEP, Comparison, OpDeviation, Seen, rows_of
from commlayer.observe.events import EXCHANGE, NO_BUCKET, Event, RecordedStep, Recorder
from commlayer.observe.interface_counters import InterfaceCounters, counters_towards
from commlayer.observe.link_throughput import Direction, Throughput
from commlayer.observe.link_watch import LinkWatch, Rates, SeenStep, differ, slower, spelled
from commlayer.observe.prediction_check import PredictionCheck, StalePlan
from commlayer.observe.reprobe_schedule import ReprobeSchedule
from commlayer.observe.trace_file import by_lane, read_comparison, write_trace

__all__ = [
    "EXCHANGE",
    "NO_BUCKET",
    "STEP",
    "Comparison",
    "Direction",
    "Event",
    "InterfaceCounters",
    "LinkWatch",
    "OpDeviation",
    "PredictionCheck",
    "Rates",
    "RecordedStep",
    "Recorder",
    "ReprobeSchedule",
    "Seen",
    "SeenStep",
    "StalePlan",
    "Throughput",
    "by_lane",
    "counters_towards",
    "differ",
    "read_comparison",
    "rows_of",
    "slower",
    "spelled",
    "write_trace",
]
