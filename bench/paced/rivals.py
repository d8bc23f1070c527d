"""Rival systems, used as in their own examples: torchft's DiLoCo and hivemind's Optimizer.

Each runs without commlayer in its own environment, built by `make rivals`.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from bench.paced.place import Place, TrainingSystem, shared_text
from bench.tasks import Task

TIMEOUT = timedelta(seconds=120)
"""Timeout of one exchange. The 10 s of torchft's examples would end the run on slow links."""


def torchft_diloco(
    place: Place, model: nn.Module, task: Task, every: int, lr: float = 0.7, momentum: float = 0.9,
) -> TrainingSystem:
    """Like torchft's train_diloco.py: a manager per replica, one lighthouse, and SGD with Nesterov momentum as outer optimizer.
    All ranks start with equal weights (init_sync=False): the initial copy would come over HTTP from a bare host name, which
    other hosts cannot resolve."""
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found, unused-ignore]
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found, unused-ignore]
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found, unused-ignore]

    lighthouse = None
    if place.rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=place.ranks, join_timeout_ms=10_000)
        port = lighthouse.address().rpartition(":")[2]
        shared_text(place, "lighthouse", f"http://{place.address}:{port}")
    inner = task.optimizer(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict(), "outer": outer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        outer.load_state_dict(state["outer"])

    store = torch._C._distributed_c10d.TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=load, state_dict=save, min_replica_size=place.ranks,
        use_async_quorum=False, timeout=TIMEOUT, quorum_timeout=TIMEOUT, rank=0, world_size=1, store_addr=place.address,
        store_port=store.port, lighthouse_addr=shared_text(place, "lighthouse"), replica_id=f"tta_{place.rank}",
        hostname=place.address, init_sync=False,
    )
    around = DiLoCo(manager, [model], inner, outer, sync_every=every, backup_device=torch.device("cpu"))
    around.__enter__()

    def end() -> dict[str, Any]:
        report = {"exchanges": manager.current_step()}
        around.__exit__(None, None, None)
        # A rank that serves others must not end before they do.
        shared_text(place, f"through.{place.rank}", "")
        for rank in range(place.ranks):
            shared_text(place, f"through.{rank}", wait_s=20.0)
        manager.shutdown(wait=False)
        return report

    keep.append((lighthouse, store))
    return TrainingSystem(model, inner, end)


def hivemind(place: Place, model: nn.Module, task: Task, steps: int, *, local: bool) -> TrainingSystem:
    """hivemind's Optimizer, averaged in 16 bits in the background. `local`: peers step by themselves, and weights are averaged
    every `steps` steps. Otherwise like its guide for slow networks: one step stale, an optimizer step per target batch of all
    peers, for which a rank takes `steps` steps of its own."""
    import hivemind  # type: ignore[import-not-found, unused-ignore]

    half = hivemind.compression.Float16Compression()
    options: dict[str, Any] = {"use_local_updates": True} if local else {
        "offload_optimizer": True, "delay_optimizer_step": True, "delay_grad_averaging": True, "grad_compression": half}

    def peers(initial: list[str]) -> Any:
        return hivemind.DHT(host_maddrs=[f"/ip4/{place.address}/tcp/0"], initial_peers=initial, start=True)

    if place.rank == 0:
        dht = peers([])
        shared_text(place, "peers", "\n".join(str(address) for address in dht.get_visible_maddrs()))
    else:
        dht = peers(shared_text(place, "peers").split())
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="tta", batch_size_per_step=place.samples, target_batch_size=place.samples * place.ranks * steps,
        matchmaking_time=3.0, averaging_timeout=60.0, params=model.parameters(), optimizer=task.optimizer,
        state_averaging_compression=half, **options,
    )
    # Start only when all peers are there: averaging would otherwise begin with fewer.
    shared_text(place, f"here.{place.rank}", "")
    for rank in range(place.ranks):
        shared_text(place, f"here.{rank}", wait_s=90.0)
    time.sleep(1.0)

    def end() -> dict[str, Any]:
        report = {"exchanges": optimizer.local_epoch}
        optimizer.shutdown()
        dht.shutdown()
        return report

    return TrainingSystem(model, optimizer, end)


keep: list[Any] = []
"""Objects that must live as long as the process."""
