// The map.

const SHAPES = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  (r) => `M${-r * 0.88},${-r * 0.88}h${r * 1.76}v${r * 1.76}h${-r * 1.76}Z`,
  (r) => `M0,${-r * 1.15}L${r * 1.1},${r * 0.85}H${-r * 1.1}Z`,
  (r) => `M0,${-r * 1.25}L${r * 1.25},0L0,${r * 1.25}L${-r * 1.25},0Z`,
];
// Colour and shape together distinguish 32 classes; neighbours differ in both.
const shape = (label) => SHAPES[(label + Math.floor(label / COLOURS)) % SHAPES.length];

function mapFigure(host, maps, sprites) {
  const plot = html("div");
  const thumb = html("div", { class: "thumb", role: "img", "aria-label": "The image under the cursor" });
  const words = html("div", { role: "status", "aria-live": "off" });
  const classes = html("div", { class: "classes", role: "group", "aria-label": "Classes; a button shows only one" });
  let map = maps[0];
  let only = null;
  let at = null;
  let redraw = () => {};
  const pick = choice(maps.map(({ line, seed }) => ({ label: lineName(line), line, seed })), "Method", (index) => {
    map = maps[index];
    if (!map.labels?.includes(only)) only = null; // a class that this map does not have
    legend();
    redraw();
  });
  if (pick) host.append(pick);
  host.append(html("div", { class: "map" }, html("div", {}, plot), html("div", {}, html("div", { class: "preview" }, thumb, words), classes)));

  const label = (i) => (map.labels ? map.classes[map.labels[i]] : null);
  const mark = (i) => (map.labels ? map.labels[i] : 0);

  const present = () => (map.labels ? [...new Set(map.labels)].sort((a, b) => a - b) : []);

  function legend() {
    classes.replaceChildren(
      ...present().map((c) =>
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
      picture.setAttribute("aria-label", `Map of ${xs.length} images, ${lineName(map.line)}. ${words.textContent}. Arrow keys move to the next image.`);
    };
    // The nearest image for which `cost` is a number, among the images of the shown class.
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
    const marks = present().map((c) => ({ mark: () => svg("path", { class: `mark ${colour(c)}`, d: shape(c)(4.2), transform: "translate(20,6)" }), name: map.classes[c] }));
    return caption(picture, lineName(map.line), marks);
  }
  legend();
  const again = responsive(plot, draw);
  redraw = () => {
    again();
    dim();
  };
}
