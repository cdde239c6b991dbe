// Buffers that match a search: an owner, #ROW, a size with or without a comparison, or a part of a name; null
// for all.

function matching(timeline, text) {
  const owner = /^(category|frame|module|operation|pool|stream|size)=(.*)$/s.exec(text)
  if (owner && kindsOf(timeline).includes(owner[1])) return owned(timeline, owner[1], owner[2])
  const wanted = text.trim().toLowerCase(), {size, row} = timeline
  if (!wanted) return null
  const number = /^#(\d+)$/.exec(wanted)
  if (number) return Uint8Array.from(row, (one) => one === Number(number[1]))
  const holds = comparison(wanted)
  return holds ? Uint8Array.from(size, holds) : holding(timeline, wanted)
}

// Buffers whose owner has exactly this name.
function owned(timeline, kind, name) {
  const owners = ownersOf(timeline, kind), meant = new Set()
  for (let key = 0; key < owners.count; key++) if (owners.name(key) === name) meant.add(key)
  return Uint8Array.from(owners.of, (key) => meant.has(key))
}

// Condition on sizes such as >=1MiB; null if the text is no condition.
function comparison(wanted) {
  const compared = /^([<>]=?|=)?\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?(b)?$/.exec(wanted)
  if (!compared || !(compared[1] || compared[3] || compared[4])) return null
  const [, how = "=", digits, unit = ""] = compared
  const base = unit.endsWith("i") || !compared[4] ? 1024 : 1000
  const bytes = Number(digits) * base ** (" kmgt".indexOf(unit[0] ?? " "))
  return {"<": (s) => s < bytes, "<=": (s) => s <= bytes, ">": (s) => s > bytes, ">=": (s) => s >= bytes,
    "=": (s) => s === bytes}[how]
}

// Buffers with a matching part of a name: an owner's name, a line of the stack, or the buffer's own name.
function holding(timeline, wanted) {
  const {ids, stack, size} = timeline, has = (name) => name.toLowerCase().includes(wanted)
  const found = new Uint8Array(size.length)
  for (const kind of NAMED_KINDS) {
    const meant = timeline[kind]?.names.map(has)
    for (let i = 0; meant && i < found.length; i++) if (meant[timeline[kind].of[i]]) found[i] = 1
  }
  const lines = stack?.names.map(has), stacks = stack?.table.map((one) => one.some((line) => lines[line]))
  for (let i = 0; i < found.length; i++)
    if (stacks?.[stack.of[i]] || (ids && has(ids[i]))) found[i] = 1
  return found
}
