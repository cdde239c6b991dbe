// Readable descriptions of buffers.

// Unit of logical time.
const ticks = (timeline) => timeline.period ? "allocations" : "events"

// Lines of a buffer's stack, innermost first; none if the stack is unknown.
function stackOf({stack}, buffer) {
  return Array.from(stack?.table[stack.of[buffer]] ?? [], (line) => stack.names[line])
}

// Lifetime of a piece, as a pair of label and text.
function lifetime(timeline, piece) {
  const {start, end, clock, parts, cut, since} = timeline, length = end[piece] - start[piece]
  const before = cut && start[piece] === since
  const lasts = clock && !before ? `, about ${duration(clockAt(timeline, end[piece]) - clockAt(timeline, start[piece]))}` : ""
  const when = before ? `from before the recording to ${plain(end[piece])}`
    : `${plain(start[piece])} to ${plain(end[piece])}, ${plain(length)} ${ticks(timeline)}${lasts}`
  return [parts ? "part of its lifetime" : "lifetime", when]
}

// Description of a piece, as pairs of label and text.
function described(timeline, view, piece) {
  const {size, row, stream, streams, ids} = timeline
  const buffer = bufferOf(timeline, piece)
  const called = `#${row[buffer]}` + (ids ? ` ${ids[buffer]}` : "")
  const lines = [["buffer", called], ["size", `${binary(size[buffer])} (${plain(size[buffer])} B)`]]
  if (!timeline.still) lines.push(lifetime(timeline, piece))
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
