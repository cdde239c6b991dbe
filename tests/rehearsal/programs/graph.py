"""Capture a compiled model's forward and backward as a CUDA graph, replay it, save the model, and end."""

import torch

model = torch.compile(torch.nn.Linear(256, 256).cuda())
still = torch.zeros(64, 256, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    model(still).sum().backward()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = model(still).sum()
    loss.backward()
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
for _ in range(3):
    still.copy_(torch.randn(64, 256))
    graph.replay()
end.record()
torch.cuda.synchronize()
assert begin.elapsed_time(end) > 0
torch.save(model.state_dict(), "kept.pt")
