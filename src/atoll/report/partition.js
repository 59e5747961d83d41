// The partition: clients as rows, classes as columns; the area of a bubble is the number of images.

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
    const narrow = width < PHONE && counted; // show sizes only as numbers
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
      return html("div", {}, picture, html("p", { class: "muted" }, `${clients.length} of the ${number(of, 0)} clients, evenly from the largest to the smallest.`));
    }
    return picture;
  }
  redraw = responsive(wide, draw);
}
