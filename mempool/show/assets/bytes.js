const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
const most = ticks.reduce((a, b) => Math.max(a, Math.abs(b)), 1), step = Math.abs(ticks[1] - ticks[0]) || most
const unit = Math.min(Math.floor(Math.log2(most) / 10), units.length - 1), scale = 1024 ** unit
let digits = 0  // smallest number that makes all tick labels exact enough
const off = (one) => Math.abs(Number((one / scale).toFixed(digits)) * scale - one) > step / 20
while (digits < 15 && ticks.some(off)) digits += 1
return `${(tick / scale).toLocaleString("en-US", {maximumFractionDigits: digits})} ${units[unit]}`
