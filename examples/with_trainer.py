"""transformers' Trainer, by a callback: torchrun --standalone --nproc-per-node 2 FILE

The callback is all that a script needs. Residuals are saved and loaded with the Trainer's checkpoints.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import commlayer


class Commlayer(TrainerCallback):
    """Set `trainer` before training: only the trainer knows the DDP module."""

    def __init__(self, compression: Any = None) -> None:
        self.compression = compression
        self.trainer: Any = None
        self.session: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)  # without Accelerate's wrapper
        self.session = commlayer.attach(self.trainer.model_wrapped, optimizer, compression=self.compression,
                                        grad_scaler=self.trainer.accelerator.scaler)
        if state.global_step:
            self.session.resume(self.place(args, state))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.session.checkpoint(self.place(args, state), model=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            print(f"step {state.global_step}: {self.session.metrics()['sent_nbytes']:.0f} bytes sent")
        self.session.close()

    def place(self, args: Any, state: Any) -> str:
        return f"{args.output_dir}/checkpoint-{state.global_step}/residuals"


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-at", type=int, default=30)
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16))
    text = torch.arange(512 * 16).remainder(7).view(512, 16)
    callback = Commlayer("topk(ratio=0.05)")
    settings = TrainingArguments(
        options.out, max_steps=options.steps, save_steps=options.save_at, per_device_train_batch_size=8, learning_rate=3e-3,
        gradient_accumulation_steps=2, lr_scheduler_type="constant", logging_steps=options.steps, report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False, use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
    )
    train_dataset = [{"input_ids": row, "labels": row} for row in text]
    trainer = Trainer(model, settings, train_dataset=train_dataset, callbacks=[callback])
    callback.trainer = trainer
    trainer.train(resume_from_checkpoint=f"{options.out}/checkpoint-{options.save_at}" if options.resume else None)
    return model


if __name__ == "__main__":
    main()
