"""A strategy for Lightning's Trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from commlayer.errors import cause_of
from commlayer.session import Session, attach


class CommlayerStrategy(DDPStrategy):
    """DDPStrategy with commlayer's averages, whose residuals are kept with Lightning's checkpoints.

    >>> trainer = Trainer(strategy=CommlayerStrategy(compression="int4"), devices=2)            # doctest: +SKIP

    `trainer.strategy.session` is the session from the start of `fit()` to its end.
    """

    session: Session | None = None

    def __init__(
        self, compression: Any = None, *, sync: Any = None, plan: Any = None, config: Any = None,
        clip_grad_norm: float | None = None, **ddp: Any,
    ) -> None:
        """`ddp`: arguments of DDPStrategy. The others are those of commlayer.attach()."""
        super().__init__(**{"init_sync": False} | ddp)  # attach() copies parameters where they differ
        self._options = {"compression": compression, "sync": sync, "plan": plan, "config": config,
                         "clip_grad_norm": clip_grad_norm}
        self._resumes = Path()

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if isinstance(self.model, DistributedDataParallel):
            optimizer = self.optimizers[0] if len(self.optimizers) == 1 else None
            scaler = getattr(self.precision_plugin, "scaler", None)
            self.session = attach(self.model, optimizer, grad_scaler=scaler, **self._options)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.session is not None:
            self.session.checkpoint(beside(filepath), model=self.session.inspect.steps_locally)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        self._resumes = beside(checkpoint_path)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Loads residuals too. Lightning calls it after `setup()`, when a fit resumes."""
        super().load_optimizer_state_dict(checkpoint)
        if self.session is not None:
            self.session.resume(self._resumes)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        shutil.rmtree(beside(filepath), ignore_errors=True)

    def on_validation_start(self) -> None:
        self._flush()

    def on_train_end(self) -> None:
        self._flush()

    def _flush(self) -> None:
        """Under local steps, makes weights equal on all ranks."""
        if self.session is not None and self.session.flush():
            for optimizer in self.optimizers:
                optimizer.step()

    def on_exception(self, exception: BaseException) -> None:
        self._close(cause_of(exception))
        super().on_exception(exception)

    def teardown(self) -> None:
        self._close("")
        super().teardown()

    def _close(self, reason: str) -> None:
        if self.session is not None:
            self.session.close(reason)
            self.session = None


def beside(checkpoint: Any) -> Path:
    """Returns the folder with the residuals of one of Lightning's checkpoints."""
    return Path(f"{checkpoint}.commlayer")
