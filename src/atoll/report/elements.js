"use strict";
// Draws the figures from the data in the page. Text from the data only becomes text nodes, never HTML.

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

// The number of a line is the index of a method, or negative for an untrained encoder.
const colour = (index) => (index < 0 ? "ku" : `k${index % COLOURS}`);
const dash = (index) => (index < 0 ? `${3 - index} 3` : DASHES[(index + Math.floor(index / COLOURS)) % DASHES.length]);
const lineName = (index) => (index < 0 ? data.untrained[-1 - index] : data.lines[index]);
const stroke = (line, width, y) => svg("path", { class: `curve ${colour(line)}`, d: `M2,${y}H${width - 2}`, "stroke-dasharray": dash(line) });
const sample = (line, width) => svg("svg", { class: "sample", width, height: 8, "aria-hidden": "true" }, stroke(line, width, 4));
const number = (value, digits) =>
  value === null ? "not finite" : (Number(value.toFixed(digits)) || 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");

/** Draws into a host, and redraws whenever its width changes. */
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

/** Buttons of which exactly one is pressed; null if there is only one option. */
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

/** Math.min and Math.max of more values than a function can have arguments. */
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

/** The value axis of a chart: its range, its ticks, and their format. */
function valueAxis(panel, values) {
  let low = least(values);
  let high = most(values);
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
