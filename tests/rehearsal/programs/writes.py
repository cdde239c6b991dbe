"""Train, and write in ways that fail where a file or folder of an earlier start exists."""

import json
import os
import shutil
from pathlib import Path

os.makedirs("out/parts")  # noqa: PTH103 - as programs do
import torch  # noqa: E402

Path("staging").mkdir()
with open("result.txt", "x") as file:  # noqa: PTH123
    file.write("...")
assert Path("result.txt").stat().st_size == 3
os.symlink("out", "link")  # noqa: PTH211
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 31):
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("out/log.txt", "a") as file:  # noqa: PTH123
        file.write("step\n")
    assert Path("out/log.txt").read_text() == "step\n" * step
    Path("staging/state.json").write_text(json.dumps([step]))
    shutil.rmtree("last", ignore_errors=True)
    os.rename("staging", "last")  # noqa: PTH104
    assert json.loads(Path("last/state.json").read_text()) == [step]
    assert not Path("staging/state.json").exists()
    Path("staging").mkdir()
Path("staging").rmdir()
Path("result.txt").write_text("done")
