"""Train, and write in ways that fail where a file or folder of an earlier start exists."""

from pathlib import Path

Path("out").mkdir()
import torch  # noqa: E402

model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(30):
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with Path("out/log.txt").open("a") as file:
        file.write("step\n")
with Path("result.txt").open("x") as file:
    file.write("done")
