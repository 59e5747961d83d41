// Saves a figure as SVG files of their own: with title and legend, without cursor and selection, and with what the
// page's style gives its elements written into them.

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight"];
const HEAD = 30;
const ENTRY = 22; // height of a legend's row

/** The title and legend that a saved picture gets; an entry is {mark, name}, and a mark is drawn in 24 × 12 pixels. */
function caption(picture, title, entries) {
  picture.caption = { title, entries };
  return picture;
}

function standAlone(picture) {
  const { title, entries } = picture.caption ?? { title: "", entries: [] };
  const width = picture.viewBox.baseVal.width;
  const height = picture.viewBox.baseVal.height;
  const head = title ? HEAD : 0;
  const drawing = picture.cloneNode(true);
  drawing.querySelectorAll(".cursor, .ring, .at, .row").forEach((one) => one.remove());
  drawing.setAttribute("y", head);
  let [x, y] = [14, head + height + ENTRY / 2];
  const legend = entries.map(({ mark, name }) => {
    const wide = 44 + 7 * name.length;
    if (x > 14 && x + wide > width) [x, y] = [14, y + ENTRY];
    const made = svg("g", { transform: `translate(${x},${y})` }, mark(), svg("text", { x: 30, y: 10 }, name));
    x += wide;
    return made;
  });
  const total = entries.length ? y + ENTRY : head + height;
  const made = svg("svg", { viewBox: `0 0 ${width} ${total}`, width, height: total }, title ? svg("text", { class: "strong", x: 14, y: 20 }, title) : null, drawing, legend);
  // Light colours of a dark page need its dark ground.
  if (matchMedia("(prefers-color-scheme: dark)").matches) {
    const ground = getComputedStyle(document.documentElement).getPropertyValue("--card");
    made.prepend(svg("rect", { width: "100%", height: "100%", fill: ground }));
  }
  picture.after(made); // an element has a style only in the page
  for (const one of [made, ...made.querySelectorAll("*")]) {
    const style = getComputedStyle(one);
    for (const key of STYLES) one.setAttribute(key, style.getPropertyValue(key));
  }
  made.remove();
  for (const one of made.querySelectorAll("[class]")) one.removeAttribute("class");
  made.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(made);
}

function saveButtons(host) {
  const pictures = () => [...host.querySelectorAll("svg[role=img]")];
  if (!pictures().length) return;
  const save = () =>
    pictures().forEach((picture, index) => {
      const address = URL.createObjectURL(new Blob([standAlone(picture)], { type: "image/svg+xml" }));
      const name = `${host.dataset.figure}${index ? `-${index + 1}` : ""}.svg`;
      html("a", { href: address, download: name }).click();
      URL.revokeObjectURL(address);
    });
  host.after(html("button", { type: "button", class: "save", onclick: save }, "Save as SVG"));
}
