"use strict";
// Draws the figures from the page's own data. Text from data only ever becomes text nodes.

window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
});

const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 8;
const DASHES = ["", "8 4", "2 4", "10 4 2 4"];
const PHONE = 560;

// Elements.

function element(namespace, name, attributes = {}, ...children) {
  const made = namespace ? document.createElementNS(namespace, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}
const html = (name, attributes, ...children) => element(null, name, attributes, ...children);
const svg = (name, attributes, ...children) => element("http://www.w3.org/2000/svg", name, attributes, ...children);

// A line is a method by its place, or, below zero, an untrained encoder.
const colour = (index) => (index < 0 ? "ku" : `k${index % COLOURS}`);
const dash = (index) => (index < 0 ? `${3 - index} 3` : DASHES[(index + Math.floor(index / COLOURS)) % DASHES.length]);
const lineName = (index) => (index < 0 ? data.untrained[-1 - index] : data.lines[index]);
const sample = (line, width) =>
  svg("svg", { class: "sample", width, height: 8, "aria-hidden": "true" }, svg("path", { class: `curve ${colour(line)}`, d: `M2,4H${width - 2}`, "stroke-dasharray": dash(line) }));
const number = (value, digits) =>
  value === null ? "not finite" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");

/** Draws into a host now, and again whenever its width changes. */
function responsive(host, draw) {
  let drawn = 0;
  const redraw = () => {
    const width = Math.floor(host.clientWidth);
    if (width > 0 && width !== drawn) {
      drawn = width;
      host.replaceChildren(draw(width));
    }
  };
  redraw();
  new ResizeObserver(redraw).observe(host);
  return () => {
    drawn = 0;
    redraw();
  };
}

/** Buttons of which one is pressed. Nothing where there is no choice. */
function choice(labels, name, choose) {
  if (labels.length < 2) return null;
  const buttons = labels.map(({ label, line }, index) =>
    html(
      "button",
      {
        type: "button",
        "aria-pressed": String(index === 0),
        onclick: () => {
          buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(other === index)));
          choose(index);
        },
      },
      line === undefined ? null : html("i", { class: `key ${colour(line)}`, "aria-hidden": "true" }),
      label,
    ),
  );
  return html("div", { class: "switch", role: "group", "aria-label": name }, buttons);
}

// Scales.

function linear([low, high], [from, to]) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** The axis of a chart's values: its range, its ticks, and how they are written. */
function valueAxis(panel, values) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (panel.log) {
    low = Math.floor(Math.log10(low));
    high = Math.max(Math.ceil(Math.log10(high)), low + 1);
    const powers = Array.from({ length: high - low + 1 }, (_, i) => low + i);
    const write = (power) => (power >= 0 ? String(10 ** power) : (10 ** power).toFixed(-power));
    return { range: [low, high], place: Math.log10, ticks: powers.map((power) => [10 ** power, write(power)]) };
  }
  if (panel.zero) low = Math.min(0, low);
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  if (!panel.zero) low -= pad;
  high += pad;
  const at = ticks(low, high, 4);
  const digits = [0, 1, 2, 3, 4, 5].find((count) => at.every((value) => Math.abs(value - Number(value.toFixed(count))) < 1e-9)) ?? 6;
  return { range: [low, high], place: (value) => value, ticks: at.map((value) => [value, number(value, digits)]) };
}

// Line charts.

/**
 * A chart with a cursor that pointer, touch and arrow keys move.
 * `shared` is {hidden, charts, from, to}: charts with the same one have the same x axis, show the same x and hide the
 * same lines.
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
    const dots = series.map(({ line }) => svg("circle", { class: `dot ${colour(line)}`, r: 4.5 }));
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
        const text = number(heights[k], panel.digits) + (s ? ` ± ${number(s[k], panel.digits)}` : "");
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
    return picture;
  }

  shared.charts.push(chart);
  chart.mount = () => {
    chart.redraw = responsive(host, draw);
  };
  return chart;
}

const nearest = (sorted, value) => sorted.reduce((best, x) => (Math.abs(x - value) < Math.abs(best - value) ? x : best));

/** One line, with its band of one standard deviation; broken where a value is not finite. */
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

/** Charts side by side under one legend, whose buttons hide and show lines. */
function charts(host, panels, height) {
  const every = panels.flatMap((panel) => panel.series.flatMap((series) => series.x));
  const shared = { hidden: new Set(), charts: [], from: Math.min(...every), to: Math.max(...every) };
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

// The partition: clients down, classes across, a bubble's area for the number of images.

function partitionFigure(host, partitions) {
  const readout = html("div", { class: "readout", role: "status", "aria-live": "off" });
  const wide = html("div", { class: "wide" });
  let partition = partitions[0];
  let redraw = () => {};
  const pick = choice(partitions, "Partition", (index) => {
    partition = partitions[index];
    redraw();
  });
  if (pick) host.append(pick);
  host.append(html("div", { class: "partition" }, wide, readout));

  function draw(width) {
    const { clients, of } = partition;
    const counted = clients.every(({ counts }) => counts);
    const columns = counted ? Math.max(...clients.map(({ counts }) => counts.length)) : 0;
    const classes = Array.from({ length: columns }, (_, i) => partition.classes[i] ?? String(i));
    const left = Math.min(Math.max(44, 16 + 7 * Math.max(...clients.map(({ name }) => name.length))), width < PHONE ? 84 : 170);
    const narrow = width < PHONE && counted; // sizes as numbers alone
    const least = columns > 40 ? 7 : 19;
    const cell = counted ? Math.max(least, Math.min(54, (width - left - (narrow ? 58 : 200)) / columns)) : 0;
    const bars = narrow ? 46 : counted ? Math.max(188, width - left - cell * columns - 12) : Math.min(620, width - left - 12);
    const row = width < PHONE ? 26 : Math.max(24, Math.min(36, cell || 28));
    const slanted = classes.some((name) => name.length * 7 > cell) && columns <= 40;
    const top = !counted || columns > 40 ? 22 : slanted ? 26 + 5 * Math.min(14, Math.max(...classes.map((name) => name.length))) : 26;
    const total = Math.max(width, left + cell * columns + bars + 12);
    const height = top + row * clients.length + 6;
    const most = Math.max(1, ...clients.flatMap(({ counts }) => counts ?? []));
    const largest = Math.max(...clients.map(({ size }) => size));
    const radius = (count) => Math.max(1.2, (Math.min(cell, row) / 2 - 1) * Math.sqrt(count / most));
    const shorten = (text, space) => (text.length * 7 <= space ? text : `${text.slice(0, Math.max(2, Math.floor(space / 7) - 1))}…`);
    const start = left + cell * columns + 12;
    const bar = linear([0, largest], [0, Math.max(0, bars - 52)]);
    const rows = clients.map((client, k) => {
      const middle = top + row * (k + 0.5);
      return svg(
        "g",
        {},
        svg("rect", { class: "row", x: 0, y: middle - row / 2, width: total, height: row, rx: 4 }),
        svg("text", { class: "strong", x: left - 10, y: middle + 4, "text-anchor": "end" }, shorten(client.name, left - 12)),
        (client.counts ?? []).map((count, c) =>
          count ? svg("circle", { class: `bubble ${columns <= 2 * COLOURS ? colour(c) : colour(0)}`, cx: left + cell * (c + 0.5), cy: middle, r: radius(count) }) : null,
        ),
        narrow ? null : svg("rect", { class: "size", x: start, y: middle - 5, width: bar(client.size), height: 10, rx: 3 }),
        svg("text", { class: "strong", x: narrow ? start : start + bar(client.size) + 8, y: middle + 4 }, number(client.size, 0)),
      );
    });
    const heads = columns > 40 ? [svg("text", { x: left, y: 14 }, `${columns} classes`)] : classes.map((name, c) => {
      const x = left + cell * (c + 0.5);
      return slanted
        ? svg("text", { x, y: top - 8, transform: `rotate(-45 ${x} ${top - 8})` }, shorten(name, 98))
        : svg("text", { x, y: top - 10, "text-anchor": "middle" }, name);
    });
    const picture = svg(
      "svg",
      { viewBox: `0 0 ${total} ${height}`, width: total, height, role: "img", tabindex: 0, style: "max-width:none" },
      svg("text", { x: left - 10, y: top - 10, "text-anchor": "end" }, "client"),
      heads,
      svg("text", { x: start, y: top - 10 }, "images"),
      rows,
    );
    let at = 0;
    const show = (k) => {
      at = Math.max(0, Math.min(clients.length - 1, k));
      rows.forEach((group, i) => group.firstChild.classList.toggle("on", i === at));
      const { name, size, counts } = clients[at];
      const order = (counts ?? []).map((count, c) => [count, classes[c]]).filter(([count]) => count).sort((a, b) => b[0] - a[0]);
      const listed = order.slice(0, 6).map(([count, label]) => `${number(count, 0)} of ${label}`).join(", ");
      const more = order.length > 6 ? `, and ${order.length - 6} more ${order.length > 7 ? "classes" : "class"}` : "";
      readout.replaceChildren(html("span", {}, html("b", {}, `client ${name}: ${number(size, 0)} images`), listed ? ` · ${listed}${more}` : ""));
      picture.setAttribute("aria-label", `Images by client. ${readout.textContent}. Arrow keys move from client to client.`);
    };
    const point = (event) => show(Math.floor((event.clientY - picture.getBoundingClientRect().top - top) / row));
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    picture.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
    picture.addEventListener("keydown", (event) => {
      const next = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: clients.length - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      show(next);
    });
    show(0);
    if (of > clients.length) {
      return html("div", {}, picture, html("p", { class: "quiet" }, `${clients.length} of the ${number(of, 0)} clients, evenly from the largest to the smallest.`));
    }
    return picture;
  }
  redraw = responsive(wide, draw);
}

// The map.

const SHAPES = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  (r) => `M${-r * 0.88},${-r * 0.88}h${r * 1.76}v${r * 1.76}h${-r * 1.76}Z`,
  (r) => `M0,${-r * 1.15}L${r * 1.1},${r * 0.85}H${-r * 1.1}Z`,
  (r) => `M0,${-r * 1.25}L${r * 1.25},0L0,${r * 1.25}L${-r * 1.25},0Z`,
];
// Colour and shape together tell 32 classes apart; neighbours differ in both.
const shape = (label) => SHAPES[(label + Math.floor(label / COLOURS)) % SHAPES.length];

function mapFigure(host, maps, sprites) {
  const plot = html("div");
  const thumb = html("div", { class: "thumb", role: "img", "aria-label": "The image under the cursor" });
  const words = html("div", { role: "status", "aria-live": "off" });
  const classes = html("div", { class: "classes", role: "group", "aria-label": "Classes; a button shows one alone" });
  let map = maps[0];
  let only = null;
  let at = null;
  let redraw = () => {};
  const pick = choice(maps.map(({ line, seed }) => ({ label: lineName(line), line, seed })), "Method", (index) => {
    map = maps[index];
    legend();
    redraw();
  });
  if (pick) host.append(pick);
  host.append(html("div", { class: "map" }, html("div", {}, plot), html("div", {}, html("div", { class: "preview" }, thumb, words), classes)));

  const label = (i) => (map.labels ? map.classes[map.labels[i]] : null);
  const mark = (i) => (map.labels ? map.labels[i] : 0);

  function legend() {
    const present = map.labels ? [...new Set(map.labels)].sort((a, b) => a - b) : [];
    classes.replaceChildren(
      ...present.map((c) =>
        html(
          "button",
          {
            type: "button",
            "aria-pressed": String(only === c),
            onclick: () => {
              only = only === c ? null : c;
              legend();
              dim();
            },
          },
          svg("svg", { viewBox: "-6 -6 12 12", class: colour(c), "aria-hidden": "true" }, svg("path", { d: shape(c)(4.2), fill: "currentColor" })),
          map.classes[c],
        ),
      ),
    );
  }

  const dim = () => plot.querySelectorAll(".mark").forEach((path, i) => path.classList.toggle("dim", only !== null && mark(i) !== only));

  function preview(i) {
    const { uri, columns, rows } = sprites[map.sprite];
    const share = (k, n) => (n > 1 ? `${(100 * k) / (n - 1)}%` : "0%");
    thumb.style.backgroundImage = `url("${uri}")`;
    thumb.style.backgroundSize = `${100 * columns}% ${100 * rows}%`;
    thumb.style.backgroundPosition = `${share(i % columns, columns)} ${share(Math.floor(i / columns), rows)}`;
    words.replaceChildren(...(label(i) === null ? [] : [html("b", {}, label(i))]), `image ${i + 1} of ${map.x.length}`);
  }

  function draw(width) {
    const pad = 14;
    const side = Math.min(width, 760);
    const low = Math.min(...map.y);
    const high = Math.max(...map.y);
    const scale = (width - 2 * pad) / 1000;
    const capped = Math.min(scale, (side - 2 * pad) / Math.max(1, high - low));
    const height = Math.max(160, (high - low) * capped + 2 * pad);
    const shift = (width - 1000 * capped) / 2;
    const xs = map.x.map((x) => shift + x * capped);
    const ys = map.y.map((y) => (high - low ? pad + (high - y) * capped : height / 2));
    const r = Math.max(2.6, Math.min(5, width / 150 * Math.sqrt(400 / Math.max(400, xs.length))));
    const ring = svg("circle", { class: "ring", r: r + 4 });
    const picture = svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: 0 },
      xs.map((x, i) => svg("path", { class: `mark ${colour(mark(i))}`, d: shape(mark(i))(r), transform: `translate(${x.toFixed(1)},${ys[i].toFixed(1)})` })),
      ring,
    );
    const select = (i) => {
      if (i === null) return;
      at = i;
      ring.setAttribute("cx", xs[i]);
      ring.setAttribute("cy", ys[i]);
      preview(i);
      picture.setAttribute("aria-label", `Map of ${xs.length} test images, ${lineName(map.line)}. ${words.textContent}. Arrow keys move to the next image.`);
    };
    // The nearest image for which `cost` is a number; only those of the class that is shown.
    const closest = (cost) => {
      let found = null;
      let least = Infinity;
      xs.forEach((_, i) => {
        const price = only === null || mark(i) === only ? cost(i) : null;
        if (price !== null && price < least) [found, least] = [i, price];
      });
      return found;
    };
    const point = (event) => {
      const box = picture.getBoundingClientRect();
      const x = event.clientX - box.left;
      const y = event.clientY - box.top;
      select(closest((i) => (xs[i] - x) ** 2 + (ys[i] - y) ** 2));
    };
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    picture.addEventListener("focus", () => words.setAttribute("aria-live", "polite"));
    picture.addEventListener("blur", () => words.setAttribute("aria-live", "off"));
    picture.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!way) return;
      event.preventDefault();
      select(
        closest((i) => {
          const dx = xs[i] - xs[at];
          const dy = ys[i] - ys[at];
          const along = dx * way[0] + dy * way[1];
          const aside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
          return along > 0.01 && i !== at ? along + 2 * aside : null;
        }),
      );
    });
    select(at !== null && at < xs.length ? at : 0);
    return picture;
  }
  legend();
  const again = responsive(plot, draw);
  redraw = () => {
    again();
    dim();
  };
}

// The page.

const DRAW = {
  curves: (host) => charts(host, data.curves, 230),
  traffic: (host) => charts(host, data.traffic, 190),
  spectrum: (host) => charts(host, [data.spectrum], 340),
  partition: (host) => partitionFigure(host, data.partitions),
  map: (host) => mapFigure(host, data.maps, data.sprites),
};
for (const host of document.querySelectorAll("[data-figure]")) DRAW[host.dataset.figure](host);

document.documentElement.dataset.width = String(window.innerWidth);
document.documentElement.dataset.fits = String(document.documentElement.scrollWidth <= window.innerWidth);
document.documentElement.dataset.ready = "true";
