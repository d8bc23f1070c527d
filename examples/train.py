import torch
from torch import nn

import commlayer


def make():
    """The model, and a function that draws a batch and computes its loss. `commlayer estimate` counts the work of both."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def loss():
        x = torch.randn(64, 64)
        return nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))

    return model, loss


def main():
    model, loss_of_batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with commlayer.attach(model, optimizer, sync="auto") as session:
        torch.manual_seed(session.rank)  # every worker draws other data; a data set takes a DistributedSampler
        for step in range(1, 201):
            loss = loss_of_batch()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0 and session.rank == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
