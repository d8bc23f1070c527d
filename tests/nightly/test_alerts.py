"""Alerts of `commlayer serve` about a job of real processes: a home is killed, and the others finish."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.coordinators import until
from support.sites import Sites, all_ended, next_row, switch_off

from commlayer.observe.event_files import read_run
from commlayer.observe.events import CostEvent

SCRIPT = """
import json, pathlib, torch, commlayer
model = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with commlayer.attach(model, optimizer, steps=400) as session:
    for step in range(400):
        loss = model(torch.ones(4, 64)).square().mean()
        session.log_loss(loss)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if step == 20:
            print(json.dumps({"step": step}), flush=True)
        elif step > 20 and not pathlib.Path(FOLDER, "killed").exists():
            import time; time.sleep(0.2)
"""


@pytest.fixture
def posted() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a local webhook, and what was posted to it."""
    got = list[dict[str, Any]]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", got
        server.shutdown()


def test_killed_home_and_the_end_are_told(posted: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    url, got = posted
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("FOLDER", repr(str(tmp_path))))
    with closing(Sites()) as sites:
        sites.set(COMMLAYER_CACHE=str(tmp_path / "cache"))
        server = sites.serve(2, "--min-workers", "1", "--alert", url, "--events", str(tmp_path), "--watts", "100")
        homes = [sites.launch(str(script)) for _ in range(2)]
        for home in homes:
            assert next_row(home) == {"step": 20}
        switch_off(homes[1])
        until(lambda: [each["cause"] for each in got] == ["missing"], "the alert about the killed home", 60.0)
        (tmp_path / "killed").touch()
        all_ended([homes[0], server])
    assert [each["cause"] for each in got] == ["missing", "done"]
    assert got[1]["text"].startswith("The run is done: 400 steps")
    costs = [event for event in read_run(tmp_path) if isinstance(event, CostEvent)]
    assert costs[-1].kwh > 0
    (kept,) = (tmp_path / "cache" / "costs").iterdir()
    assert json.loads(kept.read_text())["month"] == costs[-1].month
