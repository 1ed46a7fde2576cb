"""A loop at the top of a file, without a main guard."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(96, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, loss.item())
print("done", len(loader), sum(p.double().sum().item() for p in model.parameters()))
