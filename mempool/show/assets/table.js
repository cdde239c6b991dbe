// The table of owners: what each has at a moment. A row finds its buffers in the picture, a buffer marks its row.

const MOST_ROWS = 100

class OwnerTable {
  constructor(show, seek) { Object.assign(this, {show, seek, rows: new Map()}) }

  fill() {
    const {show} = this, {timeline, owners, time} = show, groups = show.alive(time)
    const all = groups.reduce((sum, one) => sum + one.bytes, 0), [peak] = timeline.load.peak
    const when = show.timeless ? "Alive at the end" : time === peak ? "Alive at the peak" : `Alive at ${plain(time)}`
    byId("alive").textContent = `${when}: ${binary(all)}`
    byId("what").textContent = owners.kind
    this.rows = new Map(groups.slice(0, MOST_ROWS).map((one) => [one.key, this.row(one, all)]))
    this.more = groups.length - this.rows.size
    byId("composition").tBodies[0].replaceChildren(...this.rows.values(), ...this.rest())
    this.mark()
  }

  row({key, bytes, count}, all) {
    const {show} = this
    const colour = element("i"), button = element("button", colour, show.owners.name(key)), meter = element("meter")
    colour.className = "colour"
    colour.style.background = show.swatch(key)
    meter.value = all ? bytes / all : 0
    meter.setAttribute("aria-label", "share")
    button.type = "button"
    button.addEventListener("click", () => this.seek(show.searchOf(key)))
    const cells = [element("td", button), ...[plain(count), binary(bytes)].map((one) => element("td", one))]
    return element("tr", ...cells, element("td", meter, ` ${(100 * meter.value).toFixed(1)} %`))
  }

  rest() {
    if (this.more <= 0) return []
    const cell = element("td", `and ${plain(this.more)} more`)
    cell.colSpan = 4
    return [element("tr", cell)]
  }

  // Mark the rows of the buffer below the pointer, and of the chosen one. An owner without a row gets one.
  mark() {
    const {show} = this, marked = {pointed: show.ownerOf(show.pointed ?? null), chosen: show.ownerOf(show.chosen)}
    for (const one of [this.extra, ...this.rows.values()]) one?.classList.remove(...Object.keys(marked))
    this.extra?.remove()
    this.extra = null
    for (const [how, key] of Object.entries(marked)) {
      if (key === null) continue
      const row = this.rows.get(key) ?? (this.extra ??= this.added(key))
      row.classList.add(how)
    }
  }

  added(key) {
    const groups = this.show.alive(this.show.time), all = groups.reduce((sum, one) => sum + one.bytes, 0)
    const row = this.row(groups.find((one) => one.key === key) ?? {key, bytes: 0, count: 0}, all)
    byId("composition").tBodies[0].append(row)
    return row
  }
}
