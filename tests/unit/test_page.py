"""The page of `commlayer serve --page`, its updates over HTTP, and the file of `commlayer report`."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from support.chromium import BROWSER, REASON, Browser
from support.coordinators import until
from support.event_stream import START, stream

from commlayer.errors import InvalidInput
from commlayer.observe import events
from commlayer.observe.event_log import EventLog
from commlayer.observe.events import Event, JobEvent, LogEvent, MemberEvent, StepEvent, WaitEvent
from commlayer.observe.pages import job_feed, web
from commlayer.observe.pages.job_feed import MAX_STREAMS, JobFeed
from commlayer.observe.pages.page import document, report
from commlayer.observe.pages.run_record import MOST_POINTS, RunRecord
from commlayer.observe.pages.web import Page, WebServer, read_token

TOKEN = read_token(b"the job's secret")


def log_of(found: Iterator[Event]) -> EventLog:
    log = EventLog(most=16384, most_nbytes=4 << 20, retains=True)
    for event in found:
        log.append(event)
    return log


class Served:
    """A page about a job, on loopback."""

    def __init__(self, log: EventLog, paused: Callable[[], bool] | None = None, **actions: Callable[[], None]) -> None:
        self.log, self.feed = log, JobFeed(log, paused)
        self._server = WebServer("127.0.0.1", 0, lambda: TOKEN, self.feed.pages, public=("/metrics",),
                                 actions={f"/{name}": act for name, act in actions.items()})
        self.address = self._server.address
        self.url = f"http://{self.address}/?token={TOKEN}"
        self.port = int(self.address.rpartition(":")[2])

    def close(self) -> None:
        self.feed.close()
        self._server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with closing(Served(log_of(stream()))) as page:
        yield page


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """For tests that leave no trace on the server."""
    with closing(Served(log_of(stream()))) as page:
        yield page


def fetched(address: str, path: str, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Updates:
    """One client of the updates."""

    def __init__(self, port: int, token: str = TOKEN) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self._connection.request("GET", f"/updates?token={token}")
        self._answer = self._connection.getresponse()
        self.status, self.kind = self._answer.status, self._answer.getheader("Content-Type")

    def next(self) -> dict[str, Any] | None:
        """None: the stream has ended."""
        line = self._answer.readline()
        if not line:
            return None
        assert line.startswith(b"data: ")
        assert self._answer.readline() == b"\n"
        update = json.loads(line[len(b"data: "):])
        assert isinstance(update, dict)
        return update

    def close(self) -> None:
        self._connection.close()


@pytest.mark.parametrize(("path", "header"), [
    ("/", ""), ("/?token=", ""), ("/?token=wrong", ""), (f"/?token={TOKEN[:-1]}", ""), ("/?token=%ff%00", ""), ("/", "wrong"),
    ("/updates", ""), ("/updates?token=wrong", ""), ("/absent", ""), (f"/?other={TOKEN}", ""), (f"/?token={TOKEN}x", "")])
def test_missing_token_gets_one_line_and_no_data(shared: Served, path: str, header: str) -> None:
    status, text = fetched(shared.address, path, header)
    assert status == 401
    assert text.count("\n") == 1
    assert "[E-SECRET]" in text
    assert "home-0" not in text
    assert TOKEN not in text


def test_token_is_read_from_the_address_or_a_header(shared: Served) -> None:
    assert fetched(shared.address, f"/?token={TOKEN}")[0] == 200
    assert fetched(shared.address, "/", TOKEN)[0] == 200
    assert fetched(shared.address, f"/absent?token={TOKEN}")[0] == 404
    assert fetched(shared.address, "/metrics")[0] == 200  # Prometheus on the same machine


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1:80", 200), ("localhost", 200), ("[::1]:80", 200), ("evil.example", 401), ("", 401), ("[", 401),
    ("127.0.0.1.evil.example:80", 401)])
def test_metrics_without_a_token_are_served_only_to_this_machine(shared: Served, host: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=10)
    connection.request("GET", "/metrics", headers={"Host": host})
    assert connection.getresponse().status == status
    connection.close()


def test_non_loopback_clients_need_the_token() -> None:
    assert "secret" not in TOKEN
    pages = {"/x": lambda: Page("text/plain", b"data")}
    with closing(WebServer("0.0.0.0", 0, lambda: TOKEN, pages, public=("/x",))) as server:
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        assert [fetched(address, "/x", given)[0] for given in ("", "wrong", TOKEN)] == [401, 401, 200]
        assert fetched(address, "/absent")[0] == 401


def test_server_without_a_token_refuses_all_clients() -> None:
    with closing(WebServer("127.0.0.1", 0, str, {"/x": lambda: Page("text/plain", b"data")})) as server:
        assert fetched(server.address, "/x?token=")[0] == 401


def test_other_methods_are_refused(shared: Served) -> None:
    for method in ("PUT", "DELETE", "OPTIONS"):
        connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=10)
        connection.request(method, f"/?token={TOKEN}", body=b"x")
        assert connection.getresponse().status == HTTPStatus.NOT_IMPLEMENTED
        connection.close()


@pytest.mark.parametrize(("method", "path", "header", "status"), [
    ("POST", "/pause", f"Bearer {TOKEN}", 200), ("POST", "/pause", "", 401), ("POST", f"/pause?token={TOKEN}", "", 401),
    ("POST", "/pause", "Bearer wrong", 401), ("POST", "/resume", f"Bearer {TOKEN}", 404),
    ("GET", "/pause", f"Bearer {TOKEN}", 404),
    ("GET", f"/pause?token={TOKEN}", "", 404), ("OPTIONS", "/pause", f"Bearer {TOKEN}", 501)])
def test_a_button_is_a_post_with_the_token_in_a_header(method: str, path: str, header: str, status: int) -> None:
    """A page of another site cannot send it: forms have no such header, and scripts ask first, by OPTIONS."""
    presses = list[int]()
    with closing(Served(log_of(stream()), pause=lambda: presses.append(1))) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
        connection.request(method, path, body=b"token=" + TOKEN.encode(), headers={"Authorization": header} if header else {})
        assert connection.getresponse().status == status
        connection.close()
    assert presses == [1] * (status == 200)


def test_used_port_is_one_error(shared: Served) -> None:
    with pytest.raises(InvalidInput) as refused:
        WebServer("127.0.0.1", shared.port, str, {})
    assert refused.value.code == "E-ADDRESS"


@pytest.mark.parametrize(("options", "code"), [
    (["--page", "nonsense"], "E-ADDRESS"), (["--page", "99999"], "E-ADDRESS"), (["--page", "0.0.0.0:0"], "E-ADDRESS"),
    (["--join", "127.0.0.1:9", "--page", "1"], "E-CLI-OPTION"), (["--join", "127.0.0.1:9", "--events", "x"], "E-CLI-OPTION"),
    (["--page", "0.0.0.0:1"], "E-PLAIN-TEXT"), (["--events", "/proc/none"], "E-EVENTS"),
])
def test_event_options_of_serve_fail_in_one_line(commlayer: Any, options: list[str], code: str,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_TOKEN", "a-secret-that-is-long-enough")
    status, _, error = commlayer("serve", *options)
    assert status == 2
    assert f"[{code}]" in error
    assert error.count("\n") == 1


def test_serve_prints_the_address_of_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "commlayer", "serve", "--workers", "2", "--page", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")}
    with (tmp_path / "log").open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment, cwd=tmp_path)
    try:
        found: list[str] = []

        def printed() -> bool:
            found[:] = re.findall(r"http://(\S+)/\?token=(\w+)", (tmp_path / "log").read_text())[0:1]
            return bool(found)

        until(printed, "the address is printed")
        address, token = found[0]
        assert fetched(address, "/")[0] == 401
        assert fetched(address, "/", token)[1].startswith("<!doctype html>")
        with closing(Updates(int(address.rpartition(":")[2]), token)) as client:
            until(lambda: "to join" in str(client.next()), "the page shows what the job waits for")
    finally:
        process.terminate()
        process.wait(60)


def test_metrics_use_the_clock_of_the_events() -> None:
    then = time.time() - 3600
    with closing(Served(EventLog(retains=True))) as served:
        served.feed.ahead_s = -3600.0
        for event in (JobEvent(time=then, run="r", world=2), StepEvent(time=then, rank=0, step=1),
                      WaitEvent(time=then, rank=0, names=("worker 1",), waited_s=1.0)):
            served.log.append(event)
        assert "commlayer_waiting_seconds" in fetched(served.address, "/metrics")[1], "the wait is a second old, not an hour"


def test_full_state_is_sent_first_and_then_updates(served: Served) -> None:
    with closing(Updates(served.port)) as client:
        assert (client.status, client.kind) == (200, "text/event-stream")
        first = client.next()
        assert first is not None
        (state,) = first["states"]
        assert first["whole"]
        assert [(worker["name"], worker["state"]) for worker in state["workers"]] == [
            ("home-0", "trains"), ("home-1", "dead"), ("home-2", "trains")]
        assert (state["step"], state["sent"], state["planned_s"], state["present"]) == (145, 74_000_000, 0.21, 2)
        assert len(first["points"]) > 20
        assert [kind for _, kind, _ in first["events"]][-2:] == ["warning", "dead"]
        now = time.time()
        served.log.append(StepEvent(time=now, rank=0, step=200, steps=5, step_s=0.5, exposed_s=0.25, sent_bytes=10))
        served.log.append(LogEvent(time=now, rank=0, level="error", text="something new"))
        until(lambda: (update := client.next()) is not None and not update["whole"]
              and [text for *_, text in update["events"]] == ["something new"]
              and update["states"][0]["step"] == 200 and len(update["points"]) == 1, "the update has the news once")


def test_final_state_is_sent_when_a_job_ends(served: Served) -> None:
    with closing(Updates(served.port)) as client:
        assert client.next() is not None
        served.log.append(MemberEvent(time=START + 40, member="worker 0", state="left"))
        served.log.append(MemberEvent(time=START + 40, member="worker 2", state="left"))
        closer = threading.Thread(target=served.feed.close)
        closer.start()
        updates = list(iter(client.next, None))
        closer.join()
        assert updates[-1]["states"][0]["over"]


def test_new_run_starts_new_curves(served: Served) -> None:
    with closing(Updates(served.port)) as client:
        assert client.next() is not None
        served.log.append(JobEvent(time=START + 60, run="another", world=1))
        served.log.append(StepEvent(time=START + 61, rank=0, step=1, step_s=1.0))
        until(lambda: (update := client.next()) is not None and update["whole"] and len(update["points"]) == 1
              and len(update["states"][0]["workers"]) == 1, "the page drops the curves of the former run")


def test_number_of_clients_is_bounded_and_slots_are_released(served: Served) -> None:
    clients = [Updates(served.port) for _ in range(MAX_STREAMS)]
    status, text = fetched(served.address, f"/updates?token={TOKEN}")
    assert (status, text.count("\n")) == (503, 1)
    assert all(client.next() for client in clients)
    clients.pop().close()

    def free() -> bool:
        with closing(Updates(served.port)) as client:
            return client.status == 200

    until(free, "the place of a client that has gone")
    for client in clients:
        client.close()


def test_slow_requests_do_not_block_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_S", 0.2)
    with closing(Served(log_of(stream()))) as page, ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", page.port), 10)) for _ in range(web.MAX_CONNECTIONS)]
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for each in slow:
                with suppress(OSError):
                    each.send(b"G")
            with suppress(OSError):
                if fetched(f"127.0.0.1:{page.port}", "/metrics")[0] == 200:
                    break
            time.sleep(0.1)
        assert time.monotonic() < until


def test_client_that_does_not_read_is_dropped_without_blocking_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web._Handler, "timeout", 0.5)
    monkeypatch.setattr(job_feed, "UPDATE_S", 0.005)
    with closing(Served(log_of(stream(64)))) as served, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", served.port))
        slow.sendall(f"GET /updates?token={TOKEN} HTTP/1.1\r\n\r\n".encode())
        until(lambda: served.feed._streams == 1, "the client has its place")
        with closing(Updates(served.port)) as client:
            def dropped() -> bool:
                assert client.next() is not None
                return served.feed._streams == 1

            until(dropped, "the client that does not read is dropped")


def test_content_policy_permits_only_the_content_of_the_file() -> None:
    page, policy = document()
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind in ("script", "style"):
        texts = re.findall(rb"<%b>(.*?)</%b>" % (kind.encode(), kind.encode()), page, re.DOTALL)
        assert len(texts) == 2
        assert rules[f"{kind}-src"].split() == [
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts]
    assert not re.search(rb"\b(src|href)=", page)
    assert b"innerHTML" not in page
    assert b"<!--" not in page.partition(b"<body>")[2].partition(b'<script id="data"')[0]


def test_headers_of_the_page(shared: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=10)
    connection.request("GET", f"/?token={TOKEN}")
    answer = connection.getresponse()
    assert "frame-ancestors 'none'" in str(answer.getheader("Content-Security-Policy"))
    assert answer.getheader("Referrer-Policy") == "no-referrer"
    assert answer.getheader("Cache-Control") == "no-store"
    connection.close()


def test_curves_are_bounded_and_keep_their_extremes() -> None:
    record = RunRecord()
    for second in range(5 * MOST_POINTS):
        record.apply(StepEvent(time=START + second, rank=0, step=second, step_s=9.0 if second == 777 else 0.5, exposed_s=0.1))
    points = record.curves.points
    assert MOST_POINTS / 2 <= len(points) < MOST_POINTS
    times = [point[0] for point in points]
    assert times == sorted(times)  # type: ignore[type-var]
    assert (points[0][0], points[-1][0]) < (START + 20, START + 5 * MOST_POINTS)
    assert max(point[2] or 0.0 for point in points) == 9.0


def data_of(page: bytes) -> Any:
    found = re.search(rb'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_report_has_the_final_table_the_curves_and_the_events() -> None:
    data = data_of(report(list(stream())))
    final = data["states"][-1]
    assert [(worker["name"], worker["state"], worker["step"]) for worker in final["workers"]] == [
        ("home-0", "trains", 145), ("home-1", "dead", 145), ("home-2", "trains", 145)]
    assert len(data["points"]) == 29  # one a second, and one when home-1 dies
    assert {kind for _, kind, _ in data["events"]} >= {"plan", "dead", "warning"}
    middle = next(state for state in data["states"] if state["time"] == START + 19)
    assert middle["waits"] == ["waiting for home-2, which sends no heartbeats, 10 of 60 s"]
    assert [worker["state"] for worker in middle["workers"]] == ["trains", "trains", "silent"]


def test_finished_run_keeps_its_last_numbers() -> None:
    ended = [MemberEvent(time=START + 50, member=f"worker {number}", state="left") for number in (0, 2)]
    data = data_of(report([*stream(), *ended]))
    final = data["states"][-1]
    assert final["over"]
    assert (final["step"], final["step_s"], final["loss"]) == (145, 0.23, pytest.approx(4 / 29, rel=1e-3))
    assert data["points"][-1][6] == final["loss"]
    together = list(stream(trouble=False))
    together += [MemberEvent(time=START + 50, member=f"worker {number}", state="left") for number in range(3)]
    points = data_of(report(together))["points"]
    assert len(points) == 29
    assert points[-1][7] == points[-2][7]  # of all workers, although they leave one after the other


@pytest.mark.parametrize("found", [
    [LogEvent(time=1e300, text="x")], [StepEvent(time=-1e300, rank=0, step_s=1e-320, sent_bytes=1 << 60)],
    [MemberEvent(member="worker x", name="\ud7ff"), JobEvent(time=5.0, run="a")],
    [StepEvent(time=1.0, rank=0, steps=-3, step_s=1e308, step=-(1 << 61), loss=-1e308, compute_s=-5.0)]])
def test_report_accepts_any_events(found: Sequence[Event]) -> None:
    assert data_of(report(found))["states"]


def test_text_of_members_is_escaped() -> None:
    name = "</script><script>alert(1)</script><!--"
    page = report([MemberEvent(time=START, member="worker 0", name=name), LogEvent(time=START, rank=0, text=name)])
    assert page.count(b"</script>") == 3
    assert b"alert(1)</script>" not in page
    assert data_of(page)["states"][0]["workers"][0]["name"] == name


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_bytes(b"".join(events.encode(event) + b"\n" for event in stream()))
    return tmp_path / "run"


def test_report_command_writes_one_file(commlayer: Any, run_folder: Path) -> None:
    code, output, _ = commlayer("report", str(run_folder), "--out", "a.html")
    assert code == 0
    assert output.startswith("a.html: ")
    assert len(data_of(Path("a.html").read_bytes())["points"]) == 29


@pytest.mark.parametrize(("arguments", "code"), [
    (["/nonexistent"], "E-EVENTS"), (["EMPTY"], "E-EVENTS"), (["DAMAGED"], "E-EVENTS"), (["LATER"], "E-EVENTS"),
    (["RUN", "--out", "/nonexistent/x.html"], "E-CLI-OPTION"), (["RUN", "--out", "/proc/x.html"], "E-CLI-OPTION"),
    (["RUN", "--out", "EMPTY"], "E-CLI-OPTION"),
])
def test_report_errors_are_one_line_with_a_code(commlayer: Any, run_folder: Path, tmp_path: Path, arguments: list[str],
                                                code: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.jsonl").write_bytes(b'{"event":"step","step":"x"}\n')
    (tmp_path / "later.jsonl").write_bytes(events.encode(JobEvent(format=99, version="9.0")) + b"\n")
    words = {"RUN": run_folder, "EMPTY": tmp_path / "empty", "DAMAGED": tmp_path / "damaged.jsonl",
             "LATER": tmp_path / "later.jsonl"}
    status, _, error = commlayer("report", *(str(words.get(each, each)) for each in arguments))
    assert status == 2
    assert f"[{code}]" in error
    assert error.count("\n") == 1


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if not BROWSER:
        pytest.skip(REASON)
    with closing(Browser(tmp_path / "browser")) as opened:
        yield opened


def test_browser_shows_the_job_and_follows_it(browser: Browser) -> None:
    with closing(Served(log_of(stream(start=time.time() - 31)))) as served:
        browser.look(390, 844, dark=True)
        browser.open(served.url)
        text = browser.until(lambda text: "home-2" in text and "live" in text, "the members")
        assert "dead\nno heartbeat for 60.0 s" in text
        assert "9.6/10" in text
        assert "connection lost [E-PEER-LOST]" in text
        assert browser.value("document.documentElement.scrollWidth") <= 390
        assert browser.value("document.querySelectorAll('canvas').length") == 4
        name = "<img src=x onerror=alert(1)>"
        served.log.append(MemberEvent(time=time.time(), member="worker 3", name=name))
        served.log.append(StepEvent(time=time.time(), rank=0, step=12345, steps=5, step_s=0.5))
        browser.until(lambda text: f"\n{name}\n" in text and "12,345" in text, "what is new")
        assert all(url.startswith(f"http://{served.address}/") for url in browser.requests)
    browser.until(lambda text: "no connection to the coordinator" in text, "the end of the coordinator")
    browser.problems = [each for each in browser.problems if "ERR_CONNECTION_REFUSED" not in each
                        and "ERR_INCOMPLETE_CHUNKED_ENCODING" not in each]
    assert browser.problems == []


def test_browser_pauses_and_resumes_the_homes_of_this_machine(browser: Browser, tmp_path: Path) -> None:
    mark = tmp_path / "paused"
    with closing(Served(log_of(stream(start=time.time() - 31)), mark.exists, pause=mark.touch, resume=mark.unlink)) as served:
        for width, height in ((1280, 800), (390, 844)):
            browser.look(width, height)
            browser.open(served.url)
            browser.until(lambda text: "homes train when they can" in text, "the button")
            place = browser.value("JSON.stringify(document.querySelector('#home button').getBoundingClientRect())")
            assert json.loads(place)["bottom"] < height, "it is seen without scrolling"
            assert json.loads(place)["right"] <= width
            browser.value("document.querySelector('#home button').click()")
            until(mark.exists, "the homes are paused")
            browser.until(lambda text: "homes pause" in text, "the page says so")
            mark.unlink()  # by `commlayer resume`
            browser.until(lambda text: "homes train when they can" in text, "the page follows the command")
            browser.value("document.querySelector('#home button').click()")
            until(mark.exists, "the homes are paused again")
            browser.until(lambda text: "homes pause" in text, "the page says so")
            browser.value("document.querySelector('#home button').click()")
            until(lambda: not mark.exists(), "the homes train again")


def test_browser_shows_a_report_from_disk(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_bytes(report(list(stream())))
    browser.look()
    browser.open(file.as_uri())
    text = browser.until(lambda text: "report of" in text, "the report")
    assert "dead\nno heartbeat for 60.0 s" in text
    browser.value("document.getElementById('at').value = 18;"
                  "document.getElementById('at').dispatchEvent(new Event('input'))")
    text = browser.text()
    assert "waiting for home-2, which sends no heartbeats, 10 of 60 s" in text
    assert "is dead" not in text
    assert browser.requests == [file.as_uri()]
    assert browser.problems == []
