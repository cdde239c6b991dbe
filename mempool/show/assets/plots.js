// The two plots; their content follows from the view, the picture, the ranges, the owners and the search.

const MARGIN = 0.5, QUIET_MS = 90
const PICTURES = {stacked: stackPicture, addresses: addressPicture}

class Show {
  constructor(models, timelines, views, {title, opens}) {
    Object.assign(this, {models, timelines, views, title, dark: false, chosen: null, under: null, together: false})
    this.picture = opens.picture
    this.tooltip = tooltipBox()
    this.listeners = []
    this.pointer = [0, 0]
    this.palette = palette(false)
    const {addresses, load, strip} = models
    this.port = new Viewport(addresses.x_range, addresses.y_range)
    for (const range of [addresses.x_range, addresses.y_range])
      for (const edge of ["start", "end"]) range.properties[edge].change.connect(() => this.soon())
    document.addEventListener("pointermove", (event) => { this.pointer = [event.clientX, event.clientY] }, true)
    addresses.on_event("panstart", () => { this.dragging = true })
    addresses.on_event("panend", () => { this.dragging = false; this.soon() })
    addresses.on_event("mousemove", (event) => this.hover(event.x, event.y))
    addresses.on_event("mouseleave", () => this.leave())
    addresses.on_event("tap", (event) => this.choose(this.at(event.x, event.y), event.x))
    strip.on_event("mousemove", (event) => this.hoverNote(event.x, event.y))
    strip.on_event("mouseleave", () => this.tooltip.hide())
    strip.on_event("tap", (event) => this.goToRange(event.x, event.y))
    load.on_event("tap", (event) => this.moment(Math.floor(event.x)))
    load.on_event("doubletap", () => this.port.whole())
    addresses.on_event("doubletap", () => this.port.whole())
    this.look(opens.view)
  }

  get view() { return this.views[this.index] }
  get timeline() { return this.timelines[this.view.timeline] }
  get drawer() { return PICTURES[this.picture] }
  tell(what) { for (const listener of this.listeners) listener(what) }

  // Show another view; if the view has another timeline, reset everything of the timeline.
  look(index) {
    const before = this.index === undefined ? null : this.timeline
    this.index = index
    const {timeline} = this
    fillLoad(this)
    if (timeline !== before) {
      this.matches = this.chosen = null
      this.owners = ownersOf(timeline, this.by = usualKind(timeline))
      fillAxes(this)
      this.port.limits = {first: this.first, last: this.last}
      this.port.allTime()
      this.moment(timeline.load.peak[0])
    }
    this.draws(this.picture)
  }

  // Show the stacked picture or the picture of addresses.
  draws(picture) {
    this.picture = picture
    this.models.addresses.left[0].axis_label = this.drawer.label
    this.models.ceiling.visible = picture === "stacked"
    this.port.limits.top = this.drawer.top(this)
    this.port.allBytes()
    if (this.drawn) this.repaint()
    this.tell("view")
  }

  get first() {
    const {load, notes: {refused: {time}}} = this.timeline
    return Math.min(load.time[0] ?? 0, time[0] ?? Infinity)
  }
  get last() {
    const {load, notes: {refused: {time}}} = this.timeline
    return Math.max(load.time.at(-1) ?? 1, (time.at(-1) ?? 0) + 1)
  }

  moment(time) {
    this.time = time
    this.models.moment.location = this.models.moment_below.location = time
    this.tell("moment")
  }

  // Colour by another kind of owners.
  colourBy(by) {
    this.owners = ownersOf(this.timeline, this.by = by)
    this.repaint()
    this.tell("owners")
  }

  // Stack the buffers of each owner together, or all buffers in order of allocation.
  group(together) {
    this.together = together
    this.repaint()
  }

  search(text) {
    this.matches = matching(this.timeline, text)
    this.repaint()
    this.tell("found")
  }

  repaint() {
    this.colour = coloured(this.timeline, this.owners, this.matches)
    if (this.picture === "stacked") this.order = orderOf(this.timeline, this.together ? this.owners : null, this.matches)
    this.refresh()
  }

  // Redraw soon. The drawing extends beyond the window: a gesture moves the drawing, and the redraw waits
  // until the gesture rests.
  soon() {
    clearTimeout(this.timer)
    const {x, y} = this.port, drawn = this.drawn
    const inside = drawn && x.start >= drawn.left && x.end <= drawn.right && y.start >= drawn.bottom && y.end <= drawn.top
    if (inside && this.dragging) return
    this.timer = setTimeout(() => this.refresh(), QUIET_MS)
  }

  refresh() {
    clearTimeout(this.timer)
    const {inner_width: wide, inner_height: tall} = this.models.addresses, {x, y} = this.port
    if (!(wide > 0 && tall > 0)) return
    const across = x.end - x.start, up = y.end - y.start
    this.drawn = this.drawer.draw(this, {
      left: x.start - MARGIN * across, right: x.end + MARGIN * across,
      bottom: y.start - MARGIN * up, top: y.end + MARGIN * up,
      width: Math.ceil(wide * (1 + 2 * MARGIN)), height: Math.ceil(tall * (1 + 2 * MARGIN)),
    })
    this.put(this.drawn)
    this.putNotes(across / wide)
    this.outline()
    this.hoverAgain()
    this.refreshed = performance.now()
    this.tell("drawn")
  }

  put({left, right, bottom, top, width, height, image, large: pieces}) {
    const {timeline, drawer, models: {picture, large, segments}} = this
    const Pixels = picture.data.image[0].constructor  // Bokeh's class, which Bokeh does not export
    const drawn = {
      image: [new Pixels(image.buffer, [height, width])], x: [left], y: [bottom], dw: [right - left], dh: [top - bottom],
    }
    const edges = drawer.rectangles(this, pieces)
    edges.colour = pieces.map((i) => this.palette.css[this.colour[bufferOf(timeline, i)]])
    edges.row = pieces.map((i) => timeline.row[bufferOf(timeline, i)])
    for (const [source, data] of [[picture, drawn], [large, edges], [segments, drawer.segments(this, this.drawn)]])
      source.setv({data}, {check_eq: false})  // always different: comparing pixels takes longer than drawing
  }

  putNotes(pixel) {
    const {timeline: {notes}, models: {ranges, marked, named, refused, refused_below: below}} = this
    const {boxes, lines, texts} = stripIn(notes, this.port.x, pixel, this.palette.css)
    ranges.data = boxes
    marked.data = lines
    named.data_source.data = texts
    below.data = this.drawer.refused(this, refused.data)
  }

  outline() {
    const {chosen, drawer, models} = this, none = {time: [], bytes: []}
    models.chosen.data = chosen !== null && this.drawn && drawer.has(this, chosen) ? drawer.outline(this, chosen) : none
  }

  // The piece at a point in time and bytes, or null. Looked up by pixel; rounding may find a neighbour, so
  // the adjacent pixels are tried too.
  at(time, bytes) {
    const {timeline: {start, end}, drawer, drawn} = this
    if (!drawn) return null
    const {left, right, bottom, top, width, height, owner} = drawn
    const x = Math.floor((time - left) / (right - left) * width)
    const y = Math.floor((bytes - bottom) / (top - bottom) * height)
    const near = (dx, dy) => x + dx >= 0 && x + dx < width && y + dy >= 0 && y + dy < height
      ? owner[(y + dy) * width + x + dx] - 1 : -1
    const candidates = [[0, 0], [-1, 0], [0, -1], [-1, -1], [1, 0], [0, 1]].map(([dx, dy]) => near(dx, dy))
    const inside = (i) => i >= 0 && start[i] <= time && time < end[i] && drawer.contains(this, i, bytes)
    const piece = candidates.find(inside) ?? candidates[0]
    return piece >= 0 ? piece : null
  }

  hover(time, bytes) {
    const {x, y} = this.port
    this.under = [(time - x.start) / (x.end - x.start), (bytes - y.start) / (y.end - y.start)]
    this.point(this.at(time, bytes))
  }

  // Update the hover text: another piece may now be below the resting pointer.
  hoverAgain() {
    const {under, port: {x, y}} = this
    if (under) this.point(this.at(x.start + under[0] * (x.end - x.start), y.start + under[1] * (y.end - y.start)))
  }

  leave() {
    this.under = null
    this.point(null)
  }

  get pixel() { return (this.port.x.end - this.port.x.start) / this.models.strip.inner_width }

  hoverNote(time, row) {
    const lines = noteAt(this, time, row, this.pixel)
    if (lines) this.tooltip.show(lines, ...this.pointer)
    else this.tooltip.hide()
  }

  // Show the time span of a range, or a moment.
  goToRange(time, row) {
    const {ranges} = this.timeline.notes, at = rangeAt(ranges, time, Math.floor(-row))
    if (at < 0) this.moment(Math.floor(time))
    else this.port.x.setv({start: ranges.begin[at], end: ranges.end[at]})
  }

  point(piece) {
    if (piece === null) this.tooltip.hide()
    else this.tooltip.show(this.described(piece), ...this.pointer)
    if (piece !== this.pointed) { this.pointed = piece; this.tell("pointed") }
  }

  choose(piece, time = null) {
    this.chosen = piece
    this.outline()
    if (time !== null && !this.timeline.still) this.moment(Math.floor(time))
    this.tell("chosen")
  }

  // Choose the next piece that matches the search, or any piece without a search, and show the whole piece.
  step(by) {
    const {timeline, drawer, matches} = this, count = timeline.start.length
    let piece = this.chosen ?? (by > 0 ? -1 : count)
    do piece += by
    while (piece >= 0 && piece < count && (!drawer.has(this, piece) || (matches && !matches[bufferOf(timeline, piece)])))
    if (piece >= 0 && piece < count) this.go(piece)
  }

  go(piece) {
    const {timeline, port} = this, start = timeline.start[piece]
    port.aroundTime(start, timeline.end[piece])
    this.refresh()  // a stacked picture knows the place of a piece only after drawing
    this.choose(piece, start)
    const {bytes} = this.models.chosen.data
    const low = bytes.reduce((a, b) => Math.min(a, b)), high = bytes.reduce((a, b) => Math.max(a, b))
    port.aroundBytes(low, high, 2 * timeline.size[bufferOf(timeline, piece)])
  }

  described(piece) { return described(this.timeline, this.view, piece) }
  ownerOf(piece) { return piece === null ? null : this.owners.of[bufferOf(this.timeline, piece)] }
  // The origin of a refused request, innermost frame first: as many lines as are known.
  refusedBy(at) {
    const {operation, frame, stack} = this.timeline.notes.refused, lines = stackOf({stack}, at)
    return {place: nameOf(frame, at) || nameOf(operation, at) || lines[0], lines}
  }

  get kinds() { return kindsOf(this.timeline) }
  swatch(key) { return this.palette.css[colourOf(this.owners, key)] }
  searchOf(key) { return searchOf(this.owners, key) }
  get repeats() { return this.by !== "buffer" && this.owners.count > OWNER_COLOURS ? OWNER_COLOURS : 0 }
  alive(time) { return aliveAt(this.timeline, this.owners, time) }

  theme(dark) {
    this.dark = dark
    this.palette = palette(dark)
    paint(this.models, dark)
    this.repaint()
  }

  // Rows of the buffers visible in the window, ascending. For tests.
  visible() {
    const {port: {x: time, y: bytes}, drawn: {left, right, bottom, top, width, height, owner}} = this
    const seen = new Set()
    for (let y = 0; y < height; y++)
      for (let x = 0; x < width; x++) {
        const when = left + (x + 0.5) / width * (right - left), where = bottom + (y + 0.5) / height * (top - bottom)
        const inside = when >= time.start && when < time.end && where >= bytes.start && where < bytes.end
        if (inside && owner[y * width + x]) seen.add(owner[y * width + x] - 1)
      }
    return [...new Set([...seen].map((i) => this.timeline.row[bufferOf(this.timeline, i)]))].sort((a, b) => a - b)
  }
}
