"""A callback for the Trainer of transformers, and for trainers built on it such as TRL's SFTTrainer."""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers import trainer as trainer_module
from transformers.trainer_pt_utils import nested_gather

from commlayer.integrations.accelerate import gather_of_present, optimizer_inside, patch_gather
from commlayer.session import Session, attach

log = logging.getLogger("commlayer")


def _nested_gather(tensors: Any, *_: Any, **__: Any) -> Any:
    """The function by which a Trainer gathers the losses that it logs, in a job whose workers may leave."""
    return None if tensors is None else gather_of_present(tensors)


class CommlayerCallback(TrainerCallback):
    """Averages a Trainer's gradients with commlayer, and keeps residuals with the Trainer's checkpoints.

    >>> trainer = Trainer(model, arguments, train_dataset=data)                                 # doctest: +SKIP
    >>> trainer.add_callback(CommlayerCallback(trainer, compression="int4"))                    # doctest: +SKIP
    >>> trainer.train()                                                                         # doctest: +SKIP

    The Trainer no longer wraps its model in DistributedDataParallel, which would send the whole model through the server before
    the first step. `session` is the session from the start of training to its end.
    """

    session: Session

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        """`options`: arguments of commlayer.attach(), such as `compression`, `sync` and `plan`."""
        self._trainer, self._options = trainer, options
        if not trainer.is_fsdp_enabled:
            # As for an evaluation: Accelerate then moves, casts and compiles the model, but does not wrap it.
            trainer.accelerator.prepare_model = functools.partial(trainer.accelerator.prepare_model, evaluation_mode=True)
        trainer.train = functools.partial(self._train, trainer.train)

    def _train(self, train: Any, *arguments: Any, **options: Any) -> Any:
        """Trains, then restores the functions of transformers that were replaced, also after an error."""
        try:
            return train(*arguments, **options)
        finally:
            trainer_module.nested_gather = nested_gather
            vars(self._module).pop("no_sync", None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, model = self._trainer, self._module
        self.session = attach(model, optimizer_inside(trainer.optimizer), grad_scaler=trainer.accelerator.scaler,
                              **{"steps": state.max_steps, **self._options})
        patch_gather(trainer.accelerator, self.session)
        if self.session.inspect.may_leave:
            trainer_module.nested_gather = _nested_gather
        if not isinstance(model, DistributedDataParallel):
            model.no_sync = self.session.no_sync  # Accelerate calls it for all micro-batches of a step but the last
        if self.session.joined:  # schedules continue where the other homes are
            state.global_step = trainer._globalstep_last_logged = self.session.step
            for _step in range(self.session.step):
                trainer.lr_scheduler.step()
        elif state.global_step:
            folder = args.resume_from_checkpoint or f"{args.output_dir}/checkpoint-{state.global_step}"
            if not self.session.resume(f"{folder}/commlayer"):
                log.warning("the Trainer continues from step %d, but %s/commlayer has no residuals: they begin at zero. For a "
                            "folder outside output_dir set TrainingArguments.resume_from_checkpoint", state.global_step, folder)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Under local steps, makes weights equal on all ranks before the Trainer saves, evaluates or ends."""
        if (control.should_save or control.should_evaluate or control.should_training_stop) and self.session.flush():
            self._trainer.optimizer.step()

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.session.log_loss(logs["loss"])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = f"{args.output_dir}/checkpoint-{state.global_step}/commlayer"
        self.session.checkpoint(folder, model=self.session.inspect.steps_locally)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.session.close()

    @property
    def _module(self) -> Any:
        """The model, or a DistributedDataParallel module around it; without the wrapper of torch.compile."""
        return getattr(self._trainer.model_wrapped, "_orig_mod", self._trainer.model_wrapped)
