// The two plots: what they show follows from the view, the ranges, the colours and the search.

const MOST_RECTANGLES = 500, MOST_ABSENCES = 300, MARGIN = 0.5, QUIET_MS = 90
// How copies to the host and from it are drawn: hatched, and marked by triangles that point up and down.
const OUT = {colour: "#d55e00", slant: "right_diagonal_line", angle: 0}
const BACK = {colour: "#0072b2", slant: "left_diagonal_line", angle: Math.PI}

class Show {
  constructor(models, timelines, views, title) {
    Object.assign(this, {models, timelines, views, title, by: "stream", dark: false, matches: null, chosen: null})
    this.tooltip = tooltipBox()
    this.listeners = []
    this.pointer = [0, 0]
    this.palette = palette(false)
    const {addresses, load} = models
    const soon = () => this.soon()
    for (const range of [addresses.x_range, addresses.y_range])
      for (const edge of ["start", "end"]) range.properties[edge].change.connect(soon)
    document.addEventListener("pointermove", (event) => { this.pointer = [event.clientX, event.clientY] }, true)
    addresses.on_event("panstart", () => { this.dragging = true })
    addresses.on_event("panend", () => { this.dragging = false; this.soon() })
    addresses.on_event("mousemove", (event) => this.hover(event.x, event.y))
    addresses.on_event("mouseleave", () => this.tooltip.hide())
    addresses.on_event("tap", (event) => this.choose(this.at(event.x, event.y), event.x))
    load.on_event("doubletap", () => this.whole())
    addresses.on_event("doubletap", () => this.whole())
    this.look(0)
  }

  get view() { return this.views[this.index] }
  get timeline() { return this.timelines[this.view.timeline] }
  tell(what) { for (const listener of this.listeners) listener(what) }

  look(index) {
    const before = this.index === undefined ? null : this.timeline
    this.index = index
    const {timeline, view, models: {curve, before: other, reserved, peak}} = this
    curve.data = stairs(timeline.load)
    other.data = stairs(timeline.before ?? {time: [], bytes: []})
    reserved.data = reservedOver(view, timeline)
    const [when, most] = timeline.load.peak
    const late = when > (this.first + this.last) / 2
    peak.data = {
      time: [when], bytes: [most], text: [`peak ${binary(most)}`], align: [late ? "right" : "left"], beside: [late ? -9 : 9],
    }
    const highest = [...reserved.data.bytes, ...other.data.bytes].reduce((a, b) => Math.max(a, b), most)
    this.models.load.x_range.setv({start: this.first, end: this.last})
    this.models.load.y_range.setv({start: 0, end: 1.15 * highest || 1})
    if (timeline !== before) {
      this.matches = this.chosen = null
      this.by = timeline.streams.length > 1 ? "stream" : "buffer"
      this.models.addresses.x_range.setv({start: this.first, end: this.last})
      this.models.addresses.below[0].axis_label = `time in ${ticks(timeline)}`
      this.moment(when)
    }
    this.models.addresses.y_range.setv({start: 0, end: 1.02 * view.top || 1})
    if (this.drawn) this.repaint()
    this.choose(this.chosen)
    this.tell("view")
  }

  get first() { return this.timeline.before ? 0 : this.timeline.load.time[0] ?? 0 }
  get last() {
    const {load, before} = this.timeline
    return Math.max(load.time.at(-1) ?? 1, before?.time.at(-1) ?? 0)
  }

  whole() {
    this.models.addresses.x_range.setv({start: this.first, end: this.last})
    this.models.addresses.y_range.setv({start: 0, end: 1.02 * this.view.top || 1})
  }

  moment(time) {
    this.time = time
    this.models.moment.location = this.models.moment_below.location = time
    this.tell("moment")
  }

  colourBy(by) { this.by = by; this.repaint() }

  search(text) {
    this.matches = matching(this.timeline, text)
    this.repaint()
  }

  repaint() {
    const by = this.by === "operation" && !this.timeline.operation?.names.length ? "buffer" : this.by
    this.colour = coloured(this.timeline, by, this.matches)
    this.refresh()
  }

  // What is drawn reaches beyond the window: a gesture moves it, and it is drawn anew when the gesture rests.
  soon() {
    clearTimeout(this.timer)
    const {x_range: x, y_range: y} = this.models.addresses, drawn = this.drawn
    const inside = drawn && x.start >= drawn.left && x.end <= drawn.right && y.start >= drawn.bottom && y.end <= drawn.top
    if (inside && this.dragging) return
    this.timer = setTimeout(() => this.refresh(), QUIET_MS)
  }

  refresh() {
    clearTimeout(this.timer)
    const {addresses, picture, large, segments} = this.models
    const {inner_width: wide, inner_height: tall, x_range, y_range} = addresses
    if (!(wide > 0 && tall > 0)) return
    const {timeline, view} = this
    const across = x_range.end - x_range.start, up = y_range.end - y_range.start
    this.drawn = raster(timeline, view, this.colour, this.palette, {
      left: x_range.start - MARGIN * across, right: x_range.end + MARGIN * across,
      bottom: y_range.start - MARGIN * up, top: y_range.end + MARGIN * up,
      width: Math.ceil(wide * (1 + 2 * MARGIN)), height: Math.ceil(tall * (1 + 2 * MARGIN)),
    }, MOST_RECTANGLES)
    underlay(this.drawn, view)
    const {left, right, bottom, top, width, height, image} = this.drawn
    const Pixels = picture.data.image[0].constructor  // of Bokeh, which does not name it
    const drawn = {
      image: [new Pixels(image.buffer, [height, width])], x: [left], y: [bottom], dw: [right - left], dh: [top - bottom],
    }
    const edges = this.edges(this.drawn.large)
    edges.colour = this.drawn.large.map((i) => this.palette.css[this.colour[bufferOf(timeline, i)]])
    edges.row = this.drawn.large.map((i) => timeline.row[bufferOf(timeline, i)])
    const {absent, copies, marks} = this.models, away = this.away()
    for (const [source, data] of [[picture, drawn], [large, edges], [segments, this.segmentEdges()],
      [absent, away.absent], [copies, away.copies], [marks, away.marks]])
      source.setv({data}, {check_eq: false})  // they differ: comparing pixels takes longer than drawing them
    this.refreshed = performance.now()
    this.tell("drawn")
  }

  edges(pieces) {
    const {timeline: {start, end}, view} = this
    return {
      left: pieces.map((i) => start[i]), right: pieces.map((i) => end[i]), bottom: pieces.map((i) => view.address[i]),
      top: pieces.map((i) => view.end[i]),
    }
  }

  segmentEdges() {
    const {segments: {address, size, start, end}} = this.view, {left, right, bottom, top} = this.drawn
    const seen = []
    for (let k = 0; k < size.length && seen.length < MOST_RECTANGLES; k++)
      if (start[k] < right && end[k] > left && address[k] < top && address[k] + size[k] > bottom) seen.push(k)
    return {
      left: seen.map((k) => start[k]), right: seen.map((k) => end[k]), bottom: seen.map((k) => address[k]),
      top: seen.map((k) => address[k] + size[k]),
    }
  }

  // Absences in view as outlines where the buffer was, its copies out and back beside them, and a mark where each is
  // asked for. The largest ones, where they are many.
  away() {
    const {view: {moved}} = this, {left, right, bottom, top} = this.drawn
    const box = () => ({left: [], right: [], bottom: [], top: [], row: []})
    const absent = box(), copies = {...box(), colour: [], slant: []}, marks = {time: [], address: [], colour: [], angle: []}
    if (!moved) return {absent, copies, marks}
    const {row, size, out, gone, back, use, left: from, found: to, copied} = moved, seen = []
    for (let k = 0; k < row.length; k++) {
      const low = Math.min(from[k], to[k]), high = Math.max(from[k], to[k]) + size[k]
      if (out[k] < right && use[k] >= left && low < top && high > bottom) seen.push(k)
    }
    if (seen.length > MOST_ABSENCES) seen.sort((a, b) => size[b] - size[a]).length = MOST_ABSENCES
    const put = (into, k, x0, x1, y) => {
      into.left.push(x0); into.right.push(x1); into.bottom.push(y); into.top.push(y + size[k]); into.row.push(row[k])
    }
    const copy = (k, x0, x1, y, how) => {
      put(copies, k, x0, x1, y)
      copies.colour.push(how.colour); copies.slant.push(how.slant)
      marks.time.push(x0); marks.address.push(y + size[k] / 2); marks.colour.push(how.colour); marks.angle.push(how.angle)
    }
    for (const k of seen) {
      put(absent, k, gone[k], back[k], from[k])
      if (copied[k]) copy(k, out[k], gone[k], from[k], OUT)
      copy(k, back[k], use[k], to[k], BACK)
    }
    return {absent, copies, marks}
  }

  // The piece at a place in time and addresses, or null: by the pixel, which may be a piece's neighbour's by rounding.
  at(time, address) {
    const {timeline: {start, end}, view, drawn} = this
    if (!drawn) return null
    const {left, right, bottom, top, width, height, owner} = drawn
    const x = Math.floor((time - left) / (right - left) * width)
    const y = Math.floor((address - bottom) / (top - bottom) * height)
    const near = (dx, dy) => x + dx >= 0 && x + dx < width && y + dy >= 0 && y + dy < height
      ? owner[(y + dy) * width + x + dx] - 1 : -1
    const candidates = [[0, 0], [-1, 0], [0, -1], [-1, -1], [1, 0], [0, 1]].map(([dx, dy]) => near(dx, dy))
    const inside = (i) => i >= 0 && start[i] <= time && time < end[i] && view.address[i] <= address &&
      address < view.end[i]
    const piece = candidates.find(inside) ?? candidates[0]
    return piece >= 0 ? piece : null
  }

  hover(time, address) {
    const piece = this.at(time, address)
    if (piece === null) this.tooltip.hide()
    else this.tooltip.show(described(this.timeline, this.view, piece), ...this.pointer)
  }

  choose(piece, time = null) {
    this.chosen = piece
    this.models.chosen.data = this.edges(piece === null || this.view.address[piece] < 0 ? [] : [piece])
    if (time !== null) this.moment(Math.floor(time))
    this.tell("chosen")
  }

  // Choose the next piece that the search means, or any; and show it whole.
  step(by) {
    const {timeline, view, matches} = this, count = timeline.start.length
    let piece = this.chosen ?? (by > 0 ? -1 : count)
    do piece += by
    while (piece >= 0 && piece < count && (view.address[piece] < 0 || (matches && !matches[bufferOf(timeline, piece)])))
    if (piece >= 0 && piece < count) this.go(piece)
  }

  go(piece) {
    const {timeline, view} = this, size = timeline.size[bufferOf(timeline, piece)]
    const length = timeline.end[piece] - timeline.start[piece]
    const {x_range, y_range} = this.models.addresses
    this.choose(piece, timeline.start[piece])
    x_range.setv({start: timeline.start[piece] - length, end: timeline.end[piece] + length})
    y_range.setv({start: view.address[piece] - 2 * size, end: view.address[piece] + 3 * size})
  }

  described(piece) { return described(this.timeline, this.view, piece) }
  composition(time) { return composition(this.timeline, time) }

  // A tenth of all time around a moment.
  around(time) {
    const part = (this.last - this.first) / 20 || 1
    this.models.addresses.x_range.setv({start: time - part, end: time + part})
  }

  // Zoom about the middle, and move by a part of the window.
  zoom(factor, which = "xy") {
    for (const axis of which) {
      const range = this.models.addresses[`${axis}_range`], middle = (range.start + range.end) / 2
      range.setv({start: middle - (middle - range.start) / factor, end: middle + (range.end - middle) / factor})
    }
  }

  pan(across, up) {
    for (const [axis, part] of [["x", across], ["y", up]]) {
      const range = this.models.addresses[`${axis}_range`], by = part * (range.end - range.start)
      range.setv({start: range.start + by, end: range.end + by})
    }
  }

  theme(dark) {
    const text = dark ? "#e6e8ea" : "#22262a", grid = dark ? "#3a4046" : "#e3e6e9", paper = dark ? "#15181b" : "#ffffff"
    this.dark = dark
    this.palette = palette(dark)
    for (const plot of [this.models.load, this.models.addresses]) {
      plot.setv({background_fill_color: paper, border_fill_color: paper, outline_line_color: grid})
      if ("border_line_color" in plot.properties) plot.border_line_color = paper  // since Bokeh 3.8
      for (const axis of [...plot.below, ...plot.left])
        axis.setv({major_label_text_color: text, axis_label_text_color: text, axis_line_color: text,
          major_tick_line_color: text, minor_tick_line_color: text})
      for (const one of plot.center) if ("grid_line_color" in one) one.grid_line_color = grid
    }
    this.models.peak_label.text_color = text
    this.repaint()
  }

  // What can be seen in the window: rows of buffers, ascending. For tests.
  visible() {
    const {x_range, y_range} = this.models.addresses, {left, right, bottom, top, width, height, owner} = this.drawn
    const seen = new Set()
    for (let y = 0; y < height; y++)
      for (let x = 0; x < width; x++) {
        const time = left + (x + 0.5) / width * (right - left), address = bottom + (y + 0.5) / height * (top - bottom)
        const inside = time >= x_range.start && time < x_range.end && address >= y_range.start && address < y_range.end
        if (inside && owner[y * width + x]) seen.add(owner[y * width + x] - 1)
      }
    return [...new Set([...seen].map((i) => this.timeline.row[bufferOf(this.timeline, i)]))].sort((a, b) => a - b)
  }
}
