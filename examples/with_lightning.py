"""Lightning, by a strategy: python FILE, where Lightning starts the ranks, or torchrun --standalone --nproc-per-node 2 FILE

The line that commlayer adds is marked. Residuals are saved and loaded with Lightning's checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from commlayer.integrations.lightning import CommlayerStrategy


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self) -> None:
        sent = self.trainer.strategy.session.metrics()["sent_nbytes"]
        self.print(f"step {self.global_step}: loss {self.trainer.callback_metrics.get('loss', 0):.3f}, {sent:.0f} bytes sent")


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save-at", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--devices", type=int, default=2, help="Ranks on each machine.")
    parser.add_argument("--nodes", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    x = torch.randn(16 * 10 * options.devices * options.nodes, 32)
    loader = DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=16)
    model = Classifier()
    trainer = Trainer(
        strategy=CommlayerStrategy("topk(ratio=0.05)"),  # commlayer
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=options.devices, num_nodes=options.nodes,
        max_epochs=options.epochs, accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(options.out, filename="{epoch}", every_n_epochs=options.save_at, save_top_k=-1)],
    )
    trainer.fit(model, loader, ckpt_path=options.out / f"epoch={options.save_at - 1}.ckpt" if options.resume else None)
    return model


if __name__ == "__main__":
    main()
