"""transformers' Trainer, by a callback: torchrun --standalone --nproc-per-node 2 FILE

The line that commlayer adds is marked. Residuals are saved and loaded with the Trainer's checkpoints.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from commlayer.integrations.transformers import CommlayerCallback


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
    settings = TrainingArguments(
        options.out, max_steps=options.steps, save_steps=options.save_at, per_device_train_batch_size=8, learning_rate=3e-3,
        gradient_accumulation_steps=2, lr_scheduler_type="constant", logging_steps=options.steps, report_to=[],
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
    )
    trainer = Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in text])
    trainer.add_callback(callback := CommlayerCallback(trainer, compression="topk(ratio=0.05)"))  # commlayer
    trainer.train(resume_from_checkpoint=f"{options.out}/checkpoint-{options.save_at}" if options.resume else None)
    if trainer.is_world_process_zero():
        print(f"step {options.steps}: {callback.session.metrics()['sent_nbytes']:.0f} bytes sent")
    return model


if __name__ == "__main__":
    main()
