"""Tests in the lab: when they can run, and small programs that run on its hosts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from bench.lab import Lab

needs_lab = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK) or not shutil.which("ip") or not shutil.which("c++"),
    reason="the WAN lab needs root, /dev/net/tun, iproute2 and a C++ compiler",
)

RECEIVE = """
import hashlib, socket
listener = socket.create_server(("", 7000))
print("listening", flush=True)
connection, _ = listener.accept()
sha, nbytes = hashlib.sha256(), 0
while data := connection.recv(1 << 16):
    sha.update(data)
    nbytes += len(data)
print(nbytes, sha.hexdigest(), flush=True)
"""

SEND = """
import hashlib, random, socket, sys
data = random.Random(5).randbytes(int(sys.argv[2]))
print(hashlib.sha256(data).hexdigest(), flush=True)
with socket.create_connection((sys.argv[1], 7000), 10) as connection:
    connection.settimeout(60)
    connection.sendall(data)
"""


def python(lab: Lab, host: int, program: str, *args: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", "-c", program, *map(str, args)]
    return lab.popen(host, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def transfer(lab: Lab, src: int, dst: int, nbytes: int) -> tuple[str, str]:
    """Sends nbytes over TCP; what was sent and what was received, each as "nbytes digest"."""
    receiver = python(lab, dst, RECEIVE)
    assert receiver.stdout
    assert receiver.stdout.readline() == "listening\n"
    sender = python(lab, src, SEND, lab.addresses[dst], nbytes)
    sent, sender_errors = sender.communicate(timeout=60)
    got, receiver_errors = receiver.communicate(timeout=60)
    assert not sender_errors + receiver_errors
    return f"{nbytes} {sent.strip()}", got.strip()


TOKEN = "a-job's-secret"


def next_line(process: subprocess.Popen[str]) -> Any:
    """The next line of JSON that the process prints."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())
