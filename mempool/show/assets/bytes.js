const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
let value = Math.abs(tick), unit = 0
while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1 }
return `${Number(value.toPrecision(4))} ${units[unit]}`
