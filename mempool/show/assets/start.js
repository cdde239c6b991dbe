// Runs when the figure has a size, and again at every resize.

const shows = window.mempoolShows ??= new WeakMap()
const known = shows.get(addresses)
if (known) known.soon?.()
else {
  shows.set(addresses, {})
  unpack(packed).then(({said, planes}) => {
    const timelines = said.timelines.map((one) => timelineOf(one, planes))
    const views = said.views.map((one) => viewOf(one, planes, timelines[one.timeline]))
    const models = {
      load, curve, reserved, peak, peak_label, moment, refused, refused_label,
      strip, ranges, marked, named,
      addresses, segments, picture, large, ceiling, outline, chosen, moment_below, refused_below,
    }
    const show = new Show(models, timelines, views, said)
    shows.set(addresses, show)
    document.dispatchEvent(new CustomEvent("mempool-show", {detail: show}))
    if (!show.drawn) show.theme(false)  // no theme was chosen
  })
}
