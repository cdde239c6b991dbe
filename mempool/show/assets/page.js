"use strict"
// The controls around the figure. What comes from a trace is put in as text of nodes, never as markup.
{
  const byId = (name) => document.getElementById(name)
  const dark = window.matchMedia("(prefers-color-scheme: dark)")
  const MOST_GROUPS = 40, STEP = 0.2, FACTOR = 1.5

  const text = (bytes) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    let unit = 0
    for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024
    return unit ? `${bytes.toFixed(2)} ${units[unit]}` : `${bytes} B`
  }

  function element(name, ...children) {
    const made = document.createElement(name)
    made.append(...children)
    return made
  }

  function theme(show, on) {
    document.documentElement.classList.toggle("dark", on)
    byId("theme").setAttribute("aria-pressed", String(on))
    show.theme(on)
    legend(show)
  }

  function fillViews(show) {
    show.timelines.forEach((timeline, at) => {
      const group = document.createElement("optgroup")
      group.label = timeline.title
      show.views.forEach((view, index) => {
        if (view.timeline !== at) return
        const option = element("option", view.title)
        option.value = String(index)
        group.append(option)
      })
      byId("view").append(group)
    })
  }

  function viewed(show) {
    byId("view").value = String(show.index)
    byId("by").value = show.by
  }

  function facts(show) {
    const {timeline, view} = show, [count, bytes] = timeline.persistent, drawn = timeline.start.length
    const said = [`${timeline.pieces.toLocaleString("en-US")} lifetimes`, `peak load ${text(timeline.load.peak[1])}`]
    const reserved = show.models.reserved.data.bytes.reduce((a, b) => Math.max(a, b), 0)
    if (reserved) said.push(`${view.reserved ? "arena" : "reserved at most"} ${text(reserved)} (dashed)`)
    if (timeline.period) said.push(`iterations of ${timeline.period.toLocaleString("en-US")} ${timeline.ticks ?? "allocations"}`)
    if (timeline.note) said.push(timeline.note)
    if (count) said.push(`${count.toLocaleString("en-US")} persistent buffers of ${text(bytes)} are not drawn`)
    if (drawn < timeline.pieces) said.push(`the largest ${drawn.toLocaleString("en-US")} one by one, the others grey`)
    byId("facts").textContent = said.join(" · ")
  }

  function legend(show) {
    const {timeline} = show, {css} = show.palette
    const names = show.by === "stream" ? timeline.streams.map((name) => `stream ${name}`)
      : show.by === "operation" ? timeline.operation?.names ?? [] : []
    const moves = show.view.moved ? ["▲ copied to the host", "▼ copied back", "┄ away"] : []
    const streams = names.slice(0, 7).map((name, at) => {
      const mark = document.createElement("i")
      mark.style.background = css[at % 7 * 2]
      return element("span", mark, name)
    })
    byId("legend").replaceChildren(...moves.map((one) => element("span", one)), ...streams,
      names.length > 7 ? `and ${names.length - 7} more, in the same colours again` : "")
  }

  function searching(show, called, wanted) {
    const button = element("button", called)
    button.type = "button"
    button.addEventListener("click", () => seek(show, wanted))
    return button
  }

  function composed(show) {
    const groups = show.composition(show.time), all = groups.reduce((sum, one) => sum + one.bytes, 0)
    const [peak] = show.timeline.load.peak
    byId("alive").textContent = (show.time === peak ? "Alive at the peak" : `Alive at ${show.time.toLocaleString("en-US")}`)
      + `: ${text(all)}`
    byId("what").textContent = groups.some((one) => one.name !== null) ? "operation" : "size"
    byId("composition").tBodies[0].replaceChildren(...groups.slice(0, MOST_GROUPS).map((one) => {
      const called = one.name === null ? text(one.size) : one.name || "(unknown)"
      const meter = document.createElement("meter")
      meter.value = all ? one.bytes / all : 0
      meter.setAttribute("aria-label", "share")
      const share = `${(100 * meter.value).toFixed(1)} %`
      const first = one.name === "" ? called : searching(show, called, one.name ?? `=${one.size}`)
      const cells = [first, one.count.toLocaleString("en-US"), text(one.bytes)].map((one) => element("td", one))
      return element("tr", ...cells, element("td", meter, ` ${share}`))
    }))
  }

  function chosen(show) {
    const lines = show.chosen === null ? [["none", "click on one, or press N"]] : show.described(show.chosen)
    byId("chosen").replaceChildren(...lines.flatMap(([label, said]) => [element("dt", label), element("dd", said)]))
  }

  function seek(show, wanted) {
    byId("search").value = wanted
    show.search(wanted)
    found(show)
  }

  function found(show) {
    if (!show.matches) { byId("found").textContent = ""; return }
    let count = 0, bytes = 0
    show.matches.forEach((yes, buffer) => { if (yes) { count += 1; bytes += show.timeline.size[buffer] } })
    byId("found").textContent = `${count.toLocaleString("en-US")} buffers of ${text(bytes)} found`
  }

  function peak(show) {
    show.moment(show.timeline.load.peak[0])
    show.around(show.time)
  }

  function keys(show, event) {
    if (event.ctrlKey || event.metaKey) return
    const which = event.altKey ? "x" : "xy"
    const does = {
      ArrowLeft: () => show.pan(-STEP, 0), ArrowRight: () => show.pan(STEP, 0), ArrowUp: () => show.pan(0, STEP),
      ArrowDown: () => show.pan(0, -STEP), "+": () => show.zoom(FACTOR, which), "=": () => show.zoom(FACTOR, which),
      "-": () => show.zoom(1 / FACTOR, which), 0: () => show.whole(), Home: () => show.whole(), n: () => show.step(1),
      b: () => show.step(-1), p: () => peak(show), "/": () => byId("search").focus(), Escape: () => show.choose(null),
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key]
    if (!does) return
    event.preventDefault()
    does()
  }

  function connect(show) {
    const on = (name, what, does) => byId(name).addEventListener(what, does)
    on("view", "change", () => show.look(Number(byId("view").value)))
    on("by", "change", () => { show.colourBy(byId("by").value); legend(show) })
    on("search", "input", () => seek(show, byId("search").value))
    on("next", "click", () => show.step(1))
    on("previous", "click", () => show.step(-1))
    on("in", "click", () => show.zoom(FACTOR))
    on("out", "click", () => show.zoom(1 / FACTOR))
    on("whole", "click", () => show.whole())
    on("peak", "click", () => peak(show))
    on("theme", "click", () => theme(show, !show.dark))
    on("figure", "keydown", (event) => keys(show, event))
    on("controls", "submit", (event) => { event.preventDefault(); show.step(1) })
    dark.addEventListener("change", () => theme(show, dark.matches))
    const told = {view: () => { viewed(show); facts(show); legend(show); found(show); composed(show) }, moment: composed, chosen}
    show.listeners.push((what) => told[what]?.(show))
  }

  document.addEventListener("mempool-show", ({detail: show}) => {
    byId("title").textContent = show.title
    fillViews(show)
    connect(show)
    theme(show, dark.matches)
    show.tell("view")
    show.tell("moment")
    show.tell("chosen")
    window.mempoolShow = show
    requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("mempool-drawn")))
  })

  if (typeof DecompressionStream === "undefined")
    byId("title").textContent = "This page needs a browser from 2023 or later."
  else Bokeh.embed.embed_item(JSON.parse(byId("item").textContent), "figure")
}
