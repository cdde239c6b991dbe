// The part of time and of bytes that is in view.

class Viewport {
  // Ranges of Bokeh; `limits` are {first, last, top}: all of time, and of bytes from 0.
  constructor(x, y) { Object.assign(this, {x, y, limits: {first: 0, last: 1, top: 1}}) }

  whole() {
    this.allTime()
    this.allBytes()
  }

  allTime() { this.x.setv({start: this.limits.first, end: this.limits.last}) }
  allBytes() { this.y.setv({start: 0, end: 1.02 * this.limits.top || 1}) }

  // A lifetime and as much before and after it, within all of time.
  aroundTime(start, end) {
    const {first, last} = this.limits, length = end - start
    this.x.setv({start: Math.max(start - length, first), end: Math.min(end + length, last)})
  }

  // A range of bytes and `more` below and above it, within all of them.
  aroundBytes(low, high, more) {
    this.y.setv({start: Math.max(low - more, 0), end: Math.min(high + more, 1.02 * this.limits.top)})
  }

  // A tenth of all time around a moment.
  at(time) {
    const part = (this.limits.last - this.limits.first) / 20 || 1
    this.x.setv({start: time - part, end: time + part})
  }

  // Zoom about the middle, and move by a part of the window.
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
