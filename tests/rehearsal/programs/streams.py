"""Free memory that a second stream uses: after an event, with record_stream, and last without either."""

import torch

side, size = torch.cuda.Stream(), 1 << 20


def use_on_side(how: str) -> None:
    x = torch.ones(size, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x * 2
    if how == "event":
        torch.cuda.current_stream().wait_stream(side)
    if how == "record_stream":
        x.record_stream(side)
    del x
    torch.zeros(size, device="cuda")  # takes the memory of x where nothing keeps it


def faults() -> int:
    from mempool.rehearsal import standin

    return len(standin.stream_faults())


for _ in range(3):
    use_on_side("event")
    use_on_side("record_stream")
torch.cuda.synchronize()
assert faults() == 0
use_on_side("nothing")
assert faults() == 1
