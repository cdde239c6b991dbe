// Refused requests, marks and named ranges beside the buffers: a strip with nested ranges, and lines at
// out-of-memory errors.

const ROW_PX = 17, MOST_DEPTH = 6, LETTER_PX = 6.6, MOST_DRAWN = 1000

function notesOf({refused, marks, ranges}, planes) {
  const open = (one) => one && {names: one.names, of: column(planes, one.of)}
  const columns = (said, ...names) => Object.fromEntries(names.map((name) => [name, column(planes, said[name])]))
  return {
    refused: {...columns(refused, "time", "asked", "free"), count: refused.count, operation: open(refused.operation),
      frame: open(refused.frame), stack: refused.stack && stacksOf(refused.stack, planes)},
    marks: {...columns(marks, "time"), name: open(marks.name)},
    ranges: {...columns(ranges, "begin", "end", "depth"), name: open(ranges.name)},
  }
}

const nameOf = (named, at) => named?.names[named.of[at]] ?? ""

// Rows of a strip: one above 0 for marks, if any exist, and below 0 one for each depth of ranges.
function rowsOf({marks, ranges}) {
  const deepest = ranges.depth.reduce((a, b) => Math.max(a, b), -1)
  return {above: marks.time.length ? 1 : 0, below: Math.min(deepest + 1, MOST_DEPTH)}
}

// Content of a strip in a window of time; names where they fit; a screen pixel is `pixel` units of time.
function stripIn({marks, ranges}, {start, end}, pixel, colours) {
  const boxes = {left: [], right: [], bottom: [], top: [], colour: []}
  const lines = {time: []}, texts = {time: [], row: [], text: []}
  const write = (time, row, text, until) => {
    const room = Math.floor((until - time) / pixel / LETTER_PX) - 1
    if (room < 3 || !text) return
    texts.time.push(time + 3 * pixel); texts.row.push(row)
    texts.text.push(text.length > room ? `${text.slice(0, room - 1)}…` : text)
  }
  for (let k = 0; k < ranges.begin.length && boxes.left.length < MOST_DRAWN; k++) {
    const [begin, until, depth] = [ranges.begin[k], ranges.end[k], ranges.depth[k]]
    if (depth >= MOST_DEPTH || begin >= end || until <= start) continue
    boxes.left.push(begin); boxes.right.push(until); boxes.bottom.push(-depth - 0.94); boxes.top.push(-depth - 0.06)
    boxes.colour.push(colours[2 * ((ranges.name?.of[k] ?? 0) % OWNER_COLOURS)])
    write(Math.max(begin, start), -depth - 0.5, nameOf(ranges.name, k), Math.min(until, end))
  }
  for (let k = 0; k < marks.time.length && lines.time.length < MOST_DRAWN; k++) {
    if (marks.time[k] < start || marks.time[k] >= end) continue
    lines.time.push(marks.time[k])
    write(marks.time[k], 0.5, nameOf(marks.name, k), Math.min(marks.time[k + 1] ?? end, end))
  }
  return {boxes, lines, texts}
}

// Description of a point in a strip, as pairs; null where the strip is empty.
function noteAt({timeline, timeline: {notes: {marks, ranges}}}, time, row, pixel) {
  if (row >= 0) {
    const near = marks.time.findIndex((when) => Math.abs(when - time) < 5 * pixel)
    return near < 0 ? null : [["mark", nameOf(marks.name, near)], ["at", plain(marks.time[near])]]
  }
  const at = rangeAt(ranges, time, Math.floor(-row))
  if (at < 0) return null
  const {begin, end} = ranges, {clock} = timeline
  const lasts = clock ? `, about ${duration(clockAt(timeline, end[at]) - clockAt(timeline, begin[at]))}` : ""
  return [["range", nameOf(ranges.name, at)], ["time", `${plain(begin[at])} to ${plain(end[at])}${lasts}`]]
}

function rangeAt({begin, end, depth}, time, row) {
  return begin.findIndex((from, k) => from <= time && time < end[k] && depth[k] === row)
}

// Lines of refused requests, from the live bytes upwards by the requested bytes.
function refusedLines({load, notes: {refused: {time, asked}}}) {
  const low = Array.from(time, (when) => load.bytes[lastAtMost(load.time, when)] ?? 0)
  return {time: Array.from(time), low, high: low.map((bytes, k) => bytes + asked[k])}
}
