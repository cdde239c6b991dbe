// The stacked picture: at each moment the live buffers on top of each other, each as high as its size.

// Live bytes of the drawn pieces, from each time until the next.
function stepsOf(timeline) {
  if (timeline.steps) return timeline.steps
  const {start, end, size} = timeline, count = start.length
  const ends = Uint32Array.from(end, (_, i) => i).sort((a, b) => end[a] - end[b])
  const time = [], bytes = []
  let born = 0, sum = 0
  for (let dead = 0; dead < count; ) {
    const now = born < count ? Math.min(start[born], end[ends[dead]]) : end[ends[dead]]
    for (; born < count && start[born] === now; born++) sum += size[bufferOf(timeline, born)]
    for (; dead < count && end[ends[dead]] === now; dead++) sum -= size[bufferOf(timeline, ends[dead])]
    time.push(now)
    bytes.push(sum)
  }
  return timeline.steps = {time, bytes}
}

// The moment that each column of pixels shows: the column's time with most live bytes, so that no peak is
// lost.
function momentsOf(timeline, {left, right, width}) {
  const {time, bytes} = stepsOf(timeline), step = (right - left) / width
  const moments = new Float64Array(width)
  let at = time[0] <= left ? lastAtMost(time, left) : -1  // -1: before the first time
  for (let x = 0; x < width; x++) {
    const from = left + x * step, to = from + step
    while (at + 1 < time.length && time[at + 1] <= from) at += 1
    let most = at
    for (; at + 1 < time.length && time[at + 1] < to; at++) if (bytes[at + 1] > (bytes[most] ?? 0)) most = at + 1
    moments[x] = Math.max(time[most] ?? from, from)
  }
  return moments
}

// Order of the pieces from bottom to top: search matches first, so that their sum can be read; then in order
// of allocation, or grouped by owner, the largest owner lowest.
function orderOf(timeline, owners, matches) {
  const count = owners?.count ?? 1, next = new Uint32Array(2 * count + 1), order = new Uint32Array(timeline.start.length)
  const key = (i) => {
    const buffer = bufferOf(timeline, i)
    return (owners?.of[buffer] ?? 0) + (matches && !matches[buffer] ? count : 0)
  }
  for (let i = 0; i < order.length; i++) next[key(i) + 1] += 1
  for (let k = 0; k < 2 * count; k++) next[k + 1] += next[k]
  for (let i = 0; i < order.length; i++) order[next[key(i)]++] = i
  return order
}

// The first index whose value is at least x; values ascend.
function firstAtLeast(values, x) {
  let low = 0, high = values.length
  while (low < high) {
    const middle = (low + high) >> 1
    if (values[middle] < x) low = middle + 1
    else high = middle
  }
  return low
}

// Draws pieces in an order of `orderOf` into `image`, and the index of each pixel's piece, plus one, into
// `owner`. Pieces that are not drawn one by one are a grey band on top.
function stacked(timeline, colour, palette, window, order) {
  const {bottom, top, width, height} = window, {start, end, size, small} = timeline, up = height / (top - bottom)
  const drawn = {...window, image: new Uint32Array(width * height), owner: new Int32Array(width * height), large: []}
  const moments = drawn.moments = momentsOf(timeline, window)
  const reach = new Float64Array(width).fill(-bottom * up)  // fill height of each column, in pixels
  for (const i of order) {
    if (end[i] <= moments[0] || start[i] > moments[width - 1]) continue
    const buffer = bufferOf(timeline, i), shade = colour[buffer], tall = size[buffer] * up
    const stop = firstAtLeast(moments, end[i])
    for (let x = firstAtLeast(moments, start[i]); x < stop; x++) {
      const low = Math.floor(reach[x] + 0.5), high = Math.floor((reach[x] += tall) + 0.5)
      if (low < high) pile(drawn, x, low, high, i + 1, palette.number[shade], palette.edge[shade])
    }
  }
  const grey = palette.number[DIM]
  if (small) for (let x = 0; x < width; x++) {
    const bytes = moments[x] < small.time[0] ? 0 : small.bytes[lastAtMost(small.time, moments[x])]
    pile(drawn, x, Math.round(reach[x]), Math.round(reach[x] + bytes * up), 0, grey, grey)
  }
  return drawn
}

// Fill a part of a column of pixels, clipped to the window.
function pile({image, owner, width, height}, x, low, high, piece, plain, edge) {
  const y0 = Math.max(low, 0), stop = Math.min(high, height) * width
  for (let at = y0 * width + x; at < stop; at += width) {
    image[at] = plain
    owner[at] = piece
  }
  if (high - low > 3 && low >= 0 && low < height) image[y0 * width + x] = edge
}

// Outline of a piece in the stacked picture: the corners of the lower edge and, backwards, of the upper edge.
function outlineOf(timeline, piece, {moments, left, right, width}, order) {
  const {start, end, size} = timeline
  const from = firstAtLeast(moments, start[piece]), to = firstAtLeast(moments, end[piece])
  const below = new Float64Array(Math.max(to - from, 0))
  for (const i of order) {
    if (i === piece) break
    const x1 = Math.min(firstAtLeast(moments, end[i]), to), bytes = size[bufferOf(timeline, i)]
    for (let x = Math.max(firstAtLeast(moments, start[i]), from); x < x1; x++) below[x - from] += bytes
  }
  const time = [], bytes = [], edge = (x) => left + x * (right - left) / width
  below.forEach((low, k) => {
    if (k > 0 && low === below[k - 1]) time.pop(), bytes.pop()
    else time.push(edge(from + k)), bytes.push(low)
    time.push(edge(from + k + 1))
    bytes.push(low)
  })
  const high = size[bufferOf(timeline, piece)]
  return {time: [...time, ...[...time].reverse()], bytes: [...bytes, ...[...bytes].reverse().map((low) => low + high)]}
}
