import re
import shutil
import subprocess
from html import escape, unescape

import pytest

from atoll.report import write_report
from atoll.report.plots import figure_svg
from atoll.report.reproduction import section
from tests.report.run_folders import make_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="looks at pages in a real browser: no chromium on PATH"
)

OFFLINE = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=3000"
)


class Seen:
    """A page as the browser has it after its scripts ran."""

    def __init__(self, dom):
        self.dom = dom
        self.data = dict(re.findall(r'data-([\w-]+)="([^"]*)"', re.search(r"<html[^>]*>", dom)[0]))

    def figure(self, name):
        """What was drawn, up to the next figure or section."""
        return re.search(rf'data-figure="{name}">(.*?)</figure>', self.dom, re.DOTALL)[1]


# A window cannot be as narrow as a phone, a frame can.
FRAME = """<!doctype html><iframe style="border:0" width="{width}" height="900" srcdoc="{page}"></iframe><pre></pre>
<script>
const frame = document.querySelector("iframe");
const copy = () => (document.querySelector("pre").textContent = frame.contentDocument.documentElement.outerHTML);
frame.addEventListener("load", copy);
</script>"""


def look(page, tmp_path, width=1280, then=""):
    """Open a page with no network, and run a few lines of script in it when it is drawn."""
    text = page.read_text().replace("</body>", f"<script>{{ {then} }}</script></body>")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, page=escape(text)))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [
            BROWSER,
            *OFFLINE.split(),
            "--host-resolver-rules=MAP * ~NOTFOUND",
            profile,
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return Seen(unescape(re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    named = [("a_method_with_quite_a_long_name", 0), ("moon", 0), ("moon", 1), ("ssd", 2)]
    runs = [make_run(folder / f"{method}-{seed}", method, seed) for method, seed in named]
    return write_report(runs, folder / "report.html")


def test_every_figure_is_drawn_and_nothing_fails(page, tmp_path):
    seen = look(page, tmp_path)
    assert seen.data.get("ready") == "true"
    assert "error" not in seen.data
    curves = seen.figure("curves")
    # Loss, kNN, probe, uniformity, rank and alignment.
    assert curves.count('class="panel"') == curves.count("<h3>") == 6
    assert curves.count('class="curve') - curves.count('class="sample"') == 6 * 3  # one line a method
    assert seen.figure("partition").count('class="bubble') == 4 * 3
    assert seen.figure("map").count('class="mark') == 50
    assert seen.figure("map").count("aria-pressed") == 3 + 3  # methods, classes
    spectrum = seen.figure("spectrum")
    assert spectrum.count('class="curve') - spectrum.count('class="sample"') == 4
    assert "NaN" not in curves + spectrum + seen.figure("map") + seen.figure("partition")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_sideways(page, tmp_path, width):
    seen = look(page, tmp_path, width)
    assert seen.data["width"] == str(width)
    assert seen.data["fits"] == "true"


def test_whatever_scrolls_can_be_reached_and_scrolled_by_keys(page, tmp_path):
    then = """
        for (const one of document.querySelectorAll("details")) one.open = true;
        const all = [...document.querySelectorAll("body *")];
        const wide = all.filter((one) => one.scrollWidth > one.clientWidth);
        const found = wide.filter((one) => /auto|scroll/.test(getComputedStyle(one).overflowX));
        document.documentElement.dataset.scrolls = found.length;
        document.documentElement.dataset.stuck = found.filter((one) => one.tabIndex < 0).map((one) => one.tagName);
    """
    seen = look(page, tmp_path, 390, then)
    assert int(seen.data["scrolls"]) > 3
    assert seen.data["stuck"] == ""


def test_pointing_at_a_mark_shows_its_image(page, tmp_path):
    then = """
      const picture = document.querySelector('[data-figure="map"] .map svg');
      const box = document.querySelectorAll('.mark')[40].getBoundingClientRect();
      const at = {clientX: (box.left + box.right) / 2, clientY: (box.top + box.bottom) / 2, bubbles: true};
      picture.dispatchEvent(new PointerEvent('pointermove', at));
      document.body.dataset.said = document.querySelector('.preview').textContent;
      document.body.dataset.place = document.querySelector('.thumb').style.backgroundPosition;
    """
    dom = look(page, tmp_path, then=then).dom
    # Image 41 of class 40 % 3: the ninth of the second of two rows.
    assert 'data-said="dogimage 41 of 50"' in dom
    place = re.search(r'data-place="([\d.]+)% ([\d.]+)%"', dom)
    assert [float(share) for share in place.groups()] == pytest.approx([100 * 8 / 31, 100], abs=0.01)


def test_keys_move_along_curves_all_together(page, tmp_path):
    then = """
      const charts = [...document.querySelectorAll('[data-figure="curves"] .panel')];
      const press = (key) => charts[1].querySelector('svg').dispatchEvent(new KeyboardEvent('keydown', {key}));
      press('Home'); press('ArrowRight');
      document.body.dataset.said = charts.map((box) => box.querySelector('.readout span').textContent).join('|');
      document.body.dataset.knn = charts[1].querySelector('.readout').textContent;
    """
    dom = look(page, tmp_path, then=then).dom
    assert f'data-said="{"|".join(["round 1"] * 6)}"' in dom
    assert "moon 65.00 ± 0.00" in re.search(r'data-knn="([^"]*)"', dom)[1]


def test_a_button_hides_a_line_and_another_shows_a_method(page, tmp_path):
    then = """
      const count = () => document.querySelectorAll('[data-figure="curves"] svg[role] .curve').length;
      const before = count();
      document.querySelector('[data-figure="curves"] .legend button').click();
      document.body.dataset.lines = `${before} ${count()}`;
      const place = () => document.querySelector('.mark').getAttribute('transform');
      const first = place();
      document.querySelectorAll('[data-figure="map"] .switch button')[2].click();
      document.body.dataset.moved = String(first !== place());
      document.querySelector('.classes button').click();
      document.body.dataset.dim = document.querySelectorAll('.mark.dim').length;
    """
    dom = look(page, tmp_path, then=then).dom
    assert 'data-lines="18 12"' in dom
    assert 'data-moved="true"' in dom
    assert 'data-dim="33"' in dom


def test_unlabelled_and_unfinished_runs_are_drawn_too(tmp_path):
    bare = make_run(tmp_path / "bare", "moon", labels=False)
    begun = make_run(tmp_path / "begun", "ssd", rounds=1, asked=9, clients=60)
    page = write_report([bare, begun], tmp_path / "report.html")
    for width in (390, 1280):
        seen = look(page, tmp_path, width)
        assert seen.data.get("ready") == "true"
        assert "error" not in seen.data
        assert seen.data["fits"] == "true"
    assert seen.figure("partition").count('class="bubble') == 0
    assert seen.figure("partition").count('class="size"') == 4


def test_a_class_that_another_methods_map_lacks_is_no_longer_chosen(tmp_path):
    runs = [make_run(tmp_path / "a", "moon"), make_run(tmp_path / "b", "ssd", labels=False)]
    then = """
      [...document.querySelectorAll('.classes button')].at(-1).click();
      const before = document.querySelectorAll('.mark.dim').length;
      document.querySelectorAll('[data-figure="map"] .switch button')[1].click();
      document.body.dataset.dim = `${before} ${document.querySelectorAll('.mark.dim').length}`;
    """
    assert 'data-dim="34 0"' in look(write_report(runs, tmp_path / "report.html"), tmp_path, then=then).dom


def test_what_rounds_to_zero_has_no_sign(page, tmp_path):
    then = "document.body.dataset.said = [-0, -0.0004, -0.0006, 1234.5].map((value) => number(value, 3)).join(' ')"
    assert 'data-said="0.000 0.000 −0.001 1,234.500"' in look(page, tmp_path, then=then).dom


def test_a_very_long_name_moves_no_number_out_of_its_table(tmp_path):
    name = "package.module:" + 12 * "VeryLongName"
    runs = [
        make_run(tmp_path / f"{method[:3]}{seed}", method, seed)
        for method in (name, "ssd")
        for seed in (0, 1)
    ]
    then = """
      const tables = [...document.querySelectorAll('#results > .scroll')];
      document.body.dataset.within = tables.map((box) => box.scrollWidth <= box.clientWidth).join(' ');
    """
    seen = look(write_report(runs, tmp_path / "report.html"), tmp_path, then=then)
    assert seen.data["fits"] == "true"
    assert 'data-within="true true"' in seen.dom


def test_the_text_of_a_drawing_is_black_on_its_white(tmp_path):
    panel = {"kind": "bars", "groups": ["one"], "series": [{"label": "", "y": [1.0], "s": [None]}]}
    figure = {
        "says": "It is so.",
        "panels": [],
        "empty": [],
        "svg": figure_svg([{**panel, "title": ""}], "a title"),
    }
    record = {"title": "Mine", "rows": [{"label": "row", "values": {}}], "changed": {}, "published": False}
    drawn = section({**record, "figure": figure, "failures": {}, "notes": []})
    page = write_report([make_run(tmp_path / "run")], tmp_path / "report.html", comparison=drawn)
    then = """
      const texts = [...document.querySelectorAll('.plot text')];
      document.body.dataset.fills = [...new Set(texts.map((text) => getComputedStyle(text).fill))].join(' ');
    """
    assert 'data-fills="rgb(0, 0, 0)"' in look(page, tmp_path, then=then).dom


def test_a_round_that_one_seed_reached_is_read_without_a_deviation(tmp_path):
    runs = [make_run(tmp_path / f"s{seed}", seed=seed, rounds=rounds) for seed, rounds in ((0, 3), (1, 2))]
    then = """
      const chart = document.querySelector('[data-figure="curves"] .panel');
      document.body.dataset.said = chart.querySelector('.readout').textContent;
      document.body.dataset.drawn = chart.querySelector('svg').innerHTML.includes('NaN');
    """
    dom = look(write_report(runs, tmp_path / "report.html"), tmp_path, then=then).dom
    assert re.search(r'data-said="round 3 ssd 0.667" data-drawn="false"', dom)


@pytest.mark.parametrize(("dark", "ground"), [("false", ""), ("true", "rgb(255, 253, 249)")])
def test_a_figure_that_is_saved_from_a_dark_page_has_its_ground(page, tmp_path, dark, ground):
    then = f"""
      window.matchMedia = () => ({{ matches: {dark} }});
      const text = standAlone(document.querySelector('[data-figure="curves"] svg[role]'));
      const made = new DOMParser().parseFromString(text, 'image/svg+xml').documentElement;
      const grounds = [...made.querySelectorAll('rect')].map((rect) => rect.getAttribute('fill'));
      document.body.dataset.said = `${{made.tagName}} ${{made.querySelectorAll('path').length}} ${{grounds}}`;
    """
    assert (
        f'data-said="svg 6 {ground}"' in look(page, tmp_path, then=then).dom
    )  # three lines, and their legend


def test_the_names_and_values_of_many_methods_scroll_beside_their_charts(tmp_path):
    runs = [make_run(tmp_path / f"run-{i}", f"method_{i}") for i in range(200)]
    then = """
      const [legend, readout] = ['.legend', '.readout'].map((name) =>
        document.querySelector(`[data-figure="curves"] ${name}`));
      const rows = [legend, readout].map(({ children }) => children.length);
      const fit = [legend, readout].map((box) => box.clientHeight < innerHeight / 2);
      const scroll = [legend, readout].map((box) => box.scrollHeight > box.clientHeight);
      document.body.dataset.said = [...rows, ...fit, ...scroll].join(' ');
    """
    page = write_report(runs, tmp_path / "report.html")
    assert 'data-said="200 201 true true true true"' in look(page, tmp_path, then=then).dom


def test_a_saved_figure_has_its_title_and_legend_and_no_cursor(page, tmp_path):
    then = """
      const host = document.querySelector('[data-figure="curves"]');
      host.querySelector('.legend button').click();
      const read = (figure) => {
        const text = standAlone(document.querySelector(`[data-figure="${figure}"] svg[role]`));
        return new DOMParser().parseFromString(text, 'image/svg+xml').documentElement;
      };
      const [chart, map] = [read('curves'), read('map')];
      const words = (made) =>
        [...made.querySelectorAll(':scope > text, :scope > g > text')].map((one) => one.textContent);
      document.body.dataset.chart = [chart.querySelectorAll('circle').length, ...words(chart)].join('|');
      document.body.dataset.map = [map.querySelectorAll('circle').length, ...words(map)].join('|');
      const box = map.viewBox.baseVal;
      const low = [...map.querySelectorAll(':scope > g')].map((one) => one.transform.baseVal[0].matrix.f);
      document.body.dataset.inside = low.every((y) => y > 0 && y + 12 <= box.height);
      document.body.dataset.left = document.querySelectorAll('.plot svg svg, .panel svg svg').length;
    """
    dom = look(page, tmp_path, then=then).dom
    assert 'data-chart="0|Training loss (align_uniform)|moon|ssd"' in dom  # the first line is hidden
    assert (
        "data-map=\"0|a_method_with_quite_a_long_name|cat|dog|&lt;script&gt;alert('x')&lt;/script&gt;\""
        in dom
    )
    assert 'data-inside="true" data-left="0"' in dom
