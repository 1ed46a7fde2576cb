// Draws the figures in the reader's colour scheme, again when it changes; keeps their time axes in step.
(() => {
  "use strict";
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures");
  const darkOf = read("colours");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const nodes = figures.map((figure) => document.getElementById(`plot-${figure.name}`));

  const recoloured = (value) => {
    if (typeof value === "string") return darkOf[value] ?? value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(recoloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, recoloured(inner)]));
    }
    return value;
  };

  const draw = () => {
    figures.forEach((figure, k) => {
      // A copy each time: plotly writes into what it is given.
      const { data, layout } = dark.matches ? recoloured(figure.plot) : structuredClone(figure.plot);
      layout.dragmode = narrow.matches ? false : "zoom";
      layout.height = figure.height;
      if (narrow.matches) {
        layout.xaxis.nticks = 5;
        layout.margin.l = 46;
        delete layout.yaxis.title;
      }
      Plotly.react(nodes[k], data, layout, { responsive: true, displayModeBar: false, doubleClick: "reset" });
    });
  };

  let following = false;
  const follow = (leader) => (change) => {
    const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const all = change["xaxis.autorange"];
    if (following || (!all && range[0] === undefined)) return;
    following = true;
    const wanted = all ? { "xaxis.autorange": true } : { "xaxis.range": range };
    const others = nodes.filter((node) => node !== leader);
    Promise.all(others.map((node) => Plotly.relayout(node, wanted))).finally(() => (following = false));
  };

  draw();
  nodes.forEach((node) => node.on("plotly_relayout", follow(node)));
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  document.documentElement.dataset.drawn = String(figures.length);
})();
