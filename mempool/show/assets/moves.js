// Absences of buffers that are offloaded to the host and come back.

const MOST_ABSENCES = 300
// Style of copies to and from the host: hatched, and marked by triangles that point up and down.
const OUT = {colour: "#d55e00", slant: "right_diagonal_line", angle: 0}
const BACK = {colour: "#0072b2", slant: "left_diagonal_line", angle: Math.PI}

// Absences in a window: outlines at the buffers' former addresses, their copies out and back beside them, and
// a mark at the begin of each copy. If there are many, only the largest absences; without `moved`, none.
function awayIn(moved, {left, right, bottom, top}) {
  const box = () => ({left: [], right: [], bottom: [], top: [], row: []})
  const absent = box(), copies = {...box(), colour: [], slant: []}, marks = {time: [], address: [], colour: [], angle: []}
  if (!moved) return {absent, copies, marks}
  const {row, size, out, gone, back, use, left: from, found: to, copied} = moved, seen = []
  for (let k = 0; k < row.length; k++) {
    const low = Math.min(from[k], to[k]), high = Math.max(from[k], to[k]) + size[k]
    if (out[k] < right && use[k] >= left && low < top && high > bottom) seen.push(k)
  }
  if (seen.length > MOST_ABSENCES) seen.sort((a, b) => size[b] - size[a]).length = MOST_ABSENCES
  const put = (into, k, x0, x1, y) => {
    into.left.push(x0); into.right.push(x1); into.bottom.push(y); into.top.push(y + size[k]); into.row.push(row[k])
  }
  const copy = (k, x0, x1, y, how) => {
    put(copies, k, x0, x1, y)
    copies.colour.push(how.colour); copies.slant.push(how.slant)
    marks.time.push(x0); marks.address.push(y + size[k] / 2); marks.colour.push(how.colour); marks.angle.push(how.angle)
  }
  for (const k of seen) {
    put(absent, k, gone[k], back[k], from[k])
    if (copied[k]) copy(k, out[k], gone[k], from[k], OUT)
    copy(k, back[k], use[k], to[k], BACK)
  }
  return {absent, copies, marks}
}
