"""On the module path, this makes Python processes lack what only Linux has, from the first import of commlayer on: names in the
standard library, and the files of /proc and /sys. torch, which was built for Linux, is imported before."""

from __future__ import annotations

import importlib.abc
import os
import sys
from pathlib import Path
from typing import Any

LINUX = {"socket": ("TCP_USER_TIMEOUT", "TCP_INFO", "TCP_CONGESTION", "TCP_KEEPIDLE", "MSG_NOSIGNAL", "SO_BINDTODEVICE"),
         "os": ("sched_getaffinity", "memfd_create", "eventfd", "sched_setaffinity")}
FILES = ("/proc", "/sys", "/dev/shm")


class OtherSystem(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name == "commlayer" and self in sys.meta_path:
            sys.meta_path.remove(self)
            become()


def become() -> None:
    import asyncio  # noqa: F401  (these read the platform when they are imported)
    import multiprocessing.connection  # noqa: F401
    import socket
    import sysconfig

    import torch
    import torch.distributed  # noqa: F401

    sysconfig.get_config_vars()
    socket.TCP_KEEPALIVE = socket.TCP_KEEPIDLE  # type: ignore[attr-defined]  # its name on macOS
    for module, names in LINUX.items():
        for name in names:
            if hasattr(sys.modules[module], name):
                delattr(sys.modules[module], name)
    for name in ("read_text", "read_bytes", "exists", "iterdir", "write_text", "stat"):
        setattr(Path, name, _hiding(getattr(Path, name)))
    for name in ("listdir", "readlink"):
        setattr(os, name, _hiding(getattr(os, name)))
    sys.platform = "darwin"


def _hiding(known: Any) -> Any:
    def call(path: Any = ".", *args: Any, **named: Any) -> Any:
        if str(path).startswith(FILES):
            if known.__name__ == "exists":
                return False
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return known(path, *args, **named)

    return call


sys.meta_path.insert(0, OtherSystem())
