// Tooltip beside the pointer. Text from traces is only ever inserted as text of a node.

const MOST_LINES = 40

function tooltipBox() {
  const box = document.createElement("div")
  box.className = "mempool-tooltip"
  box.setAttribute("role", "tooltip")
  box.style.cssText = "position:fixed;z-index:1000;pointer-events:none;display:none;max-width:32em;padding:.4em .6em;" +
    "background:#1b1f24;color:#fff;border:1px solid #8a929a;border-radius:4px;font:12px/1.45 system-ui,sans-serif;" +
    "overflow-wrap:anywhere"
  document.body.append(box)
  return {
    show(lines, x, y) {
      const more = lines.length > MOST_LINES ? [["", `… ${lines.length - MOST_LINES} more lines: click for all`]] : []
      box.replaceChildren(...[...lines.slice(0, MOST_LINES), ...more].map(([label, text]) => {
        const line = document.createElement("div"), name = document.createElement("b")
        name.textContent = label && `${label} `
        line.append(name, text)
        return line
      }))
      box.style.display = "block"
      const beyond = x + 16 + box.offsetWidth > window.innerWidth
      box.style.left = `${Math.max(beyond ? x - 16 - box.offsetWidth : x + 16, 0)}px`
      box.style.top = `${Math.max(Math.min(y + 16, window.innerHeight - box.offsetHeight - 4), 0)}px`
    },
    hide() { box.style.display = "none" },
  }
}
