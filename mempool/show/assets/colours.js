// Colours distinguishable with any colour vision: those of Okabe and Ito (Color Universal Design, 2008), each
// plain and dark, in two shades for neighbours.

const HUES = [[230, 159, 0], [86, 180, 233], [0, 158, 115], [213, 94, 0], [0, 114, 178], [204, 121, 167], [240, 228, 66]]
const UNKNOWN = [153, 153, 153]
const OWNER_COLOURS = 2 * HUES.length, DIM = 2 * OWNER_COLOURS + 2

// All colours of a picture, as CSS and as the numbers of an image; the last colour is for buffers outside the
// search.
function palette(dark) {
  const owners = [...HUES, ...HUES.map((hue) => hue.map((part) => Math.round(part * 0.62))), UNKNOWN]
  const colours = owners.flatMap((hue) => [hue, hue.map((part) => Math.round(part * 0.84))])
  colours.push(dark ? [58, 63, 70] : [222, 225, 229])
  const number = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0
  return {
    css: colours.map(([r, g, b]) => `rgb(${r},${g},${b})`),
    number: Uint32Array.from(colours, number),
    edge: Uint32Array.from(colours, (one) => number(one.map((part) => part * 0.6 | 0))),
  }
}

// Index of an owner's colour in a palette: the owners of the highest ranks differ, later ones repeat the
// colours.
const colourOf = (owners, key) => 2 * (key === owners.unknown ? OWNER_COLOURS : key % OWNER_COLOURS)

// Colour index of each buffer.
function coloured(timeline, owners, matches) {
  const {row} = timeline, colour = new Uint8Array(row.length)
  for (let i = 0; i < colour.length; i++)
    colour[i] = matches && !matches[i] ? DIM : colourOf(owners, owners.of[i]) + (row[i] & 1)
  return colour
}
