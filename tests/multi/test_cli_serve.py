"""The command line as a user meets it: help, one-line errors, exit codes, and a coordinator served to the end of its job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.coordinators import ROOT, WAIT_S, Failures, quick

from commlayer.cluster import client, messages

COMMAND = [sys.executable, "-m", "commlayer.cli.main"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")} | {"COMMLAYER_CONFIG": ""}


def ended(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT, env=CLEAN | environ)


@pytest.fixture
def served() -> Iterator[Any]:
    """Starts `commlayer serve` with these arguments; its process and what it said first."""
    processes: list[subprocess.Popen[str]] = []

    def serve(*arguments: str, **environ: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
        process = subprocess.Popen([*COMMAND, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, cwd=ROOT, env=CLEAN | environ)
        processes.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    yield serve
    for process in processes:
        process.kill()
        process.communicate(timeout=WAIT_S)


def test_help_loads_neither_torch_nor_grpc() -> None:
    look = ("import sys; sys.argv = ['commlayer', 'serve', '--help']\n"
            "from commlayer.cli.main import run\n"
            "try: run()\n"
            "except SystemExit as end: print(end.code, sorted({'torch', 'grpc', 'numpy'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "--no-server" in done.stdout
    assert "--parent" not in done.stdout, "an option for embedded servers only"


MISTAKES = [
    (("serve", "--no-server", "--port", "99999"), {}, "E-SETTING", "port: got 99999 from argument port"),
    (("serve", "--no-server", "--bind", "0.0.0.0"), {}, "E-PLAIN-TEXT", "bind: 0.0.0.0"),
    (("serve", "--no-server", "--bind", "0.0.0.0", "--insecure"), {}, "E-SETTING", "bind: 0.0.0.0"),
    (("serve", "--bind", "127.0.0.1:abc"), {}, "E-ADDRESS", "--bind: got '127.0.0.1:abc'"),
    (("serve", "--bind", "127.0.0.1:7000", "--port", "7001"), {}, "E-CLI-OPTION", "--bind 127.0.0.1:7000 beside --port 7001"),
    (("join", "127.0.0.1", "train.py"), {}, "E-ADDRESS", "join: got '127.0.0.1'"),
    (("join", "127.0.0.1:7000", "train.py"), {}, "E-SECRET", "joining 127.0.0.1:7000"),
    (("join", "127.0.0.1:7000", "no-such.py"), {"COMMLAYER_TOKEN": "a-good-secret"}, "E-CLI-OPTION",
     "no-such.py: "),
    (("serve", "--join", "nowhere"), {}, "E-ADDRESS", "join: got 'nowhere'"),
    (("serve", "--join", "127.0.0.1:7000", "--no-server"), {}, "E-CLI-OPTION", "--no-server with --join 127.0.0.1:7000"),
    (("serve", "--join", "127.0.0.1:7000"), {}, "E-SECRET", "--join 127.0.0.1:7000"),
    (("serve",), {"COMMLAYER_TOKEN_FILE": "/nonexistent"}, "E-SETTING", "token_file: /nonexistent "),
    (("serve", "--servers", "0"), {}, "E-CLI-OPTION", "--servers 0"),
    (("serve", "--port", "65535"), {}, "E-SETTING", "--port 65535"),
    (("serve", "--no-server"), {"COMMLAYER_HEARTBEAT_S": "soon"}, "E-SETTING", "heartbeat_s: got 'soon' "),
    (("serve", "--no-server"), {"COMMLAYER_CONFIG": "/nonexistent.toml"}, "E-SETTING",
     "COMMLAYER_CONFIG: /nonexistent.toml "),
]


@pytest.mark.commit(4)
@pytest.mark.parametrize(("arguments", "environ", "code", "line"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], environ: dict[str, str], code: str, line: str,
) -> None:
    done = ended(*arguments, **environ)
    assert done.returncode == 2
    assert done.stderr.startswith(f"commlayer: {line}")
    assert done.stderr.endswith(f"[{code}]\n")
    assert done.stderr.count("\n") == 1


def test_an_unknown_option_or_command_is_exit_code_2() -> None:
    for arguments in (("serve", "--prt", "1"), ("serv",)):
        done = ended(*arguments)
        assert done.returncode == 2
        assert "No such" in done.stderr
        assert "Traceback" not in done.stderr


def test_keys_that_only_dial_serve_nothing_and_no_line_is_printed_to_copy(tmp_path: Path) -> None:
    authority = pytest.importorskip("commlayer.cluster.authority", reason="cryptography is not installed")
    authority.init(tmp_path / "keys")
    folder = authority.add(tmp_path / "keys", "anna", dials_only=True)
    done = ended("serve", "--no-server", "--keys", str(folder))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"commlayer: keys: anna in {folder} ")
    assert "--dials-only" in done.stderr
    assert done.stderr.endswith("[E-KEYS]\n")


def test_a_port_in_use_is_one_line(served: Any) -> None:
    _, lines = served("--no-server")
    done = ended("serve", "--no-server", "--port", lines["control"].rpartition(":")[2])
    assert done.returncode == 2
    assert done.stderr.startswith(f"commlayer: {lines['control']} is in use")
    assert done.stderr.endswith("[E-ADDRESS]\n")


def test_a_coordinator_serves_a_job_to_its_end(served: Any) -> None:
    process, lines = served("--no-server", "--workers", "1")
    assert lines["data"] == ""
    request = messages.worker_request("job", 0, 0, plan=b"p")
    member = client.join(lines["control"], request, quick(token=lines["token"]), Failures())
    assert process.poll() is None
    member.leave()
    assert process.wait(WAIT_S) == 0


def test_after_a_job_that_failed_another_one_is_served_at_the_same_address(served: Any) -> None:
    process, lines = served("--no-server", "--workers", "1")
    for reason, code in (("an error", None), (messages.FINISHED, 0)):
        member = client.join(lines["control"], messages.worker_request("job", 0, 0, plan=b"p"), quick(token=lines["token"]),
                             Failures())
        member.leave(reason)
        if code is not None:
            assert process.wait(WAIT_S) == code
    assert "the job failed (worker 0: left the job: an error)" in process.stderr.read()


@pytest.mark.nightly
def test_after_a_plan_that_does_not_fit_another_job_is_served(served: Any) -> None:
    """Also if the worker has left before the server has tried the plan."""
    process, lines = served("--workers", "1")
    for leaves in (False, True):
        request = messages.worker_request("job", 0, 1, plan=b"no plan")
        member = client.join(lines["control"], request, quick(token=lines["token"]), Failures())
        if leaves:
            member.leave("an error")
        line = next(line for line in process.stderr if "the job failed" in line)
        assert leaves or "(plan of worker 0: " in line
        member.close()
    process.terminate()
    assert process.wait(WAIT_S) == 0


def test_a_secret_that_was_given_is_not_told_again(served: Any) -> None:
    process, lines = served("--no-server", "--workers", "1", COMMLAYER_TOKEN="a-secret-of-ours")
    assert set(lines) == {"control", "data"}
    member = client.join(lines["control"], messages.worker_request("job", 0, 1), quick(token="a-secret-of-ours"), Failures())
    member.leave()
    assert process.wait(WAIT_S) == 0
    assert "a-secret-of-ours" not in process.stderr.read()


def test_settings_reach_serve_through_the_environment(served: Any) -> None:
    _, lines = served("--no-server", COMMLAYER_BIND="127.0.0.3", COMMLAYER_ADVERTISE="127.0.0.4", COMMLAYER_BACKEND="fallback")
    assert lines["control"].startswith("127.0.0.4:")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_it_ends_on_request(served: Any, sent: signal.Signals, code: int) -> None:
    process, _ = served("--no-server")
    process.send_signal(sent)
    assert process.wait(WAIT_S) == code
    assert "Traceback" not in process.stderr.read()


IN_A_LOCK = """
import os, signal, threading
from commlayer.cluster.server_process import on_signal
end = threading.Event()
on_signal(signal.SIGTERM, end.set, 15.0)
with end._cond:  # as within end.wait(), for a moment
    os.kill(os.getpid(), signal.SIGTERM)
    end.is_set()
print(end.wait(10.0))
"""


def test_it_does_so_wherever_the_main_thread_is() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_LOCK], capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("True\n", "")
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.stderr = None\n{IN_A_LOCK}"], capture_output=True, text=True,
                          timeout=WAIT_S, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("True\n", ""), "also where it cannot log why it waits"
