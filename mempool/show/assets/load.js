// The load plot above the pictures, and the time axis.

// Fill the time axes and the strip, as far as the timeline has data for them.
function fillAxes(show) {
  const {timeline: {still, notes}, models: {addresses, load, strip, moment_below: moment}} = show
  const {above, below} = rowsOf(notes), [axis] = addresses.below
  axis.axis_label = `time in ${ticks(show.timeline)}`
  axis.visible = load.visible = moment.visible = !still
  strip.visible = above + below > 0
  strip.height = Math.max(above + below, 1) * ROW_PX
  strip.y_range.setv({start: -below, end: above})
}

function fillLoad(show) {
  const {timeline, view, models: {curve, reserved, refused, peak, load}} = show, [when, most] = timeline.load.peak
  curve.data = stairs(timeline.load)
  reserved.data = reservedOver(view, timeline)
  const late = when > (show.first + show.last) / 2
  peak.data = {
    time: [when], bytes: [most], text: [`peak ${binary(most)}`], align: [late ? "right" : "left"], beside: [late ? -9 : 9],
  }
  const highest = (values, least) => values.reduce((a, b) => Math.max(a, b), least)
  refused.data = refusedLines(timeline)
  // A request much larger than the peak load must not shrink the rest of the plot.
  show.reach = highest(refused.data.high.map((bytes) => Math.min(bytes, 2 * most || bytes)), most)
  show.held = highest(reserved.data.bytes, show.reach)
  load.x_range.setv({start: show.first, end: show.last})
  // Room above the highest line for the label of the peak, and above that for the label of a refused request.
  load.y_range.setv({start: 0, end: (refused.data.time.length ? 1.45 : 1.22) * show.held || 1})
  labelRefused(show)
}

function labelRefused(show) {
  const {timeline: {notes: {refused: {time, asked}}}, models: {refused_label: label, load}} = show
  const largest = asked.reduce((a, b, k) => b > (asked[a] ?? -1) ? k : a, -1), none = largest < 0
  const late = time[largest] > (show.first + show.last) / 2
  label.data = {
    time: none ? [] : [time[largest]], bytes: none ? [] : [load.y_range.end],
    text: none ? [] : [`out of memory: ${binary(asked[largest])} refused`],
    align: none ? [] : [late ? "right" : "left"], beside: none ? [] : [late ? -9 : 9],
  }
}
