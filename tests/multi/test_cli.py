"""The command line: help, completion, one-line errors and exit codes; profiles; a coordinator until the end of its job."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.coordinators import ROOT, WAIT_S, Failures, quick
from torch import nn

from commlayer.autotune.measure.step_times import timed_job
from commlayer.cluster.calls import messages
from commlayer.cluster.membership import client

COMMAND = [sys.executable, "-m", "commlayer.cli.main"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")} | {"COMMLAYER_CONFIG": ""}
VERSION = importlib.metadata.version("commlayer")
LOOK = ("import sys; from commlayer.cli import main; sys.argv = ['commlayer', *{}]\n"
        "try: main.run()\nexcept SystemExit as end: code = end.code\n"
        "print(code, sorted({{'numpy', 'torch', 'grpc', 'skopt'}} & set(sys.modules)))")


def call(*command: str, cwd: Path = ROOT, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=WAIT_S, cwd=cwd,
                          env=CLEAN | settings)


@pytest.mark.parametrize(("arguments", "shown"), [
    (["--version"], f"commlayer {VERSION}"), (["serve", "--help"], "--no-server"), (["tune", "--help"], "proxy runs"),
])
def test_version_and_help_import_no_large_package(arguments: list[str], shown: str) -> None:
    done = call("-c", LOOK.format(arguments))
    assert shown in done.stdout
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "--parent" not in done.stdout, "an option for embedded servers only"


def test_python_m_and_the_package_have_the_version() -> None:
    assert call("-m", "commlayer", "--version").stdout == f"commlayer {VERSION}\n"
    assert call("-c", "import commlayer; print(commlayer.__version__)").stdout == f"{VERSION}\n"


def test_shells_complete_commands() -> None:
    for typed, offered in (("commlayer pl", {"plan"}), ("commlayer plan ", {"create", "explain", "diff"})):
        word = str(typed.count(" "))
        done = call("-m", "commlayer", _COMMLAYER_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=word)
        assert offered <= set(done.stdout.split()), done.stderr
        assert "serve" not in done.stdout
    shown = call("-m", "commlayer", "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default -F _commlayer_completion commlayer" in shown.stdout, shown.stderr


def test_bayesian_search_without_scikit_optimize_is_one_line(
    commlayer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "skopt", None)
    code, _, errors = commlayer("tune", "digits")
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.endswith("[E-PACKAGE]\n")
    assert not list(tmp_path.iterdir())


MODEL = '''
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    x = torch.randn(16, 64)
    return model, lambda: model(x).square().mean()

def wrong():
    return 3

def shapes():
    model = nn.Linear(4, 4)
    return model, lambda: model(torch.ones(2, 5)).sum()

def silent():
    return nn.Linear(4, 4), lambda: None

def several():
    model = nn.Linear(4, 4)
    return model, lambda: model(torch.ones(2, 4))
'''
MISTAKES = [
    ("serve --no-server --port 99999", "E-SETTING", "port: got 99999 from argument port"),
    ("serve --no-server --bind 0.0.0.0", "E-PLAIN-TEXT", "bind: 0.0.0.0"),
    ("serve --no-server --bind 0.0.0.0 --insecure", "E-SETTING", "bind: 0.0.0.0"),
    ("serve --bind 127.0.0.1:abc", "E-ADDRESS", "--bind: got '127.0.0.1:abc'"),
    ("serve --advertise 127.0.0.1:0", "E-ADDRESS", "advertise: got '127.0.0.1:0'"),
    ("COMMLAYER_INSECURE=1 COMMLAYER_CARRIER=tcp serve --advertise 127.0.0.1:9000", "E-SETTING",
     "advertise: 127.0.0.1:9000 is one port"),
    ("serve --advertise 127.0.0.1:9000", "E-PLAIN-TEXT", "advertise: 127.0.0.1 is the end of a tunnel"),
    ("serve --bind 127.0.0.1:7000 --port 7001", "E-CLI-OPTION", "--bind 127.0.0.1:7000"),
    ("serve --join nowhere", "E-ADDRESS", "join: got 'nowhere'"),
    ("serve --join 127.0.0.1:7000 --no-server", "E-CLI-OPTION", "--no-server with --join 127.0.0.1:7000"),
    ("serve --join 127.0.0.1:7000", "E-SECRET", "--join 127.0.0.1:7000"),
    ("COMMLAYER_TOKEN_FILE=/nonexistent serve", "E-SETTING", "token_file: /nonexistent "),
    ("serve --servers 0", "E-CLI-OPTION", "--servers 0"),
    ("serve --invite 'a b'", "E-CLI-OPTION", "node name: got 'a b'"),
    ("serve --invite a,server", "E-CLI-OPTION", "the name 'server'"),
    ("serve --invite a --join 127.0.0.1:7000", "E-CLI-OPTION", "--invite needs the CA's own keys (--dir), but join"),
    ("serve --invite a --dir /proc/none", "E-KEYS", "/proc/none cannot be created"),
    ("serve --bind 10.0.0.1 --workers 2 --join 10.0.0.2:7000", "E-PLAIN-TEXT", "bind: 10.0.0.1"),
    ("keys invite a --dir /proc/none", "E-CLI-OPTION", "no server has run with this CA yet"),
    ("keys invite a --address 10.0.0.1", "E-ADDRESS", "got '10.0.0.1'"),
    ("keys invite a --address 10.0.0.1:7000", "E-KEYS", "keys contains no CA"),
    ("join home-1@10.0.0.1:7000#short mine.py", "E-INVITATION", "token after '#'"),
    ("join --keys k home-1@10.0.0.1:7000 mine.py", "E-CLI-OPTION", "--keys k and the home's name home-1"),
    ("doctor --join nobody@10.0.0.1:7000", "E-INVITATION", "nobody has no keys"),
    ("serve --port 65535", "E-SETTING", "--port 65535"),
    ("COMMLAYER_HEARTBEAT_S=soon serve --no-server", "E-SETTING", "heartbeat_s: got 'soon' "),
    ("COMMLAYER_CONFIG=/nonexistent.toml serve --no-server", "E-SETTING", "COMMLAYER_CONFIG: /nonexistent.toml "),
    ("join 127.0.0.1 mine.py", "E-ADDRESS", "join: got '127.0.0.1'"),
    ("join 127.0.0.1:7000 mine.py", "E-SECRET", "joining 127.0.0.1:7000"),
    ("COMMLAYER_TOKEN=a-good-secret join 127.0.0.1:7000 no-such.py", "E-CLI-OPTION", "no-such.py: "),
    ("profile none.py", "E-USER-CODE", "none.py: "),
    ("profile mine.py:absent", "E-USER-CODE", "mine.py:absent: "),
    ("profile mine.py:wrong", "E-USER-CODE", "mine.py:wrong: "),
    ("profile mine.py:shapes", "E-USER-CODE", "mine.py:shapes: a step: RuntimeError: mat1"),
    ("profile mine.py:silent", "E-USER-CODE", "mine.py:silent: a step: the loss is of type NoneType"),
    ("profile mine.py:several", "E-USER-CODE", "mine.py:several: a step: the loss is a Tensor of 8"),
    ("profile mine", "E-USER-CODE", "mine: allowed are FILE.py, FILE.py:FUNCTION and MODULE:FUNCTION"),
    ("profile --batch 8", "E-CLI-OPTION", "--batch "),
    ("profile --out none/p.json", "E-CLI-OPTION", "none/p.json: the folder "),
    ("profile --codec 'topq()'", "E-CODEC-NAME", "codec 'topq()': 'topq' is unknown"),
    ("demo --homes 1", "E-CLI-OPTION", "--homes: got "),
    ("demo --homes 9", "E-CLI-OPTION", "--homes: got "),
    ("demo --links fast", "E-LINK-NAME", "--links"), ("demo --seconds 9", "E-CLI-OPTION", "--seconds: got "),
    ("demo --png /nonexistent/demo.png", "E-CLI-OPTION", "--png /nonexistent/demo.png"),
    ("demo --json /nonexistent/demo.json", "E-CLI-OPTION", "--json /nonexistent/demo.json"),
    ("demo --json /", "E-CLI-OPTION", "--json /"),
    ("tune nothing.py", "E-USER-CODE", "nothing.py: "), ("tune nothing", "E-USER-CODE", "nothing: "),
    ("tune no.such:f", "E-USER-CODE", "no.such:f: "), ("tune math:tau", "E-USER-CODE", "math:tau: "),
    ("tune broken.py", "E-USER-CODE", "broken.py: ModuleNotFoundError: "),
    ("tune digits --trials 0", "E-CLI-OPTION", "--trials: got "),
    ("tune digits --budget 0", "E-CLI-OPTION", "--budget 0: "),
    ("tune digits --budget 2", "E-CLI-OPTION", "--budget 2: "), ("tune digits --budget 0%", "E-CLI-OPTION", "--budget 0%: "),
    ("tune digits --ratio 5", "E-CLI-OPTION", "--ratio '5': "),
    ("tune digits --method guess", "E-CLI-OPTION", "--method 'guess': "),
    ("tune digits --ratio 0.1:0.01", "E-TUNE-ARGUMENT", "ratio: got 0.1 to 0.01"),
    ("tune digits --batches 64,x", "E-CLI-OPTION", "--batches '64,x': "),
    ("tune digits --local-steps 1,0", "E-CLI-OPTION", "--local-steps '1,0': "),
    ("tune digits --codec 'best()'", "E-CODEC-NAME", "--codec: "),
    ("tune digits --out /nowhere/loss.json", "E-CLI-OPTION", "/nowhere/loss.json: "),
]
"""A line, the code of its error, and how that begins."""


@pytest.mark.parametrize(("line", "error", "begins"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_user_error_is_one_line_with_exit_code_2_and_writes_nothing(
    line: str, error: str, begins: str, commlayer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    words = shlex.split(line)
    settings = {"COMMLAYER_CONFIG": ""} | dict(word.split("=", 1) for word in words if word.startswith("COMMLAYER_"))
    for name in [name for name in os.environ if name.startswith("COMMLAYER_")]:
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    code, _, errors = commlayer(*(word for word in words if word not in {f"{k}={v}" for k, v in settings.items()}))
    assert code == 2
    assert errors.startswith(f"commlayer: {begins}")
    assert errors.endswith(f"[{error}]\n")
    assert errors.count("\n") == 1
    assert {file.name for file in tmp_path.iterdir()} <= {"mine.py", "broken.py", "__pycache__"}


def test_unknown_option_or_command_exits_with_2(commlayer: Any) -> None:
    for arguments in (("serve", "--prt", "1"), ("serv",)):
        code, _, errors = commlayer(*arguments)
        assert code == 2
        assert "No such" in errors
        assert "Traceback" not in errors


def test_measured_profile_can_be_planned_with(commlayer: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    code, out, errors = commlayer("profile", "mine.py", "--codec", "identity()", "--codec", "topk(ratio=0.01)", "--batch", "16")
    assert code == 0, errors
    for text in ("4 tensors", " topk(ratio=0.01, values='int8', exact=False) "):
        assert text in out
    profile, job = (json.loads((tmp_path / name).read_text()) for name in ("profile.json", "job.json"))
    assert [c["codec"] for c in profile["codecs"]] == ["identity()", "topk(ratio=0.01, values='int8', exact=False)"]
    assert profile["codecs"][1]["task_loss"] is None, "what it costs in quality is not measured here"
    assert job["batch"] == 16
    assert len(job["timing"]["ready_s"]) == 4
    arguments = ("create", "job.json", "--profile", "profile.json", "--nodes", "3xcpu@20/5Mb", "--sync", "step")
    for more in ((), ("--codec", "topk(ratio=0.01)", "--codec", "identity()")):
        code, _, errors = commlayer("plan", *arguments, *more)
        assert code == 0, errors
        assert "topk" in (tmp_path / "plan.json").read_text()
    assert profile["bucket_s"] > 0


def test_profiled_times_follow_the_layers() -> None:
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    x = torch.randn(64, 200)
    timing = timed_job(model, lambda: model(x).square().mean(), batch=64).timing
    assert timing is not None
    weights = range(0, 12, 2)
    assert [*weights] == sorted(weights, key=lambda t: timing.needed_s[t]), "the first layer is read first"
    assert [*weights] == sorted(weights, key=lambda t: -timing.ready_s[t]), "and its gradient is made last"
    assert max(timing.ready_s) <= timing.backward_s


@pytest.fixture
def served() -> Iterator[Any]:
    """Starts `commlayer serve` with these arguments; its process and its first output line."""
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


def test_client_keys_cannot_serve_and_no_join_line_is_printed(commlayer: Any, tmp_path: Path) -> None:
    authority = pytest.importorskip("commlayer.cluster.keys.authority", reason="cryptography is not installed")
    authority.init(tmp_path / "keys")
    folder = authority.add(tmp_path / "keys", "anna", dials_only=True)
    code, out, errors = commlayer("serve", "--no-server", "--keys", str(folder))
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"commlayer: keys: anna in {folder} ")
    assert "--dials-only" in errors
    assert errors.endswith("[E-KEYS]\n")


def test_failed_server_start_is_one_line_and_consumes_no_invitation(served: Any, commlayer: Any, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    options = ["--no-server", "--invite", "home-1", "--dir", str(tmp_path / "keys")]
    _, lines = served("--no-server")
    for wrong, begins in ((["--port", lines["control"].rpartition(":")[2]], f"{lines['control']} is in use"),
                          (["--page", "0.0.0.0:1"], "--page 0.0.0.0:")):
        code, _, errors = commlayer("serve", *options, *wrong)
        assert code == 2
        assert errors.splitlines()[-1].startswith(f"commlayer: {begins}"), errors
    process, _ = served(*options)
    assert any("commlayer join home-1@127.0.0.1:" in line and "#" in line for line in itertools.islice(process.stderr, 4))


def test_coordinator_serves_jobs_until_one_has_not_failed(served: Any) -> None:
    process, lines = served("--no-server", "--workers", "1")
    assert lines["data"] == ""
    for reason, code in (("an error", None), (messages.FINISHED, 0)):
        member = client.join(lines["control"], messages.worker_request("job", 0, 0, plan=b"p"), quick(token=lines["token"]),
                             Failures())
        assert process.poll() is None
        member.leave(reason)
        if code is not None:
            assert process.wait(WAIT_S) == code
    assert "the job failed (worker 0: left the job: an error)" in process.stderr.read()


@pytest.mark.nightly
def test_next_job_is_served_after_an_unsupported_plan(served: Any) -> None:
    """Also if the worker leaves before the server has tried the plan."""
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


def test_serve_reads_settings_from_the_environment_and_prints_no_given_secret(served: Any) -> None:
    process, lines = served("--no-server", "--workers", "1", COMMLAYER_TOKEN="a-secret-of-ours", COMMLAYER_BIND="127.0.0.3",
                            COMMLAYER_ADVERTISE="127.0.0.4", COMMLAYER_BACKEND="fallback")
    assert set(lines) == {"control", "data"}
    advertised, _, port = lines["control"].partition(":")
    assert advertised == "127.0.0.4"
    request = messages.worker_request("job", 0, 1)
    client.join(f"127.0.0.3:{port}", request, quick(token="a-secret-of-ours"), Failures()).leave()
    assert process.wait(WAIT_S) == 0
    assert "a-secret-of-ours" not in process.stderr.read()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_serve_ends_on_request(served: Any, sent: signal.Signals, code: int) -> None:
    process, _ = served("--no-server")
    process.send_signal(sent)
    assert process.wait(WAIT_S) == code
    assert "Traceback" not in process.stderr.read()


IN_A_LOCK = """
import os, signal, threading
from commlayer.cluster.servers.server_process import on_signal
end = threading.Event()
on_signal(signal.SIGTERM, end.set, 15.0)
with end._cond:  # as within end.wait(), for a moment
    os.kill(os.getpid(), signal.SIGTERM)
    end.is_set()
print(end.wait(10.0))
"""


def test_serve_ends_on_request_at_any_point_of_the_main_thread() -> None:
    for before in ("", "import sys; sys.stderr = None\n"):  # also where it cannot log why it waits
        done = call("-c", before + IN_A_LOCK)
        assert (done.stdout, done.stderr) == ("True\n", "")
