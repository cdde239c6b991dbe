// Unpacking of a page's packed content: see packed_columns.py for the layout.

async function unpack(text) {
  const characters = atob(text), bytes = new Uint8Array(characters.length)
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i)
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))
  const raw = new Uint8Array(await new Response(stream).arrayBuffer())
  const length = new DataView(raw.buffer).getUint32(0, true)
  const said = JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + length)))
  return {said, planes: raw.subarray(4 + length)}
}

// Unpack one column as Float64Array: exact up to 2**53.
function column(planes, {at, count, width, delta, first}) {
  const values = new Float64Array(count)
  let sum = first
  for (let i = 0; i < count; i++) {
    let value = 0
    for (let place = at + (width - 1) * count + i; place >= at; place -= count) value = value * 256 + planes[place]
    values[i] = delta ? (sum += value) : value - 1
  }
  return values
}
