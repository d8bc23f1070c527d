"""Strategies for Lightning's Trainer."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.device_mesh import init_device_mesh

from commlayer.errors import exit_reason
from commlayer.session import Session, attach


class _WithSession(ParallelStrategy):
    """A strategy with commlayer's averages, whose residuals are kept with Lightning's checkpoints.

    `trainer.strategy.session` is the session from the start of `fit()` to its end.
    """

    session: Session | None = None

    def __init__(
        self, compression: Any = None, *, sync: Any = None, plan: Any = None, config: Any = None,
        clip_grad_norm: float | None = None, **own: Any,
    ) -> None:
        """`own`: arguments of Lightning's strategy. The others are those of commlayer.attach()."""
        super().__init__(**own)
        self._options = {"compression": compression, "sync": sync, "plan": plan, "config": config,
                         "clip_grad_norm": clip_grad_norm}
        self._resumes = Path()

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.model is not None:
            optimizer = self.optimizers[0] if len(self.optimizers) == 1 else None
            scaler = getattr(self.precision_plugin, "scaler", None)
            self.session = attach(self.model, optimizer, grad_scaler=scaler, **self._options)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.session is not None:
            self.session.checkpoint(residuals_folder(filepath), model=self.session.inspect.steps_locally)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        self._resumes = residuals_folder(checkpoint_path)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        return loaded

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        shutil.rmtree(residuals_folder(filepath), ignore_errors=True)

    def on_validation_start(self) -> None:
        self._flush()

    def on_train_end(self) -> None:
        self._flush()

    def _flush(self) -> None:
        """Under local steps, makes weights equal on all ranks."""
        if self.session is not None and self.session.flush():
            for optimizer in self.optimizers:
                optimizer.step()

    def _resume(self) -> None:
        if self.session is not None:
            self.session.resume(self._resumes)

    def on_exception(self, exception: BaseException) -> None:
        self._close(exit_reason(exception))
        super().on_exception(exception)

    def teardown(self) -> None:
        self._close("")
        super().teardown()

    def _close(self, reason: str) -> None:
        if self.session is not None:
            self.session.close(reason)
            self.session = None


class CommlayerStrategy(_WithSession, DDPStrategy):
    """DDPStrategy with commlayer's averages, whose residuals are kept with Lightning's checkpoints.

    >>> trainer = Trainer(strategy=CommlayerStrategy(compression="int4"), devices=2)            # doctest: +SKIP

    `trainer.strategy.session` is the session from the start of `fit()` to its end.
    """

    def __init__(self, compression: Any = None, **options: Any) -> None:
        """`options`: arguments of commlayer.attach() and of DDPStrategy."""
        super().__init__(compression, **{"init_sync": False} | options)  # attach() copies parameters where they differ

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Loads residuals too. Lightning calls it after `setup()`, when a fit resumes."""
        super().load_optimizer_state_dict(checkpoint)
        self._resume()


class CommlayerModelParallelStrategy(_WithSession, ModelParallelStrategy):
    """ModelParallelStrategy for FSDP2 inside of each node, with commlayer's averages between nodes.

    >>> trainer = Trainer(strategy=CommlayerModelParallelStrategy(), devices=4, num_nodes=2)    # doctest: +SKIP

    `configure_model()` calls fully_shard() with `self.device_mesh["data_parallel"]`, as usual. It has the ranks of this node.
    """

    def setup_environment(self) -> None:
        super().setup_environment()
        sizes = self.num_nodes, self.num_processes, 1
        mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("site", "data_parallel", "tensor_parallel"))
        self._device_mesh = mesh
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Gradients are not exchanged inside it. Lightning uses it for all micro-batches of a step but the last."""
        with self.session.no_sync() if self.session is not None else nullcontext():
            yield

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Loads residuals too. Lightning calls it after `setup()`."""
        loaded = super().load_checkpoint(checkpoint_path, *args, **options)
        self._resume()
        return loaded


def residuals_folder(checkpoint: Any) -> Path:
    """Returns the folder with the residuals of one of Lightning's checkpoints."""
    return Path(f"{checkpoint}.commlayer")
