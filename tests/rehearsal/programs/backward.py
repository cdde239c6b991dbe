"""A training whose backward pass needs more memory than a small card has."""

import torch

weights = torch.ones(1 << 30, device="cuda", requires_grad=True)  # 4 GiB
loss = (weights * torch.ones(1, device="cuda")).expand(2, -1).sum()
loss.backward()  # too much
