// The two pictures behind one interface: the top of all bytes, the drawing of a window, and the place of a
// piece.

const MOST_RECTANGLES = 500

const addressPicture = {
  label: "addresses",
  top: ({view}) => view.top,
  draw({timeline, view, colour, palette}, window) {
    const drawn = raster(timeline, view, colour, palette, window, MOST_RECTANGLES)
    underlay(drawn, view)
    return drawn
  },
  rectangles: ({timeline, view}, pieces) => rectanglesOf(timeline, view, pieces),
  segments: ({view}, window) => segmentsIn(view.segments, window),
  refused: ({view}, lines) => ({...lines, low: lines.low.map(() => 0), high: lines.low.map(() => view.top)}),
  has: ({view}, piece) => view.address[piece] >= 0,
  contains: ({view}, piece, bytes) => view.address[piece] <= bytes && bytes < view.end[piece],
  outline({timeline: {start, end}, view}, piece) {
    const [left, right, bottom, top] = [start[piece], end[piece], view.address[piece], view.end[piece]]
    return {time: [left, right, right, left], bytes: [bottom, bottom, top, top]}
  },
}

const stackPicture = {
  label: "bytes alive",
  top: ({reach, held}) => held <= 1.5 * reach ? held : reach,  // show the reserved line, unless far above
  draw: ({timeline, colour, palette, order}, window) => stacked(timeline, colour, palette, window, order),
  rectangles: ({timeline, view}) => rectanglesOf(timeline, view, []),
  segments: (show, window) => segmentsIn({address: [], size: [], start: [], end: []}, window),
  refused: (show, lines) => lines,
  has: () => true,
  contains: () => true,
  outline: ({timeline, drawn, order}, piece) => outlineOf(timeline, piece, drawn, order),
}

function rectanglesOf({start, end}, view, pieces) {
  return {
    left: pieces.map((i) => start[i]), right: pieces.map((i) => end[i]), bottom: pieces.map((i) => view.address[i]),
    top: pieces.map((i) => view.end[i]),
  }
}

function segmentsIn({address, size, start, end}, {left, right, bottom, top}) {
  const seen = []
  for (let k = 0; k < size.length && seen.length < MOST_RECTANGLES; k++)
    if (start[k] < right && end[k] > left && address[k] < top && address[k] + size[k] > bottom) seen.push(k)
  return {
    left: seen.map((k) => start[k]), right: seen.map((k) => end[k]), bottom: seen.map((k) => address[k]),
    top: seen.map((k) => address[k] + size[k]),
  }
}
