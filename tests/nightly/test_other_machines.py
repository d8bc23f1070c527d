"""Devices other than CPUs and CUDA, and systems other than Linux, as far as stand-ins show them.

Run as a script: the training of a home.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support import stand_in
from support.sites import Process, Sites, all_ended, ended

pytestmark = pytest.mark.timeout(300)
STEPS = 8
NOT_LINUX = Path(__file__).parents[1] / "support" / "not_linux"


def main(device: str, local_steps: int) -> None:
    import torch
    from support.site_job import digest
    from torch import nn

    import commlayer

    if device == stand_in.NAME:
        stand_in.register()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    sync: Any = commlayer.LocalSteps(local_steps) if local_steps else None
    with commlayer.attach(model, optimizer, compression="int4()", sync=sync) as session:
        generator = torch.Generator().manual_seed(session.rank)
        for _ in range(STEPS):
            x = torch.randn(8, 12, generator=generator)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.to(device)), x[:, :3].to(device)).backward()
            optimizer.step()
        print(json.dumps({"sha": digest([t.detach().cpu() for t in [*model.parameters(), *model.buffers()]]),
                          "platform": sys.platform, "device": str(next(model.parameters()).device)}), flush=True)


def homes(sites: Sites, *devices: str, local_steps: int = 0) -> list[Process]:
    return [sites.launch(__file__, device, str(local_steps), rank=rank) for rank, device in enumerate(devices)]


@pytest.mark.parametrize("local_steps", [0, 2])
def test_home_with_another_device_trains_with_a_cpu_as_two_cpus_do(sites: Sites, local_steps: int) -> None:
    """Weights and buffers are equal to the bit: only torch's copies lie between the device and the buckets."""
    found = []
    for devices in (("cpu", "cpu"), ("cpu", stand_in.NAME)):
        server = sites.serve(2)
        *ends, _ = all_ended([*homes(sites, *devices, local_steps=local_steps), server])
        assert [end.rows[-1]["device"].partition(":")[0] for end in ends] == [*devices]
        assert not any("divergence" in end.errors for end in ends), "the replica check has not failed"
        found.append([end.rows[-1]["sha"] for end in ends])
    assert found[0] == found[1]


def test_job_trains_and_doctor_is_content_without_what_only_linux_has(sites: Sites) -> None:
    sites.set(PYTHONPATH=os.pathsep.join([str(NOT_LINUX), os.environ["PYTHONPATH"]]))
    server = sites.serve(2)
    *ends, _ = all_ended([*homes(sites, "cpu", "cpu"), server])
    assert [end.rows[-1]["platform"] for end in ends] == ["darwin"] * 2
    assert len({end.rows[-1]["sha"] for end in ends}) == 1
    refused = ended(sites.run("join", "--pause-if-busy", sites.address, __file__))
    assert (refused.code, refused.errors.strip()[-len("[E-SYSTEM]"):]) == (2, "[E-SYSTEM]")
    all_ended([sites.run("doctor")])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
