"""Reports the power of this machine's GPUs, once a minute, on a thread of its own."""

from __future__ import annotations

import shutil
import subprocess
import threading

from commlayer.config import visible_gpus
from commlayer.observe.event_log import EventLog
from commlayer.observe.events import PowerEvent

EVERY_S = 60.0
ASK_S = 10.0
"""Seconds in which `nvidia-smi` must answer."""


def gpu_watts(program: str) -> float:
    """Watts of the GPUs that this process may use, as `nvidia-smi` reports them; 0: unknown."""
    command = [program, "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    if devices := visible_gpus():
        command += ["-i", devices]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
        return sum(map(float, done.stdout.split()))
    except (OSError, subprocess.SubprocessError, ValueError):  # such as [N/A]
        return 0.0


class PowerMeter:
    """Appends an event a minute until close(). Does nothing without `nvidia-smi`."""

    def __init__(self, events: EventLog) -> None:
        self._events, self._closing, self._program = events, threading.Event(), shutil.which("nvidia-smi")
        if self._program is not None:
            threading.Thread(target=self._run, args=(self._program,), name="commlayer-power", daemon=True).start()

    def _run(self, program: str) -> None:
        while True:
            self._events.append(PowerEvent(watts=gpu_watts(program)))
            if self._closing.wait(EVERY_S):
                return

    def close(self) -> None:
        self._closing.set()
