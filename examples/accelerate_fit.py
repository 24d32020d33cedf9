"""Accelerate makes its own loader from the one it is given: install() makes that minato's.

    python examples/accelerate_fit.py

Needs accelerate (pip install accelerate).
"""

import torch
from accelerate import Accelerator

from minato import DataLoader, TensorDataset
from minato.integrations import accelerate as integration

if __name__ == "__main__":
    integration.install()  # before prepare(); this also serves the Trainer of transformers
    torch.manual_seed(0)
    points = torch.rand(64, 2)
    dataset = TensorDataset(points, (points[:, 1] > points[:, 0]).float())

    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(2, 1)
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.5),
        DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True),
    )  # fmt: skip
    print(f"loads with {type(loader.base_dataloader).__module__}")
    for epoch in range(3):
        for inputs, above in loader:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(net(inputs)[:, 0], above)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
