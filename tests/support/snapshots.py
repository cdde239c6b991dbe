"""Memory snapshots like those of PyTorch's recorder: built from parts, random, and large."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


def event(action: str, addr: int, size: int, time: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 3, "time_us": time, "frames": []} | more


def segment(*blocks: tuple[int, int, int, str], device: int = 0) -> dict[str, Any]:
    """Return a segment of consecutive blocks (address, size, requested size, state)."""
    names = ("address", "size", "requested_size", "state")
    return {
        "device": device,
        "address": blocks[0][0],
        "stream": 3,
        "total_size": sum(block[1] for block in blocks),
        "blocks": [dict(zip(names, block, strict=True)) for block in blocks],
    }


def snapshot(*devices: list[Any], segments: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"segments": segments or [], "device_traces": list(devices), "allocator_settings": {}} | more


def stored(path: Path, *devices: list[Any], segments: list[Any] | None = None, **more: Any) -> Path:
    path.write_bytes(pickle.dumps(snapshot(*devices, segments=segments, **more), 4))
    return path


ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_map",
    "segment_free",
    "segment_unmap",
    "oom",
)
FILES = (
    "??",
    "/a/train.py",
    "model.py",
    "/x/torch/a.py",
    "/site-packages/torch/a.py",
    "torch/a.py",
    "é.py",
    ".py",
    r"C:\me\train.py",
    r"C:\py\Lib\site-packages\torch\a.py",
    r"C:\py\Lib\a.py",
    "/usr/lib/python3.12/a.py",
    "/x/site-packages/einops/b.py",
    "/x/site-packages/timm/models/c.py",
    "/x/dist-packages/t/modeling_d.py",
    "/tmp/torchinductor_me/e.py",
)
FRAMES = st.fixed_dictionaries(
    {
        "name": st.sampled_from(
            ["main", "at::_ops::mul_Tensor::call(x)", "at::_ops::add", "é\N{PARTY POPPER}"]
        ),
        "filename": st.sampled_from(FILES),
    },
    optional={"line": st.integers(0, 70_000), "fx_node": st.none() | st.floats()},
)
POOLS = st.tuples(st.integers(0, 1), st.integers(0, 2))
#: Unused fields of an event, which may hold any value.
OTHERS = st.dictionaries(
    st.sampled_from(["compile_context", "user_metadata", "pool_id", "device_free", "new"]),
    st.none()
    | st.text(max_size=5)
    | st.booleans()
    | st.integers(-1, 9)
    | POOLS
    | st.tuples(st.integers(), st.floats())
    | st.lists(st.none()),
)
ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["## forward ##", "ProfilerStep#3", "Optimizer.step#SGD.step", "# #", "é"]),
        "stage": st.sampled_from(["START", "END", "?"]),
        "time_us": st.integers(0, 12),
        "device": st.integers(0, 2),
    },
)


@st.composite
def stacks(draw: st.DrawFn) -> list[list[Any]]:
    """Draw stacks that share frames."""
    frames = draw(st.lists(FRAMES, min_size=1, max_size=4))
    return draw(st.lists(st.lists(st.sampled_from(frames), max_size=4), min_size=1, max_size=3))


@st.composite
def events(draw: st.DrawFn, known: list[list[Any]]) -> list[dict[str, Any]]:
    """Draw consistent events, whose stacks are shared objects or separate copies."""
    found: list[dict[str, Any]] = []
    living: set[int] = set()
    freed: set[int] = set()
    for _ in range(draw(st.integers(0, 12))):
        action, addr = draw(st.sampled_from(ACTIONS)), 512 * draw(st.integers(0, 15))
        if (action == "alloc" and addr in living) or (action == "free_completed" and addr in freed):
            continue
        if action == "alloc":
            living.add(addr), freed.discard(addr)
        elif action == "free_completed":
            living.discard(addr), freed.add(addr)
        most = 512 if action in ("alloc", "free_completed") else 1 << 52
        size = draw(st.integers(0, most) | st.integers(0, min(most, 2048)))
        one = event(
            action, addr, size, draw(st.integers(0, 9)), stream=draw(st.integers(0, 2)), **draw(OTHERS)
        )
        frames = draw(st.sampled_from(known))
        one["frames"] = frames if draw(st.booleans()) else copy.deepcopy(frames)
        if draw(st.booleans()):
            del one[draw(st.sampled_from(["frames", "time_us"]))]
        found.append(one)
    return found


@st.composite
def snapshots(draw: st.DrawFn) -> dict[str, Any]:
    """Draw snapshots of up to two devices, whose segments hold the live and the older buffers."""
    known = draw(stacks())
    devices = draw(st.lists(events(known), max_size=2))
    segments = []
    for device, trace in enumerate(devices):
        last = {one["addr"]: one["action"] for one in trace if one["action"] in ("alloc", "free_completed")}
        for at in draw(st.sets(st.integers(0, 3))):
            blocks = []
            for address in range(2048 * at, 2048 * at + 512 * draw(st.integers(1, 4)), 512):
                states = ["inactive", "active_allocated", "active_awaiting_free", "active_pending_free"]
                state = "inactive" if last.get(address) == "free_completed" else draw(st.sampled_from(states))
                blocks.append((address, 512, draw(st.integers(0, 512)), state))
            more = {"frames": draw(st.sampled_from(known)), "is_expandable": draw(st.booleans())}
            if draw(st.booleans()):
                more["segment_pool_id"] = draw(POOLS)
            made = segment(*blocks, device=device) | more
            for block in made["blocks"]:
                if draw(st.booleans()):
                    block["frames"] = draw(st.sampled_from(known))
            segments.append(made)
    notes = draw(st.lists(ANNOTATIONS, max_size=6))
    return snapshot(*devices, segments=segments, external_annotations=notes)


TEXTS = ("action", "alloc", "free_requested", "free_completed", "addr", "size", "stream", "time_us", "frames")
FRAME_TEXTS = ("name", "filename", "line", "at::_ops::mul_Tensor::call(x)", "??", "/home/me/train.py")
DEPTH = 36  #: frames of a stack


def write_large(path: Path, count: int, *, shared: bool) -> None:
    """Write a snapshot of events with stacks like the pickler in C; 2000 buffers are alive.

    All stacks share their frames, as PyTorch writes them, or each stack has separate frames, which makes the
    file four times as large.
    """
    texts = {text: b"h" + bytes([at]) for at, text in enumerate((*TEXTS, *FRAME_TEXTS))}
    frames = [_frame(texts, line) for line in range(DEPTH * 50)]
    with path.open("wb") as file:
        file.write(b"\x80\x04}(" + _text("texts") + b"](")
        file.write(b"".join(_text(text) + b"\x94" for text in texts) + b"e" + _text("pool") + b"](")
        file.write(b"".join(frames) + b"e" + _text("segments") + b"]" + _text("device_traces") + b"](](")
        if shared:
            frames = [b"j" + (len(texts) + at).to_bytes(4, "little") for at in range(len(frames))]
        stacks = [b"]\x94(" + b"".join(frames[at : at + DEPTH]) + b"e" for at in range(0, len(frames), DEPTH)]
        for at in range(count):
            kind, buffer = (
                ("alloc", "free_requested", "free_completed")[at % 3],
                at // 3 + (at % 3 == 0) * 2000,
            )
            file.write(_large_event(texts, kind, buffer, at, stacks[at % 47]))
            if at % 1000 == 999:
                file.write(b"e(")
        file.write(b"eeu.")


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _frame(texts: dict[str, bytes], line: int) -> bytes:
    name, file = ("main", "/home/me/train.py") if line % DEPTH == DEPTH - 1 else (FRAME_TEXTS[3], "??")
    name_text = texts.get(name, _text(name))
    where = texts["filename"] + texts[file] + texts["line"] + b"M" + line.to_bytes(2, "little")
    return b"}\x94(" + texts["name"] + name_text + where + b"u"


def _large_event(texts: dict[str, bytes], kind: str, buffer: int, time: int, stack: bytes) -> bytes:
    numbers = (
        texts["addr"] + b"\x8a\x06" + (7 << 40 | buffer << 9).to_bytes(6, "little"),
        texts["size"] + b"J" + (buffer % 500).to_bytes(4, "little"),
        texts["stream"] + b"K\x00",
        texts["time_us"] + b"\x8a\x07" + (1_700_000_000_000_000 + time).to_bytes(7, "little"),
    )
    return b"}\x94(" + texts["action"] + texts[kind] + b"".join(numbers) + texts["frames"] + stack + b"u"
