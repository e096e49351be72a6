"""Pages in a real browser: what is in sight, what keys and clicks do, and what hostile texts cannot do."""

import tarfile
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path

import pytest
import torch
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from ddpdoctor.cli.output import render
from ddpdoctor.cli.report import read_run
from ddpdoctor.cli.verbs import read_command_line
from ddpdoctor.model.pictures import SpanKind
from ddpdoctor.report import blocks
from tests import benches, pages
from tests.browser import started_browser

RUNS = Path(__file__).parents[1] / "data" / "runs"
SIZES = [(1280, 800), (400, 800)]
HOSTILE = (
    '</script><script>pwned=1</script><img src=x onerror=pwned=2>"\'><a href="javascript:pwned=3">x</a>'
    "{{ 7*7 }}<!--\u202e\x1b[31m&lt;b&gt;"
)
SHOWN = HOSTILE.replace("\u202e\x1b", "\\u202e\\x1b")


@pytest.fixture(scope="module")
def browser():
    with started_browser() as started:
        yield started


@pytest.fixture(autouse=True)
def no_complaints(browser):
    """Hold every page of every test to a silent console and no request but for the page itself."""
    yield
    assert browser.complaints() == []
    assert {one for one in browser.requests() if not one.startswith("file:///")} == set()


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Write the page of a content with a stuck job's findings, and return its file."""

    def write(content=None, report=None):
        monkeypatch.setitem(blocks.BUILDERS, "pictures", f"{__name__}:made")
        made.content = content or pages.content()
        data = {"pictures": {}, **(report.data if report is not None else {})}
        page = tmp_path / "page.html"
        page.write_text(render(replace(report or pages.report(), data=data), "html"))
        return page

    return write


def made(report):
    del report
    return made.content


def in_sight(browser, selector):
    """Return the text of an element that is whole in the window without scrolling."""
    box = browser.ask(
        "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return [box.top, box.left, innerHeight - box.bottom, innerWidth - box.right]",
        selector,
    )
    assert min(box) >= 0, f"{selector} is out of sight: {box}"
    return browser.one(selector).text


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("script", [True, False], ids=["script", "no-script"])
def test_rank_line_cause_and_fix_are_in_sight_at_once(browser, save, width, height, script):
    browser.open(save(), width, height, script=script)
    assert in_sight(browser, "h1").lower() == pages.STUCK.summary
    assert in_sight(browser, ".key .who").startswith("rank 1")
    assert in_sight(browser, ".key .path").startswith("data.py:112 in load_shard")
    assert in_sight(browser, ".verdict [data-copied]") == pages.FIX
    assert "confidence high" in in_sight(browser, ".status")
    assert browser.ask("return document.documentElement.scrollWidth") <= width


def test_a_click_on_a_lane_opens_its_ranks(browser, save):
    browser.open(save())
    lanes = [one.text.splitlines() for one in browser.all(".lane .label")]
    assert lanes == [["rank 1", "culprit, in load_shard"], ["\u25b8 ranks 0, 2-7", "7 ranks, in all_reduce"]]
    button = browser.one(".lane button.label")
    button.click()
    assert [one.text.splitlines()[0] for one in browser.all(".lane.member .label")] == [
        f"rank {n}" for n in (0, 2, 3, 4, 5, 6, 7)
    ]
    button = browser.one(".lane button.label")
    assert button.get_attribute("aria-expanded") == "true"
    button.send_keys(Keys.SPACE)
    assert len(browser.all(".lane")) == 2


def shown_range(browser):
    text = browser.one(".tools .dim").text
    return [float(part) for part in text.replace("to", "").replace("of", "").replace("s", "").split()]


def settled_range(browser):
    """Return the range that is shown once the next frame is drawn."""
    browser.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    return shown_range(browser)


def test_the_timeline_zooms_and_pans_by_buttons_keys_wheel_and_drag(browser, save):
    browser.open(save())
    plot = browser.one(".plot")
    start, end, length = settled_range(browser)
    assert (start, end, length) == (8.64, 16.8, 16.8)  # the detailed end
    browser.one("[aria-label='Zoom in']").click()
    assert settled_range(browser) == [10.68, 14.76, 16.8]
    plot.send_keys("-")
    assert settled_range(browser) == [8.64, 16.8, 16.8]
    plot.send_keys(Keys.ARROW_LEFT)
    assert settled_range(browser) == [7.416, 15.576, 16.8]
    plot.send_keys(Keys.HOME)
    assert settled_range(browser) == [0.0, 16.8, 16.8]
    bars = browser.one(".lane .bars")
    box = bars.rect
    view = browser.ask("return [scrollX, scrollY]")
    browser.wheel(box["x"] - view[0] + 100, box["y"] - view[1] + 20, -200, with_control=True)
    zoomed = settled_range(browser)
    assert zoomed[1] - zoomed[0] < 16.8
    ActionChains(browser.driver).drag_and_drop_by_offset(bars, 150, 0).perform()
    assert settled_range(browser)[0] < zoomed[0]
    before = settled_range(browser)
    browser.wheel(box["x"] - view[0] + 100, box["y"] - view[1] + 20, -200, with_control=False)
    assert settled_range(browser) == before


def test_at_first_the_last_steps_before_the_fault_are_in_sight(browser, save):
    timeline = pages.timeline()
    fault = replace(timeline.events[0], at_ms=10_800.0, fault=True)
    faulty = replace(timeline, events=(fault,))
    browser.open(save(replace(pages.content(), draw_pictures=lambda: (faulty,))))
    assert settled_range(browser) == [10.233, 10.98, 16.8]
    assert browser.one(".events .fault").text == "10.80 s: the hang is certain (rank 1)"


def finished_timeline():
    """A timeline of a job that finished: nothing happened, and no span is open."""
    timeline = pages.timeline()
    steps = tuple(pages.step_spans(number, 0, detail=True) for number in range(60))
    long_one = tuple(replace(span, end_ms=span.end_ms + 0.7) for span in steps[50][:1])
    spans = tuple(span for step in (*steps[48:50], long_one, *steps[51:]) for span in step)
    lanes = tuple(
        replace(lane, blamed=False, coarse=tuple(one for one in spans if one.kind is SpanKind.STEP), detail=spans)
        for lane in timeline.lanes
    )
    return replace(timeline, lanes=lanes, events=(), classes=(tuple(range(8)),))


def test_of_a_finished_job_a_usual_step_is_in_sight_at_first(browser, save):
    content = replace(pages.content(), draw_pictures=lambda: (finished_timeline(),))
    browser.open(save(content))
    start, end, _ = settled_range(browser)
    assert (end - start) * 1000 == pytest.approx(2.2 * (pages.STEP_MS - 1), abs=3)
    assert browser.one(".tools").text.splitlines()[3].startswith("Step ")


def test_of_replicas_that_differ_the_step_where_they_began_to_is_in_sight_at_first(browser, save):
    """Also if an event is marked as the fault: it is the end of the rank. Any other verdict opens at the fault."""
    fault = replace(pages.timeline().events[0], at_ms=10_800.0, fault=True)
    content = replace(pages.content(), draw_pictures=lambda: (replace(finished_timeline(), events=(fault,)),))
    drift = replace(pages.STUCK, code="DD501", kind="param-drift", step=52)
    browser.open(save(content, replace(pages.report(), verdict=drift, findings=(drift,))))
    start, end, _ = settled_range(browser)
    assert start < 52 * pages.STEP_MS / 1000 < 53 * pages.STEP_MS / 1000 - 0.001 < end
    assert end - start < 3 * pages.STEP_MS / 1000
    browser.open(save(content, replace(pages.report(), verdict=replace(drift, code="DD601"))))
    start, end, _ = settled_range(browser)
    assert start < 10.8 < end


@pytest.mark.parametrize("whole", [False, True])
def test_the_legend_of_the_timeline_has_the_colors_that_are_drawn_and_no_other(browser, save, whole):
    browser.open(save())
    if whole:
        browser.one(".plot").send_keys(Keys.HOME)
    settled_range(browser)
    kinds = "return [...new Set([...document.querySelectorAll(arguments[0])].map((one) => one.classList[0]))].sort()"
    drawn = browser.ask(kinds, ".lanes .strip rect[class^=k-], .lanes .bars rect[class^=k-]")
    assert browser.ask(kinds, ".lanes .legend rect[class^=k-]") == drawn
    assert ("k-checkpoint" in drawn, "k-point-to-point" in drawn) == (True, False)


def test_labels_of_the_timeline_are_not_on_hatching(browser, save):
    browser.open(save())
    browser.one(".plot").send_keys("+")
    settled_range(browser)
    below = browser.ask(
        "return [...document.querySelectorAll('.lane text')].filter((one) => one.textContent.startsWith('wait'))"
        ".map((one) => one.previousElementSibling.getAttribute('class'))"
    )
    assert set(below) == {"k-wait"}


def test_a_bar_says_its_parts_and_its_numbers_are_in_a_folded_table(browser, save):
    browser.open(save())
    bars = browser.one("figure.bars")
    bars.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert browser.one(".tip-box").text == "rank 1: forward 60 ms, 53.3% of its step"
    parts = "return [...document.querySelectorAll('.bars .cell rect')].map((one) => one.getBoundingClientRect().width)"
    widths = browser.ask(parts)
    assert [width / widths[1] for width in widths] == pytest.approx([0.2, 1, 0.675, 0.875, 1], rel=0.01)
    table = browser.one("figure.bars ~ details")
    assert not table.get_property("open")
    table.find_element("tag name", "summary").click()
    rows = [row.text for row in table.find_elements("css selector", "tbody tr")]
    assert rows == ["rank 0 12 60 40.5 112", "rank 1 52.5 60 0 112"]
    assert [one.text for one in browser.all(".bars .named")] == ["rank 1\n52.5\n60\n112.5 ms"]


def test_a_level_in_a_chart_has_its_name_at_its_line(browser, save):
    browser.open(save())
    label = browser.one(".reference-label")
    assert label.text == "100 Gbit/s network: 11.5"
    line = browser.one(".curve.reference")
    assert 0 <= line.location["y"] - label.location["y"] - label.size["height"] < 10
    assert browser.ask("return document.querySelectorAll('.chart .gridline').length") > 10


def test_on_a_phone_the_graph_is_stacked_and_an_option_is_on_one_line(browser, save):
    fix = "see what rank 1 waits for in load_shard (data.py:112), and if it is just slow, raise --hang-timeout-of-a-job"
    verdict = replace(pages.STUCK, fix=fix)
    page = save(report=replace(pages.report(), verdict=verdict))
    browser.open(page, 1280)
    assert [browser.one(what).is_displayed() for what in (".graph svg", ".stacked")] == [True, False]
    for width in (320, 360, 400, 440):
        browser.open(page, width)
        assert [browser.one(what).is_displayed() for what in (".graph svg", ".stacked")] == [False, True]
        assert browser.ask("return document.querySelector('.option').getBoundingClientRect().height") < 30
        assert browser.ask("return document.documentElement.scrollWidth") <= width
    assert [one.text.splitlines() for one in browser.all(".stacked > li")] == [
        ["rank 7", "in broadcast", "train.py:70 in save", "\u2193 waits for ranks 0-6"],
        ["ranks 0, 2-6", "in all_reduce", "train.py:61 in main", "\u2193 waits for rank 1"],
        ["rank 1 culprit", "in load_shard", "data.py:112 in load_shard"],
    ]


def test_on_a_phone_what_a_check_saw_is_below_its_name(browser, save):
    seen = "what a check saw, in as many words as it takes to fill more than one line of a phone"
    checks = tuple(replace(check, seen=seen) for check in pages.CHECKS)
    browser.open(save(report=replace(pages.report(), checks=checks)), 400)
    cell = browser.one("[data-rows=checks-rows] td:last-child")
    assert cell.text == seen
    assert cell.rect["x"] >= 0
    assert cell.rect["x"] + cell.rect["width"] <= 400


def test_hovering_and_keys_say_what_a_rank_did(browser, save):
    browser.open(save())
    plot = browser.one(".plot")
    plot.send_keys(Keys.ARROW_DOWN, "n", "p")
    said = browser.one(".saying").text
    for part in (
        "rank 0: all_reduce #240",
        "group default",
        "float32 [1024, 16]",
        pages.LINE,
        "from 10.880 s for 5.92 s, not ended",
    ):
        assert part in said
    assert browser.ask("return document.getElementById('said').textContent") == said
    bars = browser.one(".lane.blamed .bars")
    ActionChains(browser.driver).move_to_element_with_offset(bars, 0, -3).perform()
    assert browser.one(".tip-box").text == f"rank 1: load_shard, {pages.FAULT}, from 10.800 s for 6.00 s, not ended"


def test_arrow_keys_read_grids_and_charts(browser, save):
    browser.open(save())
    grid = browser.one("table.grid")
    grid.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert browser.one(".tip-box").text == "rank 1, layers.1.weight, equal, rank 1, layers.1: 0x00000062"
    browser.one("figure.chart").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.one(".tip-box").text == "all_reduce float32: 0.1846 at 2 KiB"
    heads = browser.ask(
        "return ['thead th', 'tbody th'].map(one => getComputedStyle(document.querySelector('.grid ' + one)).position)"
    )
    assert heads == ["sticky", "sticky"]


def test_a_filter_hides_rows(browser, save):
    browser.open(save())
    browser.one("[data-filter=others-list]").send_keys("loader")
    assert [one.text.split("\n")[0] for one in browser.all("#others-list article") if one.is_displayed()] == [
        "warning DD801 input-bound"
    ]
    browser.one("[data-filter=checks-rows]").send_keys("could not")
    assert [one.text for one in browser.all("[data-rows=checks-rows] tr") if one.is_displayed()] == [
        "could not tell DD605 transport no stack of rank 3"
    ]
    assert browser.one("[data-filtered=checks-rows]").text == "1 of 5"
    skipped = browser.all("#checks details")[1]
    assert not skipped.get_property("open")
    browser.one("[data-filter=checks-rows]").clear()
    browser.one("[data-filter=checks-rows]").send_keys("fewer than 20")
    assert skipped.get_property("open")


def test_the_fix_is_copied(browser, save):
    browser.open(save())
    browser.one(".verdict [data-copy]").click()
    assert browser.waits_for("return document.getElementById('said').textContent === 'Copied'")
    box = browser.one("[data-filter=others-list]")
    box.send_keys(Keys.CONTROL, "v")
    assert box.get_attribute("value") == pages.FIX


def test_the_page_works_by_keyboard_alone(browser, save):
    browser.open(save())
    reached = []
    for _ in range(60):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        reached.append(
            browser.ask(
                "const at = document.activeElement;"
                "return [at.className || at.tagName, getComputedStyle(at).outlineStyle]"
            )
        )
        if reached[-1][0] == "BODY":
            break
    names = [name for name, _ in reached]
    assert names[0] == "skip"
    for wanted in ("scripted", "plot", "label", "grid", "chart", "INPUT", "SUMMARY"):
        assert wanted in names, names
    assert {outline for name, outline in reached if name != "BODY"} == {"solid"}


CONTRAST = """
const channel = (value) => { value /= 255; return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4 };
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = parse(getComputedStyle(at).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
};
const bad = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.getClientRects().length || element.closest("svg, script, style")) continue;
  const [one, other] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (ratio < 4.5) bad.push(`${element.tagName}.${element.className} ${element.textContent.slice(0, 30)} ${ratio}`);
}
return bad;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_have_the_contrast_of_wcag_aa(browser, save, dark):
    browser.open(save(), dark=dark)
    assert browser.ask(CONTRAST) == []


def test_pictures_have_texts_and_controls_have_names(browser, save):
    browser.open(save())
    unnamed = browser.ask(
        "return [...document.querySelectorAll('svg:not([aria-hidden]), button, input, [tabindex], nav, section')]"
        ".filter("
        "(one) => !(one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') || one.textContent.trim()"
        " || one.labels?.length)).map((one) => one.outerHTML.slice(0, 80))"
    )
    assert unnamed == []
    assert browser.ask(
        "return ['main', 'nav', 'header', 'h1'].map((name) => document.querySelectorAll(name).length)"
    ) == [1, 1, 1, 1]
    words = [one.text for one in browser.all(".graph figcaption li")]
    assert (
        words[2]
        == "rank 7 (in broadcast, train.py:70 in save) waits for rank 1 (in load_shard, data.py:112 in load_shard)"
    )


def test_without_its_script_a_page_can_be_read(browser, save):
    browser.open(save(), script=False)
    text = browser.one("main").text
    for part in (
        "all_reduce, in default, number 240",
        "train.py:61 main",
        "data = fetch(path)",
        "differs",
        "DD801",
        "DD605",
    ):
        assert part in text
    assert not browser.one("[data-copy]").is_displayed()
    assert not browser.one(".stage").is_displayed()


def spoiled(value):
    """Replace every text in blocks, however deep, by a hostile one."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name not in {"align", "started_at"}]
        return replace(value, **{name: spoiled(getattr(value, name)) for name in names})
    if isinstance(value, str) and not isinstance(value, Enum):
        return HOSTILE
    if isinstance(value, tuple):
        return tuple(map(spoiled, value))
    return value


def test_hostile_texts_run_nothing_and_are_shown_as_they_are(browser, save):
    report = replace(
        pages.report(), verdict=spoiled(pages.STUCK), findings=(spoiled(pages.STUCK),), checks=spoiled(pages.CHECKS),
        command=("ddpdoctor", HOSTILE), started_at=HOSTILE, ended_at=HOSTILE, tool_version=HOSTILE,
    )  # fmt: skip
    blocks = ((*benches_blocks(),),)
    pictures = spoiled(pages.content().pictures)
    content = replace(spoiled(replace(pages.content(), about=blocks)), draw_pictures=lambda: pictures)
    browser.open(save(content, report))
    browser.one(".lane button.label").click()
    browser.one(".plot").send_keys("n")
    assert SHOWN in browser.one(".saying").text
    browser.one("table.grid").send_keys(Keys.ARROW_DOWN)
    assert SHOWN in browser.one(".tip-box").text
    assert browser.one("h1").text.lower() == SHOWN.lower()
    assert browser.driver.title.startswith(SHOWN)
    links = "document.querySelectorAll('[href^=javascript]').length"
    assert browser.ask(f"return [typeof pwned, document.images.length, {links}]") == ["undefined", 0, 0]
    assert browser.ask("return [...document.scripts].map((one) => one.type)") == ["application/json", ""]
    assert "\u202e" not in browser.driver.page_source


def benches_blocks():
    """Return the blocks of other verbs: lists, facts and tables."""
    return tuple(block for section in blocks.read_content(benches.everything()).sections for block in section)


@pytest.mark.full
def test_a_script_that_gets_into_a_page_is_stopped_by_its_policy(browser, save, tmp_path):
    page = tmp_path / "tampered.html"
    page.write_text(
        save().read_text().replace("</main>", "<script>pwned=1</script><img src='https://example.com/x.png'></main>")
    )
    browser.open(page)
    assert browser.ask("return typeof pwned") == "undefined"
    assert len(browser.complaints()) == 2
    assert not any(one.startswith("http") for one in browser.requests())


@pytest.mark.full
def test_a_thousand_ranks_fit_a_page_and_only_lanes_in_sight_are_drawn(browser, save):
    small, large = (save(pages.content(ranks)).stat().st_size for ranks in (8, 1024))
    assert small < 2**20
    assert large < 5 * 2**20
    browser.open(save(pages.content(1024)))
    browser.one(".lane button.label").click()
    settled_range(browser)
    assert browser.ask("return document.querySelectorAll('.lane').length") == 1025
    assert (
        5
        < browser.ask("return [...document.querySelectorAll('.bars')].filter((one) => one.childElementCount).length")
        < 60
    )


def reports(folder):
    """Yield reports of jobs and benches by name."""
    for name in ("crash", "drift", "hung"):
        with tarfile.open(RUNS / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        yield name, read_run(folder / name)
    yield from (("bench", benches.everything()), ("bench hung", benches.hung()), ("bench of one", benches.one_rank()))


def commands(folder):
    """Yield a command line for verbs that check, each of which writes a page in this folder."""
    weights = [str(folder / name) for name in ("a.pt", "b.pt")]
    torch.save({"weight": torch.ones(2)}, weights[0])
    torch.save({"weight": torch.zeros(2)}, weights[1])
    yield "check-env", ("shm", "omp", "--no-torch")
    yield "check-data", ("--samples", "10", "--world-size", "4")
    yield "check-checkpoint", weights
    yield "check-consistency", ("--diff", *weights)
    yield "analyze", (str(folder / "crash" / "report.json"),)
    yield "report", (str(folder / "hung"),)


@pytest.mark.full
def test_the_page_of_every_verb_opens(browser, tmp_path):
    for name, one in reports(tmp_path):
        page = tmp_path / f"{name}.html"
        page.write_text(render(one, "html"))
        check_page(browser, page)
    for verb, words in commands(tmp_path):
        page = tmp_path / f"{verb}.html"
        run, options = read_command_line([verb, *words, "--format", "html", *output_of(verb, page)])
        run(options)
        check_page(browser, page)


def output_of(verb, page):
    return ["--html", str(page)] if verb in {"analyze", "attach", "wrap"} else ["-o", str(page)]


def check_page(browser, page):
    browser.open(page, width=400)
    assert browser.one("h1").text, page
    assert browser.ask("return document.documentElement.scrollWidth") <= 400, page
    assert browser.complaints() == [], page
