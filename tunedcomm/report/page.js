"use strict";
(() => {
  const root = document.documentElement;
  const narrow = () => window.innerWidth < 560;
  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const figures = [...document.querySelectorAll(".figure")];
  const touch = matchMedia("(pointer: coarse)").matches;

  const axis = () => ({
    gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("grid"), tickcolor: colour("line"),
    tickangle: 0, tickfont: { color: colour("text"), size: 12 },
  });
  const themed = (layout) => {
    const part = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("text") },
      hoverlabel: { align: "left", bgcolor: colour("ground"), bordercolor: colour("line"), font: { color: colour("text"), size: 13 } },
      margin: { l: 56, r: 14, t: 10, b: 52 }, bargap: 0.25, height: layout.height || (narrow() ? 300 : 370),
    };
    const merged = { ...layout, ...part, dragmode: touch ? false : "zoom" };
    for (const name of ["xaxis", "yaxis"]) {
      merged[name] = { ...layout[name], ...axis() };
      merged[name].title = { ...merged[name].title, font: { size: 13 }, standoff: 8 };
      const { tickvals, ticktext } = merged[name];
      if (name === "xaxis" && narrow() && ticktext && tickvals.length > 4) {
        merged[name].tickvals = tickvals.filter((_, i) => i % 2 === 0);
        merged[name].ticktext = ticktext.filter((_, i) => i % 2 === 0);
      }
    }
    return merged;
  };
  const specs = new Map();
  for (const div of figures) {
    const spec = JSON.parse(div.nextElementSibling.textContent);
    if (narrow() && spec.data[0] && spec.data[0].type === "heatmap") {
      spec.data[0].colorbar = { ...spec.data[0].colorbar, orientation: "h", y: -0.2, yanchor: "top", len: 1 };
      spec.layout.height += 70;
    }
    specs.set(div, spec);
  }
  const config = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };

  let drawn = 0;
  const draw = async (div) => {
    const { data, layout } = specs.get(div);
    await Plotly.newPlot(div, data, themed(layout), config);
    drawn += 1;
    document.body.dataset.drawn = String(drawn);
  };
  const drawAll = async () => {
    for (const div of figures) {
      await draw(div);
      await new Promise((done) => setTimeout(done, 0));
    }
    document.body.dataset.ready = "yes";
  };
  const repaint = () => {
    for (const div of figures) if (div.data) Plotly.react(div, div.data, themed(specs.get(div).layout), config);
  };

  for (const button of document.querySelectorAll(".key button")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", String(shown));
      for (const div of button.closest(".panel").querySelectorAll(".figure")) {
        const found = (div.data || []).flatMap((trace, i) => (trace.name === button.dataset.name ? [i] : []));
        if (found.length) Plotly.restyle(div, { visible: shown }, found);
      }
    });
  }
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const toggle = document.querySelector(".theme");
  const label = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };
  toggle.hidden = false;
  toggle.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); repaint(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { label(); repaint(); });
  label();
  drawAll();
})();
