"""Systems of other projects, as their own examples use them: torchft's DiLoCo, hivemind's Optimizer. Knows no commlayer: each
runs in an environment of its own, which `make rivals` makes."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from bench.paced.place import Place, Started, spoken
from bench.tasks import Task

TIMEOUT = timedelta(seconds=120)
"""For one exchange: with the 10 s of torchft's examples slow links would end the run."""


def torchft_diloco(place: Place, model: nn.Module, task: Task, every: int, lr: float = 0.7, momentum: float = 0.9) -> Started:
    """As torchft's train_diloco.py: a manager for each replica, one lighthouse, SGD with Nesterov's momentum outside. All begin
    with equal weights: its first copy of them would come over HTTP from a bare host name, which others cannot resolve."""
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found, unused-ignore]
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found, unused-ignore]
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found, unused-ignore]

    lighthouse = None
    if place.rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=place.ranks, join_timeout_ms=10_000)
        port = lighthouse.address().rpartition(":")[2]
        spoken(place, "lighthouse", f"http://{place.address}:{port}")
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
        store_port=store.port, lighthouse_addr=spoken(place, "lighthouse"), replica_id=f"tta_{place.rank}",
        hostname=place.address, init_sync=False,
    )
    around = DiLoCo(manager, [model], inner, outer, sync_every=every, backup_device=torch.device("cpu"))
    around.__enter__()

    def end() -> dict[str, Any]:
        told = {"exchanges": manager.current_step()}
        around.__exit__(None, None, None)
        # Whoever serves the others goes last.
        spoken(place, f"through.{place.rank}", "")
        for rank in range(place.ranks):
            spoken(place, f"through.{rank}", wait_s=20.0)
        manager.shutdown(wait=False)
        return told

    started = Started(model, inner, end)
    keep.append((lighthouse, store))
    return started


def hivemind_sync(place: Place, model: nn.Module, task: Task, steps: int = 1) -> Started:
    """As hivemind's guide for slow networks: an optimizer step for so many samples of all peers, averaged in 16 bits in the
    background, one round late. `steps`: a rank's own steps that make one."""
    import hivemind  # type: ignore[import-not-found, unused-ignore]

    half = hivemind.compression.Float16Compression()
    return _peer(place, model, task, steps, optimizer=lambda params: task.optimizer(params), params=model.parameters(),
                 offload_optimizer=True, delay_optimizer_step=True, delay_grad_averaging=True, grad_compression=half,
                 state_averaging_compression=half)


def hivemind_local(place: Place, model: nn.Module, task: Task, steps: int) -> Started:
    """The same package with local updates: each peer steps by itself, weights are averaged in the background after so many."""
    import hivemind  # type: ignore[import-not-found, unused-ignore]

    return _peer(place, model, task, steps, optimizer=lambda params: task.optimizer(params), params=model.parameters(),
                 use_local_updates=True, state_averaging_compression=hivemind.compression.Float16Compression())


def _peer(place: Place, model: nn.Module, task: Task, steps: int, **options: Any) -> Started:
    import hivemind

    def peers(initial: list[str]) -> Any:
        return hivemind.DHT(host_maddrs=[f"/ip4/{place.address}/tcp/0"], initial_peers=initial, start=True)

    if place.rank == 0:
        dht = peers([])
        spoken(place, "peers", "\n".join(str(address) for address in dht.get_visible_maddrs()))
    else:
        dht = peers(spoken(place, "peers").split())
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="tta", batch_size_per_step=place.samples, target_batch_size=place.samples * place.ranks * steps,
        matchmaking_time=3.0, averaging_timeout=60.0, **options,
    )
    # Peers that begin before all are found count for what is not there.
    spoken(place, f"here.{place.rank}", "")
    for rank in range(place.ranks):
        spoken(place, f"here.{rank}", wait_s=90.0)
    time.sleep(1.0)

    def end() -> dict[str, Any]:
        told = {"exchanges": optimizer.local_epoch}
        optimizer.shutdown()
        dht.shutdown()
        return told

    return Started(model, optimizer, end)


keep: list[Any] = []
"""What must live as long as the process."""
