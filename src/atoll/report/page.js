// The page.

const DRAW = {
  curves: (host) => charts(host, data.curves, 230),
  measures: (host) => charts(host, data.measures, 190),
  traffic: (host) => charts(host, data.traffic, 190),
  spectrum: (host) => charts(host, [data.spectrum], 340),
  partition: (host) => partitionFigure(host, data.partitions),
  map: (host) => mapFigure(host, data.maps, data.sprites),
};
for (const host of document.querySelectorAll("[data-figure]")) {
  DRAW[host.dataset.figure](host);
  saveButtons(host);
}

document.documentElement.dataset.width = String(window.innerWidth);
document.documentElement.dataset.fits = String(document.documentElement.scrollWidth <= window.innerWidth);
document.documentElement.dataset.ready = "true";
