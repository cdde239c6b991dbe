// Owners of buffers: the same kinds, names and order for colours, for the table and for searches.

const NAMED_KINDS = ["category", "frame", "module", "operation", "pool"]

// Kinds of owners that a timeline has data for.
function kindsOf(timeline) {
  const named = NAMED_KINDS.filter((kind) => timeline[kind])
  return [...named, ...(timeline.streams.length > 1 ? ["stream"] : []), "size", "buffer"]
}

// The first kind that knows the owner of at least half of the peak's bytes; else the kind that knows most.
function usualKind(timeline) {
  const [peak, bytes] = timeline.load.peak
  const named = NAMED_KINDS.filter((kind) => timeline[kind]).map((kind) => {
    const groups = aliveAt(timeline, ownersOf(timeline, kind), peak), owners = ownersOf(timeline, kind)
    return [kind, groups.reduce((sum, one) => sum + (one.key === owners.unknown ? 0 : one.bytes), 0)]
  }).filter(([, known]) => known > 0)
  const most = named.reduce((a, b) => b[1] > a[1] ? b : a, [null, 0])[0]
  return named.find(([, known]) => known >= bytes / 2)?.[0] ?? most ?? (timeline.streams.length > 1 ? "stream" : "size")
}

// Owners of a kind: the owner of each buffer, the name of each owner, and the owner that stands for unknown,
// or -1. Owners are sorted by bytes at the peak, then by bytes times time, most first.
function ownersOf(timeline, kind) {
  timeline.owners ??= new Map()
  const made = kind === "buffer" ? eachBuffer : ranked
  if (!timeline.owners.has(kind)) timeline.owners.set(kind, made(timeline, kind))
  return timeline.owners.get(kind)
}

function eachBuffer(timeline) {
  const {row, operation, ids} = timeline
  const called = (i) => ids?.[i] ?? operation?.names[operation.of[i]] ?? ""
  return {kind: "buffer", of: Int32Array.from(row, (_, i) => i), count: row.length, unknown: -1,
    name: (i) => `#${row[i]} ${called(i)}`.trim()}
}

function ranked(timeline, kind) {
  const {names, of} = keyed(timeline, kind), unknown = names.length
  const atPeak = new Float64Array(names.length + 1), area = new Float64Array(names.length + 1)
  const {start, end, size, load: {peak: [peak]}} = timeline
  const key = (i) => of[i] < 0 ? unknown : of[i]
  for (let i = 0; i < start.length; i++) {
    const buffer = bufferOf(timeline, i), owner = key(buffer)
    area[owner] += size[buffer] * (end[i] - start[i])
    if (start[i] <= peak && peak < end[i]) atPeak[owner] += size[buffer]
  }
  const used = new Uint8Array(names.length + 1)
  for (let i = 0; i < size.length; i++) used[key(i)] = 1
  const order = Array.from(used, (_, k) => k).filter((k) => used[k])
  order.sort((a, b) => atPeak[b] - atPeak[a] || area[b] - area[a])
  const rank = new Int32Array(used.length).fill(-1)
  order.forEach((owner, place) => { rank[owner] = place })
  const name = (place) => order[place] === unknown ? "(unknown)" : names[order[place]]
  return {kind, of: Int32Array.from(size, (_, i) => rank[key(i)]), count: order.length, unknown: rank[unknown], name}
}

// Names of a kind, and the index of each buffer's name, -1 for a buffer without one.
function keyed(timeline, kind) {
  if (kind === "stream") return {names: timeline.streams, of: timeline.stream}
  if (kind !== "size") return timeline[kind]
  const sizes = [...new Set(timeline.size)], at = new Map(sizes.map((size, k) => [size, k]))
  return {names: sizes.map((size) => `${binary(size)} (${plain(size)} B)`), of: timeline.size.map((size) => at.get(size))}
}

// Live bytes and buffers at a time, by owner: most bytes first.
function aliveAt(timeline, owners, time) {
  const {start, end, size} = timeline
  const bytes = new Float64Array(owners.count), count = new Int32Array(owners.count)
  for (let i = 0; i < start.length && start[i] <= time; i++) {
    if (end[i] <= time) continue
    const buffer = bufferOf(timeline, i)
    bytes[owners.of[buffer]] += size[buffer]
    count[owners.of[buffer]] += 1
  }
  const alive = []
  for (let key = 0; key < owners.count; key++) if (count[key]) alive.push({key, bytes: bytes[key], count: count[key]})
  return alive.sort((a, b) => b.bytes - a.bytes || a.key - b.key)
}

// Search text that matches the buffers of one owner and no others.
function searchOf({kind, name}, key) {
  return kind === "buffer" ? name(key).split(" ", 1)[0] : `${kind}=${name(key)}`
}
