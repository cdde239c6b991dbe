// The table of owners: the live bytes of each owner at a moment, most first. A row finds the owner's buffers
// in the picture, a buffer marks the owner's row.

const MOST_ROWS = 100

class OwnerTable {
  constructor(show, seek) { Object.assign(this, {show, seek, rows: new Map(), added: []}) }

  fill() {
    const {show} = this, {timeline, owners, time} = show, [peak] = timeline.load.peak
    this.groups = new Map(show.alive(time).map((one) => [one.key, one]))
    this.all = [...this.groups.values()].reduce((sum, one) => sum + one.bytes, 0)
    byId("alive").textContent = `Alive at ${timeline.still ? "the end" : time === peak ? "the peak" : plain(time)}: ${binary(this.all)}`
    byId("what").textContent = owners.kind
    const keys = [...this.groups.keys()].slice(0, MOST_ROWS)
    for (let key = 0; key < owners.count && keys.length < MOST_ROWS; key++) if (!this.groups.has(key)) keys.push(key)
    this.rows = new Map(keys.map((key) => [key, this.row(key)]))
    byId("composition").tBodies[0].replaceChildren(...this.rows.values(), ...this.rest(owners.count - keys.length))
    this.mark()
  }

  row(key) {
    const {show} = this, {bytes, count} = this.groups.get(key) ?? {bytes: 0, count: 0}
    const colour = element("i"), button = element("button", colour, show.owners.name(key)), meter = element("meter")
    colour.className = "colour"
    colour.style.background = show.swatch(key)
    meter.value = this.all ? bytes / this.all : 0
    meter.setAttribute("aria-label", "share")
    button.type = "button"
    button.addEventListener("click", () => this.seek(show.searchOf(key)))
    const cells = [element("td", button), ...[plain(count), binary(bytes)].map((one) => element("td", one))]
    const made = element("tr", ...cells, element("td", meter, ` ${(100 * meter.value).toFixed(1)} %`))
    made.classList.toggle("none", !count)
    return made
  }

  rest(count) {
    if (!count) return []
    const cell = element("td", `and ${plain(count)} more`)
    cell.colSpan = 4
    return [element("tr", cell)]
  }

  // Mark the owner's row of the buffer below the pointer, and of the chosen buffer. An owner without a row
  // gets one.
  mark() {
    const {show} = this, marked = {pointed: show.ownerOf(show.pointed ?? null), chosen: show.ownerOf(show.chosen)}
    for (const row of this.rows.values()) row.classList.remove(...Object.keys(marked))
    for (const row of this.added) row.remove()
    this.added = []
    for (const [how, key] of Object.entries(marked))
      if (key !== null) (this.rows.get(key) ?? this.add(key)).classList.add(how)
  }

  add(key) {
    const row = this.row(key)
    this.added.push(row)
    byId("composition").tBodies[0].append(row)
    return row
  }
}
