"""When tests in the lab can run."""

from __future__ import annotations

import os
import shutil

import pytest

needs_lab = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK) or not shutil.which("ip") or not shutil.which("c++"),
    reason="the WAN lab needs root, /dev/net/tun, iproute2 and a C++ compiler",
)
