"""The paper's four GPUs as lines."""

from __future__ import annotations

from commlayer.balance.time_models import Line

PAPER = [Line(slope_ms / 1e3, launch_ms / 1e3) for slope_ms, launch_ms in
         [(0.5931, 5.90), (0.5808, 7.15), (0.6023, 8.29), (2.6714, 50.98)]]
"""M40, GTX 1070, GTX 1070, GTX 750, from the paper's two tables."""
