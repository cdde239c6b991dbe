// Light and dark theme of the plots.

function paint(models, dark) {
  const text = dark ? "#e6e8ea" : "#22262a", grid = dark ? "#3a4046" : "#e3e6e9", paper = dark ? "#15181b" : "#ffffff"
  for (const plot of [models.load, models.strip, models.addresses]) {
    plot.setv({background_fill_color: paper, border_fill_color: paper, outline_line_color: grid})
    if ("border_line_color" in plot.properties) plot.border_line_color = paper  // since Bokeh 3.8
    for (const axis of [...plot.below, ...plot.left])
      axis.setv({major_label_text_color: text, axis_label_text_color: text, axis_line_color: text,
        major_tick_line_color: text, minor_tick_line_color: text})
    for (const one of plot.center) if ("grid_line_color" in one) one.grid_line_color = grid
  }
  models.peak_label.background_fill_color = paper
  models.peak_label.text_color = models.named.glyph.text_color = models.outline.glyph.line_color = text
}
