// Timelines and views as columns, and queries on them that need no drawing.

function timelineOf(said, planes) {
  const open = (name) => said[name] && column(planes, said[name])
  const start = open("start"), end = open("length")
  for (let i = 0; i < end.length; i++) end[i] += start[i]
  const named = (one) => one && {names: one.names, of: column(planes, one.of)}
  const curve = (one) => one && {time: column(planes, one.time), bytes: column(planes, one.bytes)}
  return {
    ...said, start, end, size: open("size"), row: open("row"), owner: open("owner"), stream: open("stream"),
    operation: named(said.operation), frame: named(said.frame), module: named(said.module),
    category: named(said.category), small: curve(said.small),
    stack: said.stack && stacksOf(said.stack, planes), pool: named(said.pool), notes: notesOf(said.notes, planes),
    clock: said.clock && said.clock.map((one) => column(planes, one)),
    load: {...curve(said.load), peak: said.load.peak},
  }
}

// Stacks as lists of indices into names, innermost first, and the stack of each buffer, -1 where unknown.
function stacksOf({names, of, depth, lines}, planes) {
  const all = column(planes, lines), table = []
  let from = 0
  for (const count of column(planes, depth)) table.push(all.subarray(from, from += count))
  return {names, of: column(planes, of), table}
}

function viewOf(said, planes, timeline) {
  const segments = {}, address = column(planes, said.address)
  const end = address.map((low, piece) => low + timeline.size[bufferOf(timeline, piece)])
  for (const name in said.segments) segments[name] = column(planes, said.segments[name])
  return {
    ...said, segments, address, end,
    regions: said.regions.map((one) => column(planes, one)),
    rest: said.rest && {...said.rest, of: column(planes, said.rest.of)},
  }
}

const bufferOf = (timeline, piece) => timeline.owner ? timeline.owner[piece] : piece

// The last index whose value is at most x, at least 0; values ascend.
function lastAtMost(values, x) {
  let low = 0, high = values.length
  while (low < high) {
    const middle = (low + high) >> 1
    if (values[middle] <= x) low = middle + 1
    else high = middle
  }
  return Math.max(low - 1, 0)
}

function realAddress(view, drawn) {
  const at = lastAtMost(view.regions[0], drawn)
  return BigInt(view.regions[1][at]) + BigInt(drawn - view.regions[0][at])
}

// The clock in ns at a logical time, interpolated between known times.
function clockAt({clock}, time) {
  const [times, ns] = clock
  const at = Math.min(lastAtMost(times, time), times.length - 2)
  const part = (time - times[at]) / (times[at + 1] - times[at])
  return ns[at] + Math.min(Math.max(part, 0), 1) * (ns[at + 1] - ns[at])
}

// Corners of a step function whose value holds from each time until the next.
function stairs({time, bytes}) {
  const corners = {time: [], bytes: []}
  for (let k = 0; k < time.length; k++) {
    corners.time.push(time[k], time[k])
    corners.bytes.push(k ? bytes[k - 1] : 0, bytes[k])
  }
  return corners
}

// Bytes held by segments over time, as corners of steps; a plan holds the arena throughout.
function reservedOver(view, timeline) {
  const {load} = timeline, last = load.time.length - 1
  if (view.reserved && last >= 0)
    return {time: [load.time[0], load.time[last]], bytes: [view.reserved, view.reserved]}
  const {size, start, end} = view.segments
  const changes = Array.from(size, (bytes, k) => [start[k], bytes])
    .concat(Array.from(size, (bytes, k) => [end[k], -bytes])).sort((a, b) => a[0] - b[0])
  const time = [], bytes = []
  let sum = 0
  for (const [when, change] of changes) {
    time.push(when, when)
    bytes.push(sum, sum += change)
  }
  return {time, bytes}
}
