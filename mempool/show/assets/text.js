// Numbers and buffers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]

function binary(bytes) {
  let unit = 0, value = bytes
  for (; Math.abs(value) >= 1024 && unit < UNITS.length - 1; unit++) value /= 1024
  return unit ? `${value.toFixed(2)} ${UNITS[unit]}` : `${value} B`
}

const plain = (number) => Math.round(number).toLocaleString("en-US")

// What logical time counts.
const ticks = (timeline) => timeline.ticks ?? (timeline.period ? "allocations" : "events")

function duration(ns) {
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]
  const [scale, unit] = units.find(([scale]) => ns >= scale) ?? [1, "ns"]
  return `${(ns / scale).toPrecision(3)} ${unit}`
}

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

// What is known about a piece, as pairs of label and text.
function described(timeline, view, piece) {
  const {start, end, size, row, stream, streams, ids, operation, frame, clock, parts} = timeline
  const buffer = bufferOf(timeline, piece)
  const called = `#${row[buffer]}` + (ids ? ` ${ids[buffer]}` : "")
  const lines = [["buffer", called], ["size", `${binary(size[buffer])} (${plain(size[buffer])} B)`]]
  const length = end[piece] - start[piece]
  const lasts = clock ? `, about ${duration(clockAt(timeline, end[piece]) - clockAt(timeline, start[piece]))}` : ""
  const when = `${plain(start[piece])} to ${plain(end[piece])}, ${plain(length)} ${ticks(timeline)}${lasts}`
  lines.push([view.moved ? "on the device" : parts ? "part of its lifetime" : "lifetime", when])
  lines.push(...journeys(timeline, view, piece))
  if (operation?.of[buffer] >= 0) lines.push(["operation", operation.names[operation.of[buffer]]])
  if (frame?.of[buffer] >= 0) lines.push(["frame", frame.names[frame.of[buffer]]])
  if (stream[buffer] >= 0) lines.push(["stream", streams[stream[buffer]]])
  if (view.address[piece] >= 0) {
    const real = realAddress(view, view.address[piece])
    lines.push(view.offsets ? ["offset", real.toLocaleString("en-US")] : ["address", `0x${real.toString(16)}`])
  }
  return lines
}
