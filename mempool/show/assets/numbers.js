// Readable numbers.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]

function binary(bytes) {
  let unit = 0, value = bytes
  for (; Math.abs(value) >= 1024 && unit < UNITS.length - 1; unit++) value /= 1024
  return unit ? `${value.toFixed(2)} ${UNITS[unit]}` : `${value} B`
}

const plain = (number) => Math.round(number).toLocaleString("en-US")

const counted = (number, noun) => `${plain(number)} ${noun}${number === 1 ? "" : "s"}`

function duration(ns) {
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]
  const [scale, unit] = units.find(([scale]) => ns >= scale) ?? [1, "ns"]
  return `${(ns / scale).toPrecision(3)} ${unit}`
}
