// Readable descriptions of buffers.

// Unit of logical time.
const ticks = (timeline) => timeline.ticks ?? (timeline.period ? "allocations" : "events")

// A piece's reload from the host and offload to the host, as pairs of label and text.
function journeys(timeline, view, piece) {
  const {before, after} = absencesOf(timeline, view, piece), {moved} = view, lines = []
  const at = (time) => [plain(time), running(timeline, time)].filter(Boolean).join(" ")
  if (before >= 0) lines.push(["came back", `asked for at ${at(moved.back[before])}, used by ${at(moved.use[before])}`])
  if (after >= 0) {
    const out = moved.copied[after] ? `copied from ${at(moved.out[after])}` : "the host has a copy"
    lines.push(["goes to the host", `${out}, gone at ${at(moved.gone[after])}, back at ${at(moved.back[after])}`])
  }
  return lines
}

// Lines of a buffer's stack, innermost first; none if the stack is unknown.
function stackOf({stack}, buffer) {
  return Array.from(stack?.table[stack.of[buffer]] ?? [], (line) => stack.names[line])
}

// Lifetime of a piece, as a pair of label and text.
function lifetime(timeline, view, piece) {
  const {start, end, clock, parts, cut, since} = timeline, length = end[piece] - start[piece]
  const before = cut && start[piece] === since
  const lasts = clock && !before ? `, about ${duration(clockAt(timeline, end[piece]) - clockAt(timeline, start[piece]))}` : ""
  const when = before ? `from before the recording to ${plain(end[piece])}`
    : `${plain(start[piece])} to ${plain(end[piece])}, ${plain(length)} ${ticks(timeline)}${lasts}`
  return [view.moved ? "on the device" : parts ? "part of its lifetime" : "lifetime", when]
}

// Description of a piece, as pairs of label and text.
function described(timeline, view, piece) {
  const {size, row, stream, streams, ids} = timeline
  const buffer = bufferOf(timeline, piece)
  const called = `#${row[buffer]}` + (ids ? ` ${ids[buffer]}` : "")
  const lines = [["buffer", called], ["size", `${binary(size[buffer])} (${plain(size[buffer])} B)`]]
  if (!timeline.still) lines.push(lifetime(timeline, view, piece))
  lines.push(...journeys(timeline, view, piece))
  for (const kind of ["category", "module", "operation", "frame", "pool"])
    if (timeline[kind]?.of[buffer] >= 0) lines.push([kind, timeline[kind].names[timeline[kind].of[buffer]]])
  if (stream[buffer] >= 0) lines.push(["stream", streams[stream[buffer]]])
  if (view.address[piece] >= 0) {
    const real = realAddress(view, view.address[piece])
    lines.push(view.offsets ? ["offset", real.toLocaleString("en-US")] : ["address", `0x${real.toString(16)}`])
  }
  stackOf(timeline, buffer).forEach((line, depth) => lines.push([depth ? "" : "stack", line]))
  return lines
}
