"use strict";
// Draws the charts of a report. Everything else on the page is there without this script.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (tag, fields = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), fields);
    node.append(...children);
    return node;
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const longest = Math.max(0, ...data.charts.flatMap((c) => c.curves.map((k) => (k.x.hours || [0]).at(-1))));
  const perHour = longest < 2 ? 60 : 1;
  const LABELS = { step: "step", hours: longest < 2 ? "minutes" : "hours", tokens: "tokens" };
  const state = { x: "step", smooth: 0, hidden: new Set() };
  const drawn = [];

  // An exponential mean that starts without a bias, as TensorBoard's does.
  const smoothed = (ys, weight) => {
    if (!weight) return ys;
    let mean = 0, seen = 0;
    return ys.map((y) => {
      if (y === null) return null;
      mean = mean * weight + (1 - weight) * y;
      seen = seen * weight + (1 - weight);
      return mean / seen;
    });
  };

  const number = (value) => {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size >= 1e9 || (size > 0 && size < 1e-3)) return value.toExponential(2);
    return value.toLocaleString("en-US", { maximumSignificantDigits: 5 });
  };

  // What joins the curves' own x values into the one array that uPlot draws from.
  const table = (chart, kind) => {
    const curves = chart.curves.filter((curve) => curve.x[kind] && curve.x[kind].length);
    const series = [], tables = [];
    for (const curve of curves) {
      const unit = kind === "hours" ? perHour : 1;
      const order = curve.x[kind].map((x, at) => [x === null ? null : x * unit, at]).filter(([x]) => x !== null);
      order.sort((a, b) => a[0] - b[0]);
      const at = order.filter(([x], place) => !place || x !== order[place - 1][0]);
      const xs = at.map(([x]) => x), ys = at.map(([, place]) => curve.y[place]);
      if (state.smooth && ys.length > 20) {
        tables.push([xs, ys, smoothed(ys, state.smooth)]);
        series.push({ curve, faint: true }, { curve });
      } else {
        tables.push([xs, ys]);
        series.push({ curve });
      }
    }
    return { series, rows: tables.length ? uPlot.join(tables) : [[]] };
  };

  const name = (curve) => [data.runs.length > 1 ? data.runs[curve.run] : "", curve.label].filter(Boolean).join(" ");

  function draw(chart) {
    const kind = chart.byTime ? "hours" : state.x;
    const { series, rows } = table(chart, kind);
    const outputs = new Map();
    const place = new Map(chart.curves.map((curve, at) => [curve, at]));
    // With several runs, each has its own colour, and its curves differ by their dashes.
    const several = data.runs.length > 1;
    const stroke = (curve) => color(`--c${(several ? curve.run : place.get(curve)) % 8}`);
    const DASHES = [undefined, [6, 4], [2, 3], [8, 3, 2, 3]];
    const dash = (curve) => DASHES[several ? chart.curves.filter((c) => c.run === curve.run).indexOf(curve) % 4 : 0];
    const shown = (curve) => !state.hidden.has(curve.run) && !chart.off.has(place.get(curve));
    if (chart.plot) chart.plot.destroy();
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
    chart.plot = new uPlot(
      {
        width: Math.max(200, chart.holder.clientWidth),
        height: 240,
        legend: { show: false },
        cursor: { sync: { key: kind, scales: ["x", null] }, drag: { x: true, y: false } },
        scales: { x: { time: false, range: (_, low, high) => (low < high ? [low, high] : [low, (low || 0) + 1]) }, y: { distr: chart.isLog ? 3 : 1, ...(chart.share ? { range: [0, 1] } : {}) } },
        axes: [
          { ...axis, values: (_, splits) => splits.map(number), label: LABELS[kind], labelSize: 16, labelGap: 0 },
          { ...axis, size: 64, values: (_, splits) => splits.map((y) => (y === null ? "" : number(y))) },
        ],
        series: [
          { label: LABELS[kind] },
          ...series.map(({ curve, faint }) => ({
            label: name(curve),
            stroke: faint ? stroke(curve) + "40" : stroke(curve),
            width: faint ? 1 : 1.5,
            dash: dash(curve),
            spanGaps: true,
            show: shown(curve),
            points: { show: curve.y.length < 40 },
          })),
        ],
        hooks: {
          setCursor: [
            (plot) => {
              const at = plot.cursor.idx;
              series.forEach(({ curve, faint }, index) => {
                if (faint) return;
                const ys = plot.data[index + 1];
                let near = at;
                while (near > 0 && near !== null && ys[near] === undefined) near -= 1; // another curve's x
                outputs.get(curve).textContent = at === null || at === undefined ? "" : number(ys[near]);
              });
              chart.where.textContent =
                at === null || at === undefined ? "" : `${LABELS[kind]} ${number(plot.data[0][at])}`;
            },
          ],
          draw: [(plot) => marks(plot, kind)],
        },
      },
      rows,
      chart.holder,
    );
    chart.list.replaceChildren(
      ...chart.curves
        .filter((curve) => curve.x[kind])
        .map((curve) => {
          const box = $("input", { type: "checkbox", checked: !chart.off.has(place.get(curve)) });
          box.addEventListener("change", () => {
            chart.off[box.checked ? "delete" : "add"](place.get(curve));
            draw(chart);
          });
          const swatch = $("span", { className: "swatch" });
          swatch.style.background = stroke(curve);
          outputs.set(curve, $("output"));
          const alone = chart.curves.length === 1 && !name(curve);
          return $("li", {}, alone ? "" : $("label", {}, box, swatch, name(curve)), outputs.get(curve));
        }),
    );
  }

  // A dashed line where a run was stopped, restarted or had a step that was not finite.
  function marks(plot, kind) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.setLineDash([4, 4]);
    ctx.lineWidth = 1;
    ctx.strokeStyle = color("--c1");
    ctx.beginPath();
    data.marks.forEach((all, run) => {
      if (state.hidden.has(run)) return;
      for (const mark of all) {
        if (mark[kind] === null || mark[kind] === undefined) continue;
        const x = Math.round(plot.valToPos(mark[kind] * (kind === "hours" ? perHour : 1), "x", true));
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
      }
    });
    ctx.stroke();
    ctx.restore();
  }

  // With the keyboard: arrows move the cursor, + and - zoom around it, Escape shows everything.
  function keys(chart, event) {
    const plot = chart.plot, xs = plot.data[0], last = xs.length - 1;
    if (last < 1) return;
    const { min, max } = plot.scales.x;
    const move = (at) => {
      const place = Math.min(last, Math.max(0, at));
      plot.setCursor({ left: plot.valToPos(xs[place], "x"), top: 10 });
    };
    const zoom = (factor) => {
      const middle = plot.cursor.idx === null || plot.cursor.idx === undefined ? (min + max) / 2 : xs[plot.cursor.idx];
      plot.setScale("x", { min: middle - (middle - min) * factor, max: middle + (max - middle) * factor });
    };
    const at = plot.cursor.idx ?? 0, far = event.shiftKey ? Math.ceil(last / 20) : 1;
    if (event.key === "ArrowRight") move(at + far);
    else if (event.key === "ArrowLeft") move(at - far);
    else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "Escape") plot.setScale("x", { min: xs[0], max: xs[last] });
    else return;
    event.preventDefault();
  }

  function frame(chart) {
    chart.off = new Set();
    chart.isLog = false;
    chart.holder = $("div", { className: "plot", tabIndex: 0 });
    chart.holder.setAttribute("role", "group");
    chart.holder.setAttribute("aria-label", `${chart.title}: arrows move the cursor, + and - zoom, Escape resets`);
    chart.holder.addEventListener("keydown", (event) => keys(chart, event));
    chart.list = $("ul", { className: "curves" });
    chart.where = $("output");
    const buttons = $("span", {}, chart.where);
    if (chart.log) {
      const log = $("button", { type: "button", textContent: "log" });
      log.setAttribute("aria-pressed", "false");
      log.addEventListener("click", () => {
        chart.isLog = !chart.isLog;
        log.setAttribute("aria-pressed", String(chart.isLog));
        draw(chart);
      });
      buttons.append(log);
    }
    const all = $("button", { type: "button", textContent: "reset zoom" });
    all.addEventListener("click", () => draw(chart));
    buttons.append(all);
    const figure = $("figure", {}, $("figcaption", {}, chart.title, buttons), chart.holder, chart.list);
    document.getElementById("charts").append(figure);
    drawn.push(chart);
    draw(chart);
  }

  function controls() {
    const kinds = ["step", "hours", "tokens"].filter((kind) => data.charts.some((c) => c.curves.some((k) => k.x[kind])));
    const select = $("select", { id: "x" }, ...kinds.map((kind) => $("option", { value: kind, textContent: LABELS[kind] })));
    select.addEventListener("change", () => { state.x = select.value; drawn.forEach(draw); });
    const smooth = $("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, value: 0 });
    const shown = $("output", { textContent: "0" });
    smooth.addEventListener("input", () => {
      state.smooth = Number(smooth.value);
      shown.textContent = smooth.value;
      drawn.forEach((chart) => chart.byTime || draw(chart));
    });
    const bar = document.getElementById("controls");
    bar.append($("label", {}, "x axis", select), $("label", {}, "smoothing", smooth, shown));
    if (data.runs.length > 1)
      data.runs.forEach((run, at) => {
        const box = $("input", { type: "checkbox", checked: true });
        box.addEventListener("change", () => { state.hidden[box.checked ? "delete" : "add"](at); drawn.forEach(draw); });
        bar.append($("label", {}, box, run));
      });
    if (data.marks.some((all) => all.length))
      bar.append($("span", { textContent: "dashed: restart, preemption or non-finite step" }));
  }

  function sortable(head) {
    [...head.rows[0].cells].forEach((cell, column) => {
      const button = $("button", { type: "button", textContent: cell.textContent });
      let up = false;
      button.addEventListener("click", () => {
        up = !up;
        const body = head.parentNode.tBodies[0];
        const key = (row) => row.cells[column].textContent;
        const numeric = (text) => {
          const UNITS = { d: 86400, h: 3600, min: 60, s: 1 };
          if (/^(\d+ (d|h|min|s) ?)+$/.test(text))
            return [...text.matchAll(/(\d+) (\w+)/g)].reduce((sum, [, count, unit]) => sum + count * UNITS[unit], 0);
          return parseFloat((/^\D{0,2}-?\d[\d,]*(\.\d+)?(e[+-]?\d+)?/.exec(text) || [""])[0].replace(/[^\d.e+-]/g, ""));
        };
        const rows = [...body.rows].sort((a, b) => {
          const [one, other] = [numeric(key(a)), numeric(key(b))];
          const by = isNaN(one) || isNaN(other) ? key(a).localeCompare(key(b)) : one - other;
          return up ? by : -by;
        });
        body.append(...rows);
        [...head.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
        cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      });
      cell.replaceChildren(button);
    });
  }

  if (data.charts.length) controls();
  data.charts.forEach(frame);
  document.querySelectorAll("table.sortable thead").forEach(sortable);
  let waiting = 0;
  const redraw = () => { clearTimeout(waiting); waiting = setTimeout(() => drawn.forEach(draw), 150); };
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();
