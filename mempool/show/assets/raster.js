// Level of detail: every piece in a window as pixels, and the largest pieces as rectangles.

// Draws pieces into `image`, and the index of each pixel's piece, plus one, into `owner`. Pieces do not
// overlap, so the time is proportional to the pixels plus the pieces. Pieces of a pixel or less are drawn
// second, on free pixels only. Also returns the `most` largest pieces among those that are a few pixels wide
// and high.
function raster(timeline, view, colour, palette, window, most) {
  const {left, right, bottom, top, width, height} = window, {start, end} = timeline, {address, end: high} = view
  const image = new Uint32Array(width * height), owner = new Int32Array(width * height)
  const across = width / (right - left), up = height / (top - bottom)
  const box = (i) => {  // x0, x1, y0, y1, in pixels
    at[0] = Math.max(Math.floor((start[i] - left) * across), 0)
    at[1] = Math.min(Math.round((end[i] - left) * across), width)
    at[2] = Math.max(Math.floor((address[i] - bottom) * up), 0)
    at[3] = Math.min(Math.round((high[i] - bottom) * up), height)
  }
  const at = new Int32Array(4), small = new Int32Array(start.length), areas = []
  let count = 0
  for (let i = 0; i < start.length && start[i] < right; i++) {
    if (end[i] <= left || address[i] < 0 || address[i] >= top || high[i] <= bottom) continue
    box(i)
    const wide = at[1] - at[0], tall = at[3] - at[2]
    if (wide <= 1 || tall <= 1) small[count++] = i
    else {
      const shade = colour[bufferOf(timeline, i)]
      fill(image, owner, width, i, at, palette.number[shade], palette.edge[shade])
      if (wide > 5 && tall > 5) areas.push([wide * tall, i])
    }
  }
  for (let k = 0; k < count; k++) {
    box(small[k])
    fillFree(image, owner, width, height, small[k], at, palette.number[colour[bufferOf(timeline, small[k])]])
  }
  if (areas.length > most) areas.sort((a, b) => b[0] - a[0]).length = most
  return {...window, image, owner, large: areas.map((one) => one[1])}
}

function fill(image, owner, width, piece, [x0, x1, y0, y1], colour, edge) {
  const framed = x1 - x0 >= 5 && y1 - y0 >= 5
  for (let y = y0; y < y1; y++) {
    const from = y * width + x0, to = y * width + x1
    owner.fill(piece + 1, from, to)
    image.fill(framed && y === y0 ? edge : colour, from, to)
    if (framed) image[to - 1] = edge
  }
}

// Fill the free pixels of a piece that is a pixel high or wide. If both ends and the middle are taken, skip
// the piece: most of the other pixels are taken too.
function fillFree(image, owner, width, height, piece, [x0, right, y0, top], colour) {
  if (x0 >= width || y0 >= height) return
  const x1 = Math.max(right, x0 + 1), y1 = Math.max(top, y0 + 1)
  const middle = ((y0 + y1) >> 1) * width + ((x0 + x1) >> 1)
  if (owner[y0 * width + x0] && owner[(y1 - 1) * width + x1 - 1] && owner[middle]) return
  for (let y = y0; y < y1; y++)
    for (let at = y * width + x0; at < y * width + x1; at++)
      if (!owner[at]) {
        owner[at] = piece + 1
        image[at] = colour
      }
}

// Draw the coarse picture of all other pieces below the drawn ones: grey, the fuller the darker.
function underlay({image, owner, left, right, bottom, top, width, height}, view) {
  const {rest} = view
  if (!rest) return
  const [rows, columns] = rest.shape
  for (let y = 0; y < height; y++) {
    const row = Math.floor((bottom + (y + 0.5) / height * (top - bottom)) / view.top * rows)
    if (row < 0 || row >= rows) continue
    for (let x = 0; x < width; x++) {
      const time = left + (x + 0.5) / width * (right - left)
      const cell = Math.floor((time - rest.from) / (rest.to - rest.from) * columns)
      if (owner[y * width + x] || cell < 0 || cell >= columns) continue
      image[y * width + x] = (rest.of[row * columns + cell] << 24 | 0x808080) >>> 0
    }
  }
}
