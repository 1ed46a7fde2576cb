// Zooms all figures together, and shows the values under the pointer. Without it the page shows the whole run.
(() => {
  "use strict";
  const make = (kind, parent) => {
    const node = document.createElement("div");
    node.className = kind;
    node.hidden = true;
    return parent.appendChild(node);
  };

  // The values of a trace lie in its path: "M x,y", then "H" to where a value ends and "V" to the next one.
  const valuesOf = (path) => {
    const [, x, y, rest] = /^M([^,]+),([^HVZ]+)(.*)$/.exec(path.getAttribute("d"));
    const steps = [...rest.matchAll(/H([^HVZ]+)V([^HVZ]+)/g)].map((step) => [Number(step[1]), Number(step[2])]);
    const isStacked = path.classList.contains("stacked");
    if (isStacked) steps.pop(); // the way back along 0
    return [[Number(x), Number(y)], ...steps];
  };
  const valueAt = (values, x) => {
    let low = 0, high = values.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle][0] <= x) low = middle; else high = middle;
    }
    return values[low][0] <= x ? values[low][1] : null;
  };

  const plots = [...document.querySelectorAll(".plot")].map((node) => {
    const area = node.querySelector(".area");
    const traces = [...node.querySelectorAll(".trace")].map((path) => ({
      label: path.dataset.label,
      colour: path.style.color,
      isStacked: path.classList.contains("stacked"),
      values: valuesOf(path),
    }));
    traces.sort((one, other) => other.isStacked - one.isStacked);
    const stack = traces.filter((trace) => trace.isStacked).reverse(); // the lowest first
    stack.forEach((trace, k) => (trace.below = stack[k - 1]));
    return {
      area, traces, data: node.dataset, svg: node.querySelector("svg"), times: node.querySelector(".times"),
      line: make("cursor", area), chosen: make("chosen", area), tip: make("tip", area),
    };
  });
  if (!plots.length) return;
  const end = Math.max(...plots.map((plot) => Number(plot.data.end)));
  let shown = [0, end];

  const draw = () => {
    const [from, to] = shown;
    for (const { svg, times, data, area } of plots) {
      svg.setAttribute("viewBox", `${from} 0 ${to - from} ${data.top}`);
      const second = Number(data.second);
      const rough = (to - from) / second / Math.max(2, Math.min(8, area.clientWidth / 90));
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
      times.textContent = "";
      for (let k = Math.ceil(from / second / step - 1e-9); k * step * second <= to * (1 + 1e-9); k++) {
        const label = times.appendChild(document.createElement("span"));
        const share = (k * step * second - from) / (to - from);
        label.style.left = `${100 * share}%`;
        label.className = share < 0.03 ? "begin" : share > 0.97 ? "end" : "";
        label.textContent = `${Number((k * step).toPrecision(6))} ${data.time}`;
      }
    }
    document.documentElement.dataset.from = from;
    document.documentElement.dataset.to = to;
  };
  const zoom = (from, to) => {
    shown = [from, to];
    draw();
  };

  const text = (value, unit) => {
    const digits = Math.abs(value) >= 100 ? Math.round(value) : Number(value.toPrecision(3));
    return `${digits.toLocaleString("en").replaceAll(",", "\u202f")}${unit && ` ${unit}`}`;
  };
  const timeAt = (plot, event) => {
    const box = plot.area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    return [shown[0] + share * (shown[1] - shown[0]), share];
  };
  const point = (plot, event) => {
    const [at, share] = timeAt(plot, event);
    for (const { line } of plots) {
      line.hidden = false;
      line.style.left = `${100 * share}%`;
    }
    const { tip, data } = plot;
    tip.textContent = `${Number((at / Number(data.second)).toPrecision(4))} ${data.time}`;
    for (const { label, colour, values, below } of [...plot.traces]) {
      const value = valueAt(values, at);
      if (value === null) continue;
      const row = tip.appendChild(document.createElement("div"));
      const chip = row.appendChild(document.createElement("span"));
      chip.className = "chip";
      chip.style.background = colour;
      row.append(`${label} ${text(value - (below ? valueAt(below.values, at) : 0), data.unit)}`);
    }
    tip.hidden = false;
    tip.style.left = share < 0.5 ? `calc(${100 * share}% + 10px)` : "";
    tip.style.right = share < 0.5 ? "" : `calc(${100 * (1 - share)}% + 10px)`;
  };
  const leave = () => plots.forEach(({ line, tip }) => (line.hidden = tip.hidden = true));

  let begun = null;
  const choose = (share) => {
    const [left, right] = [Math.min(begun, share), Math.max(begun, share)];
    for (const { chosen } of plots) {
      chosen.hidden = false;
      chosen.style.left = `${100 * left}%`;
      chosen.style.width = `${100 * (right - left)}%`;
    }
  };
  const drop = () => {
    begun = null;
    plots.forEach(({ chosen }) => (chosen.hidden = true));
  };
  for (const plot of plots) {
    plot.area.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button) return;
      begun = timeAt(plot, event)[1];
      plot.area.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    plot.area.addEventListener("pointermove", (event) => {
      point(plot, event);
      if (begun !== null) choose(timeAt(plot, event)[1]);
    });
    plot.area.addEventListener("pointerup", (event) => {
      if (begun === null) return;
      const [from, to] = [begun, timeAt(plot, event)[1]].sort((one, other) => one - other);
      const length = shown[1] - shown[0];
      drop();
      if ((to - from) * plot.area.clientWidth > 5) zoom(shown[0] + from * length, shown[0] + to * length);
    });
    plot.area.addEventListener("pointercancel", drop);
    plot.area.addEventListener("pointerleave", leave);
    plot.area.addEventListener("dblclick", () => zoom(0, end));
  }
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") zoom(0, end);
  });
  addEventListener("resize", draw);
  draw();
  document.documentElement.dataset.drawn = String(plots.length);
})();
