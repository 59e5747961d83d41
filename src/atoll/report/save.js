// Saves a figure as an SVG file of its own: what the page's style gives its elements is written into them.

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight"];

function standAlone(picture) {
  const copy = picture.cloneNode(true);
  const styled = [picture, ...picture.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((made, index) => {
    const style = getComputedStyle(styled[index]);
    for (const key of STYLES) made.setAttribute(key, style.getPropertyValue(key));
    made.removeAttribute("class");
  });
  // Light colours of a dark page need its dark ground.
  if (matchMedia("(prefers-color-scheme: dark)").matches) {
    const ground = getComputedStyle(document.documentElement).getPropertyValue("--card");
    copy.prepend(svg("rect", { width: "100%", height: "100%", fill: ground }));
  }
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
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
