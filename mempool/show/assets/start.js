// Runs when the figure has its size, and again at every other size.

const shows = window.mempoolShows ??= new WeakMap()
const known = shows.get(addresses)
if (known) known.soon?.()
else {
  shows.set(addresses, {})
  unpack(packed).then(({said, planes}) => {
    const timelines = said.timelines.map((one) => timelineOf(one, planes))
    const views = said.views.map((one) => viewOf(one, planes, timelines[one.timeline]))
    const models = {
      load, strip, addresses, curve, before, absent, copies, marks, reserved, ceiling, peak, peak_label, moment, moment_below, segments,
      picture, large, chosen, outline, ranges, marked, named, refused, refused_label, refused_below,
    }
    const show = new Show(models, timelines, views, said)
    shows.set(addresses, show)
    document.dispatchEvent(new CustomEvent("mempool-show", {detail: show}))
    if (!show.drawn) show.theme(false)  // nobody chose one
  })
}
