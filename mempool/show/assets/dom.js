// DOM helpers. Text from a trace is inserted as text of nodes, never as markup.

const byId = (name) => document.getElementById(name)

function element(name, ...children) {
  const made = document.createElement(name)
  made.append(...children)
  return made
}

function option(text, value) {
  const made = element("option", text)
  made.value = String(value)
  return made
}
