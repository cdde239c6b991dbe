// Controls around the figure, and the text of the page beside the figure.

const dark = window.matchMedia("(prefers-color-scheme: dark)")
const STEP = 0.2, FACTOR = 1.5, MOST_FAILURES = 20

function theme(show, on) {
  document.documentElement.classList.toggle("dark", on)
  byId("theme").setAttribute("aria-pressed", String(on))
  show.theme(on)
}

// Fill the choices: devices or other timelines, views of the shown timeline, kinds of owners.
function choices(show) {
  const {timelines, views, timeline, view} = show
  byId("devices").hidden = timelines.length < 2
  byId("device").replaceChildren(...timelines.map((one, at) => option(`${one.title}, peak ${binary(one.load.peak[1])}`, at)))
  byId("device").value = String(view.timeline)
  const own = views.flatMap((one, index) => one.timeline === view.timeline ? [option(one.title, index)] : [])
  byId("views").hidden = own.length < 2
  byId("view").replaceChildren(...own)
  byId("view").value = String(show.index)
  byId("by").replaceChildren(...show.kinds.map((kind) => option(kind, kind)))
  byId("by").value = show.by
  for (const picture of ["stacked", "addresses"])
    byId(picture).setAttribute("aria-pressed", String(show.picture === picture))
  byId("together").checked = show.together
  byId("together").disabled = show.picture !== "stacked"
  byId("peak").disabled = timeline.still
}

function heading(show) {
  const device = show.timelines.length > 1 ? show.timeline.title : "", state = show.timeline.still ? "state at the end" : ""
  byId("title").textContent = [show.title, device, state].filter(Boolean).join(" · ")
  document.title = [device, show.title].filter(Boolean).join(" · ")
}

function facts(show) {
  const {timeline, view} = show, [count, bytes] = timeline.persistent, drawn = timeline.start.length
  const {count: refused, asked} = timeline.notes.refused, {still} = timeline, said = []
  if (refused) said.push(`out of memory: ${counted(refused, "request")} refused, the largest ${binary(Math.max(...asked))}`)
  said.push(counted(timeline.pieces, still ? "buffer" : "lifetime"))
  said.push(`${still ? "alive" : "peak load"} ${binary(timeline.load.peak[1])}`)
  const reserved = show.models.reserved.data.bytes.reduce((a, b) => Math.max(a, b), 0)
  const held = view.reserved ? "arena" : still ? "reserved" : "reserved at most"
  if (reserved) said.push(`${held} ${binary(reserved)}${still ? "" : " (dashed)"}`)
  if (timeline.period) said.push(`iterations of ${plain(timeline.period)} allocations`)
  if (count) said.push(`${counted(count, "persistent buffer")} of ${binary(bytes)} not drawn`)
  if (drawn < timeline.pieces) said.push(`the largest ${plain(drawn)} one by one, the others grey`)
  byId("facts").textContent = said.join(" · ")
  byId("caveats").replaceChildren(...timeline.caveats.map((one) => element("li", one)))
}

// List the refused requests; a click shows the buffers alive then.
function failures(show) {
  const {refused} = show.timeline.notes
  byId("refused").hidden = !refused.count
  byId("refused").querySelector("ul").replaceChildren(...Array.from(refused.time.slice(0, MOST_FAILURES), (time, k) => {
    const button = element("button", `${binary(refused.asked[k])} at ${plain(time)}`), {place, lines} = show.refusedBy(k)
    button.type = "button"
    button.addEventListener("click", () => { show.moment(time); show.port.at(time) })
    const free = refused.free[k] < 0 ? "" : `, ${binary(refused.free[k])} free on the device`
    const item = element("li", button, `${free}${place ? `, asked for by ${place}` : ""}`)
    if (lines.length)
      item.append(element("details", element("summary", "stack"), element("ol", ...lines.map((line) => element("li", line)))))
    return item
  }), refused.count > MOST_FAILURES ? element("li", `and ${plain(refused.count - MOST_FAILURES)} more`) : "")
}

function legend(show) {
  const said = show.repeats ? `The colours of the ${show.repeats} largest owners at the peak differ, later ones repeat them` : ""
  byId("legend").textContent = said
}

function chosen(show) {
  const lines = show.chosen === null ? [["none", "click on one, or press N"]] : show.described(show.chosen)
  byId("chosen").replaceChildren(...lines.flatMap(([label, said]) => [element("dt", label), element("dd", said)]))
}

function seek(show, wanted) {
  byId("search").value = wanted
  show.search(wanted)
}

function found(show) {
  if (!show.matches) { byId("found").textContent = ""; return }
  let count = 0, bytes = 0
  show.matches.forEach((yes, buffer) => { if (yes) { count += 1; bytes += show.timeline.size[buffer] } })
  byId("found").textContent = `${counted(count, "buffer")} of ${binary(bytes)} found`
}

function peak(show) {
  if (show.timeline.still) return
  show.moment(show.timeline.load.peak[0])
  show.port.at(show.time)
}

function keys(show, event) {
  if (event.ctrlKey || event.metaKey) return
  const which = event.altKey ? "x" : "xy", {port} = show
  const does = {
    ArrowLeft: () => port.pan(-STEP, 0), ArrowRight: () => port.pan(STEP, 0), ArrowUp: () => port.pan(0, STEP),
    ArrowDown: () => port.pan(0, -STEP), "+": () => port.zoom(FACTOR, which), "=": () => port.zoom(FACTOR, which),
    "-": () => port.zoom(1 / FACTOR, which), 0: () => port.whole(), Home: () => port.whole(), n: () => show.step(1),
    b: () => show.step(-1), p: () => peak(show), "/": () => byId("search").focus(), s: () => show.draws("stacked"),
    a: () => show.draws("addresses"), g: () => together(show, !show.together),
    Escape: () => { seek(show, ""); show.choose(null) },
  }[event.key.length === 1 ? event.key.toLowerCase() : event.key]
  if (!does) return
  event.preventDefault()
  does()
}

function together(show, on) {
  if (show.picture !== "stacked") return
  byId("together").checked = on
  show.group(on)
}

function connect(show) {
  const on = (name, what, does) => byId(name).addEventListener(what, does), {port} = show
  on("stacked", "click", () => show.draws("stacked"))
  on("addresses", "click", () => show.draws("addresses"))
  on("device", "change", () => {
    show.look(show.views.findIndex((view) => view.timeline === Number(byId("device").value)))
    seek(show, byId("search").value)
  })
  on("view", "change", () => show.look(Number(byId("view").value)))
  on("by", "change", () => show.colourBy(byId("by").value))
  on("together", "change", () => together(show, byId("together").checked))
  on("search", "input", () => show.search(byId("search").value))
  on("next", "click", () => show.step(1))
  on("previous", "click", () => show.step(-1))
  on("in", "click", () => port.zoom(FACTOR))
  on("out", "click", () => port.zoom(1 / FACTOR))
  on("whole", "click", () => port.whole())
  on("peak", "click", () => peak(show))
  on("theme", "click", () => theme(show, !show.dark))
  on("figure", "keydown", (event) => keys(show, event))
  on("controls", "submit", (event) => { event.preventDefault(); show.step(1) })
  dark.addEventListener("change", () => theme(show, dark.matches))
}

// Keep the page's text up to date with the figure.
function listen(show) {
  const table = new OwnerTable(show, (wanted) => seek(show, wanted))
  const all = () => { heading(show); choices(show); facts(show); legend(show); found(show); failures(show); table.fill(); chosen(show) }
  const told = {
    view: all, owners: () => { table.fill(); legend(show) }, moment: () => table.fill(), found: () => found(show),
    pointed: () => table.mark(), chosen: () => { chosen(show); table.mark() },
  }
  show.listeners.push((what) => told[what]?.())
}

document.addEventListener("mempool-show", ({detail: show}) => {
  connect(show)
  listen(show)
  theme(show, dark.matches)
  show.tell("view")
  window.mempoolShow = show
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("mempool-drawn")))
})

if (typeof DecompressionStream === "undefined")
  byId("title").textContent = "This page needs a browser from 2023 or later."
else Bokeh.embed.embed_item(JSON.parse(byId("item").textContent), "figure")
