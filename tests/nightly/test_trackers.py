"""Logging to the real trackers, offline."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.coordinators import until

from commlayer.integrations.tracking import log_to


class Counted:
    """As a session after some steps."""

    step = 0

    def metrics(self) -> dict[str, float]:
        return {"steps": float(self.step), "sent_nbytes": 2e6}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    session, writer = Counted(), SummaryWriter(str(tmp_path))  # type: ignore[no-untyped-call]
    log = log_to(session, writer, every=1)
    for session.step in (1, 2):
        log(loss=0.5 / session.step)
    writer.close()  # type: ignore[no-untyped-call]
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [event.value for event in read.Scalars("comm/sent_MB")] == [2.0, 2.0]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    session, run = Counted(), wandb.init(project="commlayer", dir=str(tmp_path))
    for writer in (run, wandb, run):
        session.step += 1
        log_to(session, writer, every=1)(loss=0.5 / session.step)
    expected = {"loss": 0.25, "comm/steps": 2.0, "comm/sent_MB": 2.0}
    until(lambda: {name: run.summary.get(name) for name in expected} == expected, "a step is complete with the next one")
    run.finish()


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    session, run = Counted(), trackio.init(project="commlayer", embed=False)
    for writer in (run, trackio):
        session.step += 1
        log_to(session, writer, every=1)(loss=0.5 / session.step)
    trackio.finish()
    assert list(tmp_path.glob("*.db"))
