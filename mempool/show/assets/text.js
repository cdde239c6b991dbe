// Buffers as people read them.

// What logical time counts.
const ticks = (timeline) => timeline.ticks ?? (timeline.period ? "allocations" : "events")

// How a piece came from the host and goes there, as pairs.
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

// The lines of a buffer's stack, innermost first; none where it is unknown.
function stackOf({stack}, buffer) {
  return Array.from(stack?.table[stack.of[buffer]] ?? [], (line) => stack.names[line])
}

// When a piece is alive, as a pair.
function lifetime(timeline, view, piece) {
  const {start, end, clock, parts, cut, since} = timeline, length = end[piece] - start[piece]
  const before = cut && start[piece] === since
  const lasts = clock && !before ? `, about ${duration(clockAt(timeline, end[piece]) - clockAt(timeline, start[piece]))}` : ""
  const when = before ? `from before the recording to ${plain(end[piece])}`
    : `${plain(start[piece])} to ${plain(end[piece])}, ${plain(length)} ${ticks(timeline)}${lasts}`
  return [view.moved ? "on the device" : parts ? "part of its lifetime" : "lifetime", when]
}

// What is known about a piece, as pairs of label and text.
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
