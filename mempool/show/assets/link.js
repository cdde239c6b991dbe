// The page's URL encodes the shown state, so that a link to the URL shows the same.

const CALM_MS = 250

// Encode the shown state as the URL fragment, the part after "#".
function stateOf(show) {
  const {picture, index, by, together, time, chosen, port: {x, y}} = show, search = byId("search").value
  const range = ({start, end}) => [start, end].map((edge) => Number(edge.toPrecision(9))).join("~")
  const said = {picture, view: index, owner: by, time, x: range(x), y: range(y)}
  if (together) said.together = 1
  if (search) said.search = search
  if (chosen !== null) said.piece = chosen
  return new URLSearchParams(said).toString()
}

// Restore the state of a URL fragment, as far as valid for this page.
function restore(show, state, seek) {
  const said = new URLSearchParams(state), number = (name) => said.has(name) ? Number(said.get(name)) : NaN
  const whole = (value, most) => Number.isInteger(value) && value >= 0 && value < most
  if (whole(number("view"), show.views.length)) show.look(number("view"))
  if (["stacked", "addresses"].includes(said.get("picture"))) show.draws(said.get("picture"))
  if (show.kinds.includes(said.get("owner"))) show.colourBy(said.get("owner"))
  show.group(said.has("together"))
  seek(said.get("search") ?? "")
  for (const name of ["x", "y"]) {
    const [start, end] = (said.get(name) ?? "").split("~").map(Number)
    if (start < end && end - start < Infinity) show.port[name].setv({start, end})
  }
  show.choose(whole(number("piece"), show.timeline.start.length) ? number("piece") : null)
  if (Number.isFinite(number("time"))) show.moment(number("time"))
  show.refresh()
  show.tell("view")
}

// Keep the URL up to date, and follow manual changes of the URL; a page embedded in another has no URL of its
// own.
function linked(show, seek) {
  if (!["file:", "http:", "https:"].includes(location.protocol)) return
  const usual = stateOf(show)
  let timer = null
  const follow = () => { if (location.hash.slice(1) !== stateOf(show)) restore(show, location.hash.slice(1) || usual, seek) }
  const save = () => {
    const now = stateOf(show)
    history.replaceState(null, "", now === usual ? location.pathname + location.search : `#${now}`)
  }
  if (location.hash) follow()
  window.addEventListener("hashchange", follow)
  show.listeners.push(() => {
    clearTimeout(timer)
    timer = setTimeout(save, CALM_MS)
  })
}
