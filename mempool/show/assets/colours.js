// Colours that are told apart with any colour vision: those of Okabe and Ito (Color Universal Design, 2008), in two shades.

const HUES = [[230, 159, 0], [86, 180, 233], [0, 158, 115], [240, 228, 66], [0, 114, 178], [213, 94, 0],
  [204, 121, 167], [153, 153, 153]]
const SHADES = 2 * HUES.length, DIM = SHADES

// All colours a picture has, as CSS and as the numbers that an image holds; the last is of what no search means.
function palette(dark) {
  const colours = HUES.flatMap((hue) => [hue, hue.map((part) => Math.round(part * 0.78))])
  colours.push(dark ? [58, 63, 70] : [222, 225, 229])
  return {
    css: colours.map(([r, g, b]) => `rgb(${r},${g},${b})`),
    number: Uint32Array.from(colours, ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0),
    edge: Uint32Array.from(colours, (one) => {
      const [r, g, b] = one.map((part) => part * 0.6 | 0)
      return (255 << 24 | b << 16 | g << 8 | r) >>> 0
    }),
  }
}

// Which of the colours each buffer has.
function coloured(timeline, by, matches) {
  const {row, stream, operation, size} = timeline
  const colour = new Uint8Array(size.length)
  for (let i = 0; i < colour.length; i++) {
    const neighbour = row[i] & 1
    if (matches && !matches[i]) colour[i] = DIM
    else if (by === "stream") colour[i] = (stream[i] < 0 ? 7 : stream[i] % 7) * 2 + neighbour
    else if (by === "operation") colour[i] = (operation.of[i] < 0 ? 7 : operation.of[i] % 7) * 2 + neighbour
    else colour[i] = (row[i] * 3 % 7) * 2 + (row[i] >> 3 & 1)
  }
  return colour
}
