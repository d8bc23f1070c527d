"""Ranks are started alike on loopback and in a lab, their answers gathered, and a bad one is named with its own words."""

from __future__ import annotations

import sys
import time

import pytest
from support.lab import needs_lab

from bench.baselines import RankFailed, launch_hosts, median_step_s, worker
from bench.lab import Lab

ECHO = """
import json, os
print("noise")
print(json.dumps({key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MINE")}))
"""
ONE_FAILS = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('boom in rank one')\ntime.sleep(600)"


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


def test_ddp_ranks_train_one_model_on_loopback() -> None:
    for mode in ("ddp_fp32", "ddp_fp16"):
        answers = launch_hosts(None, 2, worker(mode, "mlp_small", warmup=1, steps=2), deadline_s=100)
        assert [answer["rank"] for answer in answers] == [0, 1]
        assert {answer["world"] for answer in answers} == {2}
        assert len({answer["digest"] for answer in answers}) == 1
        assert answers[0]["loss"] != answers[1]["loss"], "each rank has data of its own"
        assert all(len(answer["step_s"]) == 2 for answer in answers)


@needs_lab
def test_ranks_on_hosts_of_a_lab() -> None:
    with Lab(hosts=2) as lab:
        answers = launch_hosts(lab, 3, python(ECHO), deadline_s=30, env={"MINE": "yes"})
    expected = [{"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "10.99.0.1", "MINE": "yes"} for rank in range(3)]
    assert answers == expected


def test_a_failing_rank_is_named_with_its_words_and_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 3 ended with code 1:\nboom in rank one"):
        launch_hosts(None, 3, python(ONE_FAILS), deadline_s=300)
    assert time.monotonic() - begin < 300, "the sleeping ranks were not waited for"


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    answers = [{"step_s": [1.0, 5.0, 2.0, 1.0]}, {"step_s": [4.0, 1.0, 2.0, 3.0]}]
    assert median_step_s(answers) == 3.5
