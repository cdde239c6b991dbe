// The visible range of time and of bytes.

class Viewport {
  // `x` and `y` are Bokeh's ranges; `limits` are {first, last, top}: the ends of time, and the top of bytes
  // from 0.
  constructor(x, y) { Object.assign(this, {x, y, limits: {first: 0, last: 1, top: 1}}) }

  whole() {
    this.allTime()
    this.allBytes()
  }

  allTime() { this.x.setv({start: this.limits.first, end: this.limits.last}) }
  allBytes() { this.y.setv({start: 0, end: 1.02 * this.limits.top || 1}) }

  // Show a lifetime and as much time before and after, within all of time.
  aroundTime(start, end) {
    const {first, last} = this.limits, length = end - start
    this.x.setv({start: Math.max(start - length, first), end: Math.min(end + length, last)})
  }

  // Show a range of bytes and `more` bytes below and above, within all bytes.
  aroundBytes(low, high, more) {
    this.y.setv({start: Math.max(low - more, 0), end: Math.min(high + more, 1.02 * this.limits.top)})
  }

  // Show a tenth of all time around a moment.
  at(time) {
    const part = (this.limits.last - this.limits.first) / 20 || 1
    this.x.setv({start: time - part, end: time + part})
  }

  // Zoom about the middle of the window; `pan` moves by a part of the window.
  zoom(factor, which = "xy") {
    for (const range of Array.from(which, (axis) => this[axis])) {
      const middle = (range.start + range.end) / 2
      range.setv({start: middle - (middle - range.start) / factor, end: middle + (range.end - middle) / factor})
    }
  }

  pan(across, up) {
    for (const [range, part] of [[this.x, across], [this.y, up]]) {
      const by = part * (range.end - range.start)
      range.setv({start: range.start + by, end: range.end + by})
    }
  }
}
