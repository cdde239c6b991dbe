"""Train, and write in ways that fail where a file or folder of an earlier start exists."""

import os
import shutil
from pathlib import Path

os.makedirs("out/parts")  # noqa: PTH103 - as programs do
import torch  # noqa: E402

os.symlink("out", "link")  # noqa: PTH211
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 31):
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("out/log.txt", "a") as file:  # noqa: PTH123
        file.write("step\n")
    Path("staging").mkdir()
    Path("staging/state").write_text(str(step))
    shutil.rmtree("last", ignore_errors=True)
    os.rename("staging", "last")  # noqa: PTH104
with open("result.txt", "x") as file:  # noqa: PTH123
    file.write("done")
