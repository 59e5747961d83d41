// Line charts.

/**
 * A chart with a cursor, which the pointer, touch and arrow keys move.
 * `shared` is {hidden, charts, from, to}: charts that share it have the same x axis, cursor position and hidden
 * lines.
 */
function lineChart(panel, shared, height) {
  const xs = [...new Set(panel.series.flatMap((series) => series.x))].sort((a, b) => a - b);
  const unit = panel.x ?? "round";
  const readout = html("div", { class: "readout", role: "status", "aria-live": "off" });
  const host = html("div");
  const box = html("div", { class: "panel" }, html("h3", {}, panel.title), host, readout);
  let move = () => {};
  let current = unit === "round" ? xs[xs.length - 1] : xs[Math.min(xs.length - 1, 15)];
  const chart = { show: (x) => move(nearest(xs, x)), redraw: () => {}, box };
  const publish = (x) => shared.charts.forEach((other) => other.show(x));

  function draw(width) {
    const series = panel.series.filter(({ line }) => !shared.hidden.has(line));
    const values = series.flatMap(({ y, s }) => y.flatMap((value, i) => (value === null ? [] : panel.log || !s ? [value] : [value - s[i], value + s[i]])));
    const axis = valueAxis(panel, values.length ? values : [panel.log ? 1 : 0]);
    const left = 14 + 6.6 * Math.max(...axis.ticks.map(([, label]) => label.length));
    const area = { left, right: width - 10, top: 8, bottom: height - 36 };
    const span = [shared.from, shared.to];
    const x = linear(span, [area.left + 4, area.right - 4]);
    const scaled = linear(axis.range, [area.bottom, area.top]);
    const y = (value) => Math.max(area.top, Math.min(area.bottom, scaled(axis.place(value))));
    const cursor = svg("line", { class: "cursor", y1: area.top, y2: area.bottom });
    const dots = series.map(({ line }) => svg("circle", { class: `dot at ${colour(line)}`, r: 4.5 }));
    const picture = svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: 0 },
      axis.ticks.map(([value, label]) => [
        svg("line", { class: "grid", x1: area.left, x2: area.right, y1: y(value), y2: y(value) }),
        svg("text", { x: area.left - 7, y: y(value) + 4, "text-anchor": "end" }, label),
      ]).flat(),
      ticks(...span, Math.max(2, Math.floor(width / 90)))
        .filter(Number.isInteger)
        .map((value) => svg("text", { x: x(value), y: area.bottom + 17, "text-anchor": "middle" }, number(value, 0))),
      svg("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }),
      svg("text", { x: area.right, y: height - 4, "text-anchor": "end" }, unit),
      cursor,
      series.flatMap((one) => curve(one, x, y, panel.log)),
      dots,
    );
    move = (at) => {
      current = at;
      cursor.setAttribute("x1", x(at));
      cursor.setAttribute("x2", x(at));
      const said = series.map(({ line, x: own, y: heights, s }, i) => {
        const k = own.indexOf(at);
        const known = k >= 0 && heights[k] !== null;
        dots[i].setAttribute("visibility", known ? "visible" : "hidden");
        if (known) {
          dots[i].setAttribute("cx", x(at));
          dots[i].setAttribute("cy", y(heights[k]));
        }
        if (k < 0) return null;
        const text = number(heights[k], panel.digits) + (s && s[k] !== null ? ` ± ${number(s[k], panel.digits)}` : "");
        return html("span", { title: lineName(line) }, sample(line, 20), html("span", { class: "name" }, ` ${lineName(line)}`), html("b", {}, ` ${text}`));
      });
      readout.replaceChildren(html("span", {}, `${unit} ${at}`), ...said.filter(Boolean));
      picture.setAttribute("aria-label", `${panel.title}. ${readout.textContent}. Arrow keys move along.`);
    };
    const inverse = linear([area.left + 4, area.right - 4], span);
    const point = (event) => publish(inverse(event.clientX - picture.getBoundingClientRect().left));
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    picture.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
    picture.addEventListener("blur", () => readout.setAttribute("aria-live", "off"));
    picture.addEventListener("keydown", (event) => {
      const i = xs.indexOf(current);
      const next = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: xs.length - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      publish(xs[Math.max(0, Math.min(xs.length - 1, next))]);
    });
    move(current);
    return caption(picture, panel.title, series.map(({ line }) => ({ mark: () => stroke(line, 24, 6), name: lineName(line) })));
  }

  shared.charts.push(chart);
  chart.mount = () => {
    chart.redraw = responsive(host, draw);
  };
  return chart;
}

const nearest = (sorted, value) => sorted.reduce((best, x) => (Math.abs(x - value) < Math.abs(best - value) ? x : best));

/** One line, with a band of one standard deviation; the line has gaps at values that are not finite. */
function curve({ line, x: xs, y: ys, s }, x, y, log) {
  const floor = (value, least) => (log ? Math.max(value, least) : value);
  const known = xs.map((at, i) => [at, ys[i], s ? s[i] : 0]).filter(([, value]) => value !== null);
  let path = "";
  let broken = true;
  xs.forEach((at, i) => {
    if (ys[i] !== null) path += `${broken ? "M" : "L"}${x(at).toFixed(1)},${y(ys[i]).toFixed(1)}`;
    broken = ys[i] === null;
  });
  const edge = (points, sign) => points.map(([at, value, spread]) => `${x(at).toFixed(1)},${y(floor(value + sign * spread, value / 10)).toFixed(1)}`);
  const band = s && known.length > 1 ? [svg("polygon", { class: `band ${colour(line)}`, points: [...edge(known, 1), ...edge(known.slice().reverse(), -1)].join(" ") })] : [];
  const alone = known.length === 1 ? [svg("circle", { class: `dot ${colour(line)}`, r: 3.5, cx: x(known[0][0]), cy: y(known[0][1]) })] : [];
  return [...band, svg("path", { class: `curve ${colour(line)}`, d: path, "stroke-dasharray": dash(line) }), ...alone];
}

/** Several charts with one legend, whose buttons hide and show lines. */
function charts(host, panels, height) {
  const every = panels.flatMap((panel) => panel.series.flatMap((series) => series.x));
  const shared = { hidden: new Set(), charts: [], from: least(every), to: most(every) };
  const made = panels.map((panel) => lineChart(panel, shared, height));
  const lines = [...new Set(panels.flatMap((panel) => panel.series.map(({ line }) => line)))].sort((a, b) => (a < 0) - (b < 0) || Math.abs(a) - Math.abs(b));
  const legend = lines.map((line) => {
    const button = html(
      "button",
      {
        type: "button",
        "aria-pressed": "true",
        onclick: () => {
          if (!shared.hidden.delete(line)) shared.hidden.add(line);
          button.setAttribute("aria-pressed", String(!shared.hidden.has(line)));
          button.classList.toggle("off", shared.hidden.has(line));
          made.forEach((chart) => chart.redraw());
        },
      },
      sample(line, 28),
      lineName(line),
    );
    return html("li", {}, button);
  });
  host.append(html("ul", { class: "legend", "aria-label": "Lines; a button hides or shows one" }, legend), html("div", { class: "panels" }, made.map(({ box }) => box)));
  made.forEach((chart) => chart.mount());
}
