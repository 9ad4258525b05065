"""The report in a real browser: it works offline, narrow and dark, with the keyboard, and shows data as text."""

import json
import os
import shutil
from dataclasses import asdict, replace
from itertools import combinations

import pytest
import torch

import dif
from dif.cli.description import Description
from dif.report.builder import Report, build_reports, load_reports, save_reports, write_html
from dif.report.words import format_number
from dif.runtime.archive import write_document

EVIL = "<script>alert(1)</script>"
LONG = "applicants aged 25 or younger at the time of their application, in Deutsche Mark"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report with images, groups, retrained samples, and labels that would do harm as markup."""
    folder = tmp_path_factory.mktemp("page")
    source = folder / "model.py"
    source.write_text(f"""
import torch, dif
torch.manual_seed(0)
X = torch.rand(120, 6, 6, dtype=torch.float64)
y = torch.where(X[:, :3].mean((1, 2)) > X[:, 3:].mean((1, 2)), 1.0, -1.0).double()
group = torch.arange(120) % 2
def loss(params, z):
    return torch.nn.functional.softplus(-z[1] * (z[0].flatten(1) @ params["w"]))
train = dif.Samples(loss, (X, y), name="train")
risk = train.mean()
fair = (train.mean(where=group == 1) <= risk - 0.01).named({EVIL!r} + " " + {LONG!r})
problem = dif.Problem(risk + dif.ridge(0.01), [fair])
solution = dif.fit(problem, {{"w": torch.zeros(36).double()}}, show_progress=False)
targets = {{{EVIL!r}: risk, "gap": train.mean(where=group == 1) - train.mean(where=group == 0)}}
names = ["<b>bold</b> & more", {EVIL!r}] + [f"sample {{i}}" for i in range(2, 120)]
groups = [f"g{{int(g)}} {LONG}" for g in group]
features = {{{EVIL!r}: [{EVIL!r}] * 120, {LONG!r}: y}}
images = X
""")
    told = Description.read(source)
    target, removals = told.targets["gap"], told.train.remove_each()
    scores = dif.DirectionalInfluence(told.solution).scores({"gap": target}, removals, show_progress=False)
    (report,) = build_reports(scores, told.subjects, [target], title="model", command=f"dif score {EVIL}")
    retrained = [sample["index"] for sample in report.samples[:10]]
    actual = dif.Retraining(told.solution).scores(
        {"gap": target}, told.train.remove_each(retrained), show_progress=False
    )
    report = report.with_actual(retrained, actual, "dif retrain")
    save_reports(folder / "report.json", [report])
    write_html(folder / "report.html", load_reports(folder / "report.json"))
    return folder / "report.html", report


@pytest.fixture(scope="module")
def browser():
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        reason = "no chromium and chromedriver on the path (Debian: apt install chromium chromium-driver)"
        if os.environ.get("DIF_NEEDS_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def open_page(browser, path, width=1280, dark=False):
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(f"file://{path}")
    return browser


def selected_index(browser):
    return browser.execute_script("return document.querySelector('#table tbody tr[aria-selected=true]').dataset.index")


def test_it_opens_without_an_error_and_asks_for_nothing(browser, page):
    open_page(browser, page[0])
    assert browser.get_log("browser") == []
    asked = [
        entry["message"] for entry in browser.get_log("performance") if "Network.requestWillBeSent" in entry["message"]
    ]
    assert all('"url":"file://' in message for message in asked)
    assert len([m for m in asked if '"Network.requestWillBeSent"' in m]) <= 1
    assert page[0].stat().st_size < 5e6


def test_data_are_shown_as_text(browser, page):
    open_page(browser, page[0])
    assert browser.execute_script("return document.querySelectorAll('script').length") == 2
    shown_text = browser.execute_script("return document.body.innerText")
    assert EVIL in shown_text
    browser.execute_script("""
        const box = document.getElementById('search');
        box.value = 'bold'; box.dispatchEvent(new Event('input'));""")
    assert "<b>bold</b> & more" in browser.execute_script("return document.querySelector('#table tbody').innerText")
    assert browser.execute_script("return document.querySelectorAll('#table b').length") == 0


MARKUP = "</script></style></title>\"'><img src=x onerror='pwned=1'><svg onload='pwned=1'><script>pwned=1</script>"
HARM = """
    const made = document.querySelectorAll('img, svg[onload], iframe, object, [onerror], [onload]').length;
    const links = [...document.querySelectorAll('[href]')].map(a => a.getAttribute('href'));
    const foreign = links.filter(link => !/^(#samples|data:text\\/csv;)/.test(link)).length;
    return [typeof window.pwned, document.querySelectorAll('script').length, made, foreign];"""
INERT = ["undefined", 2, 0, 0]
CLICK_ALL = """
    for (const button of document.querySelectorAll('[data-choice]')) {
        button.click();
        for (const line of document.querySelectorAll('#table tbody tr')) line.click();
    }"""


def find_fields(content, path=()):
    """Return the place of every value and every name in a report, as keys one after the other."""
    listed = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    fields = [(path, None)] if path else []
    for key, value in listed:
        fields += find_fields(value, (*path, key)) + ([(path, key)] if isinstance(key, str) and path else [])
    return fields


def read_field(content, path):
    return read_field(content[path[0]], path[1:]) if path else content


def spoil(content, path, name, text):
    """Return a copy with markup in place of a value, or of the name of one."""
    copied = json.loads(json.dumps(content))
    parent = read_field(copied, path[:-1] if name is None else path)
    if name is None:
        parent[path[-1]] = text
    else:
        parent[text] = parent.pop(name)
    return copied


def read_foreign(folder, content):
    """Write the page of a report of a stranger, who knows how to compute its checksum; None where it is refused."""
    write_document(folder / "report.json", "report", {"answers": [content]})
    try:
        write_html(folder / "report.html", load_reports(folder / "report.json"))
    except dif.InvalidInputError:
        return None
    return folder / "report.html"


@pytest.fixture(scope="module")
def content(page):
    return json.loads(json.dumps(asdict(replace(page[1], samples=page[1].samples[:2]))))


def test_markup_in_all_texts_is_text(browser, content, tmp_path):
    """All texts at once, and two numbers that the page writes as they are."""
    texts = [path for path, name in find_fields(content) if name is None and isinstance(read_field(content, path), str)]
    spoiled = content
    for number, path in enumerate([*texts, ("total",), ("agreement", "n")]):
        if path[-1] != "state":  # this one is refused unless it is one of three
            spoiled = spoil(spoiled, path, None, f"{MARKUP}{number}")
    written = read_foreign(tmp_path, spoiled)
    assert written is not None
    assert open_page(browser, written).execute_script(HARM) == INERT
    assert browser.execute_script("return document.body.textContent").count("pwned=1") > 50


def test_markup_in_any_field_is_text(browser, content, tmp_path):
    """Each value and each name alone, so that no other stops the script of the page."""
    accepted = []
    for path, name in find_fields(content):
        written = read_foreign(tmp_path, spoil(content, path, name, MARKUP))
        if written is None:
            continue
        accepted += load_reports(tmp_path / "report.json")
        if path[0] in ("title", "target", "run", "model"):  # the head of the page shows those of one report
            assert open_page(browser, written).execute_script(HARM) == INERT, (path, name)
    assert len(accepted) > 100
    for begin in range(0, len(accepted), 50):
        write_html(tmp_path / "some.html", accepted[begin : begin + 50])
        open_page(browser, tmp_path / "some.html").execute_script(CLICK_ALL)
        assert browser.execute_script(HARM) == INERT


def test_the_policy_of_the_page_stops_scripts_of_others(browser, page):
    """What escaping would miss does not run either."""
    open_page(browser, page[0])
    browser.execute_script("document.body.insertAdjacentHTML('beforeend', arguments[0])", MARKUP)
    browser.execute_script(
        "const made = document.createElement('script'); made.textContent = 'pwned=1'; document.body.append(made);"
    )
    assert browser.execute_async_script("setTimeout(() => arguments[0](typeof window.pwned), 50)") == "undefined"


def test_search_narrows_the_table_and_columns_sort_it(browser, page):
    open_page(browser, page[0])
    rows = "return [...document.querySelectorAll('#table tbody tr')].map(r => r.querySelector('th').textContent)"
    everyone = browser.execute_script(rows)
    assert len(everyone) == 50
    browser.find_element("id", "search").send_keys("sample 11")
    found = browser.execute_script(rows)
    assert 0 < len(found) < 50
    assert all("sample 11" in name for name in found)
    assert browser.find_element("id", "count").text.endswith("of 120")
    browser.find_element("id", "search").clear()
    browser.find_element("css selector", "#table thead th[data-key=name] button").click()
    browser.find_element("id", "search").send_keys("sample")
    names = browser.execute_script(rows)
    assert names == sorted(names, key=lambda name: int(name.split()[1]))
    assert browser.execute_script("return document.querySelector('th[data-key=name]').ariaSort") == "ascending"


def test_a_click_on_a_point_selects_its_row(browser, page):
    open_page(browser, page[0])
    points = browser.find_elements("css selector", "#scatter circle[data-index]")
    assert len(points) == 10  # those that were retrained
    index = points[4].get_attribute("data-index")
    browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", points[4])
    assert selected_index(browser) == index
    assert "chosen" in points[4].get_attribute("class")
    name = next(sample["name"] for sample in page[1].samples if sample["index"] == int(index))
    assert browser.find_element("css selector", "#detail h3").text == name
    browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('mouseenter'))", points[2])
    assert browser.find_element("id", "tip").is_displayed()


def test_the_keyboard_is_enough(browser, page):
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page[0])
    line = browser.find_element("css selector", "#table tbody tr")
    browser.execute_script("arguments[0].focus()", line)
    line.send_keys(Keys.ARROW_DOWN)
    second = browser.switch_to.active_element
    second.send_keys(Keys.ENTER)
    assert selected_index(browser) == second.get_attribute("data-index")
    point = browser.find_elements("css selector", "#scatter circle[data-index]")[6]
    browser.execute_script("arguments[0].focus()", point)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert selected_index(browser) == point.get_attribute("data-index")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert selected_index(browser) != point.get_attribute("data-index")
    stops = browser.execute_script("return document.querySelectorAll('#scatter [tabindex=\"0\"]').length")
    assert stops == 2  # the first, which Tab would reach, and where the arrows are now


def test_scores_that_cannot_be_trusted_are_marked(browser, page, tmp_path):
    """One by its own expected error, or all of them; and those without a score are listed first."""
    samples = [sample | {"expected_error": 0.1} for sample in page[1].samples]
    samples[2] |= {"expected_error": 0.4}
    samples[-1] |= {"score": None, "parts": []}
    samples = [samples[-1], *samples[:-1]]
    assert page[1].verdict["sign"] == "bad"
    doubtful = replace(page[1], target="bad", samples=samples).with_retrained()
    samples = [sample | {"doubtful": sample["expected_error"] > 0.25} for sample in samples]
    write_html(tmp_path / "marked.html", [doubtful, replace(page[1], samples=samples)])
    open_page(browser, tmp_path / "marked.html")
    marked = """return [...document.querySelectorAll('#table tbody tr')].map(
        r => getComputedStyle(r.querySelector('td.number'), '::after').content.includes('?'))"""
    hollow = "return document.querySelectorAll('#scatter circle.doubtful').length"
    assert browser.find_element("css selector", "#table td.number").text == "—"
    assert [k for k, doubt in enumerate(browser.execute_script(marked)) if doubt] == [3]
    assert browser.execute_script(hollow) == 1
    assert browser.find_element("id", "l-doubt").is_displayed()
    browser.find_element("css selector", "[data-choice='1']").click()
    assert browser.execute_script(marked) == [False] + [True] * 49
    assert browser.execute_script(hollow) == 10  # those that were retrained


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_no_horizontal_scroll(browser, page, width, dark):
    open_page(browser, page[0], width, dark)
    wide, room = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= room
    cut = """return [...document.querySelectorAll('.bars .bar, .bars span, #detail dd, figure, #detail')].filter(e => {
        const box = e.getBoundingClientRect(), inside = e.parentElement.getBoundingClientRect();
        return box.width && (box.right > innerWidth + 1 || (e.matches('.bars *, dd') && box.right > inside.right + 1));
    }).length"""
    assert browser.execute_script(cut) == 0  # nothing is clipped away beside long names
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    light = sum(int(x) for x in ground[4:-1].split(",")[:3])
    assert (light < 120) == dark


def test_axes_have_round_numbers_inside_the_picture(browser, page):
    open_page(browser, page[0])
    texts = browser.execute_script(
        """return [...document.querySelectorAll('#scatter text, #histogram text')].filter((t) => {
        const box = t.getBoundingClientRect(), svg = t.ownerSVGElement.getBoundingClientRect();
        return box.left < svg.left - 0.5 || box.right > svg.right + 0.5; }).map((t) => t.textContent)"""
    )
    assert texts == []
    ticks = browser.execute_script(
        "return [...document.querySelectorAll('#scatter text[text-anchor=end]')].map((t) => t.textContent)"
    )
    assert len(ticks) >= 3
    assert all(len(tick.lstrip("−").replace(".", "").strip("0")) <= 3 for tick in ticks)


def test_numbers_are_written_as_in_python(browser, page):
    open_page(browser, page[0])
    script = "return [...document.querySelectorAll('#table tbody tr')].map(r => [r.dataset.index, "
    rows = browser.execute_script(script + "r.querySelectorAll('td.number')[0].textContent])")
    scores = {sample["index"]: sample["score"] for sample in page[1].samples}
    assert len(rows) == 50
    assert all(text == format_number(scores[int(index)], signed=True) for index, text in rows)


@pytest.mark.parametrize("width", [390, 1400])
def test_targets_are_chosen_by_a_button_and_no_column_is_clipped(browser, page, tmp_path, width):
    """Two reports on one page: the newest is open, the other one a click away, with its own table and CSV."""
    halved = [sample | {"score": sample["score"] / 2} for sample in page[1].samples]
    write_html(tmp_path / "both.html", [replace(page[1], target="half the gap", samples=halved), page[1]])
    open_page(browser, tmp_path / "both.html", width)
    assert browser.get_log("browser") == []
    first = "return document.querySelector('#table tbody td.number').textContent"
    shown = "return [...document.querySelectorAll('a.csv')].filter(e => e.offsetParent).map(e => e.download)"
    assert browser.execute_script(first) == format_number(halved[0]["score"] * 2, signed=True)
    assert browser.execute_script(shown) == ["model-gap.csv"]
    browser.find_element("css selector", "[data-choice='1']").click()
    assert browser.execute_script(first) == format_number(halved[0]["score"], signed=True)
    assert browser.execute_script(shown) == ["model-half the gap.csv"]
    assert len(browser.find_elements("css selector", "#scatter circle[data-index]")) == 10  # drawn anew, not twice
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    clipped = browser.execute_script(
        """return [...document.querySelectorAll('th, td, dd, .csv, .choices button')].filter((e) => {
        const box = e.getBoundingClientRect();
        return box.width && (box.right > innerWidth || box.left < 0 || e.scrollWidth > e.clientWidth + 1) &&
          getComputedStyle(e).display !== 'inline'; }).map((e) => e.textContent)"""
    )
    assert clipped == []


@pytest.mark.parametrize("width", [390, 1400])
def test_labels_of_axes_do_not_collide(browser, page, tmp_path, width):
    """Ranges of all magnitudes, at which the labels are longest."""
    reports = []
    ranges = (-2.3e-4, 3.1e-4), (-3.9e-4, 1.2e-4), (-4.9e-5, 4.9e-5), (-2.1e-4, 3.5e-5), (-1.05e-3, 1.9e-4)
    for k, (low, high) in enumerate(ranges):
        edges = [low + (high - low) * j / 30 for j in range(31)]
        ends = [s | {"actual": x, "score": x} for s, x in zip(page[1].samples, (low, high), strict=False)]
        histogram = {"counts": [1] * 30, "edges": edges}
        reports.append(replace(page[1], target=f"target {k}", samples=ends, histogram=histogram))
    write_html(tmp_path / "axes.html", reports)
    open_page(browser, tmp_path / "axes.html", width)
    for k in range(len(reports)):
        browser.execute_script(f"document.querySelector('[data-choice=\"{k}\"]').click()")
        for plot in ("histogram", "scatter"):
            boxes = browser.execute_script(
                f"return [...document.querySelectorAll('#{plot} > text')]"
                ".map((e) => [e.textContent, e.getBoundingClientRect()])"
            )
            numbers = [(text, box) for text, box in boxes if text[-1].isdigit()]
            assert len(numbers) >= (2 if plot == "histogram" else 4)
            for (one, a), (two, b) in combinations(numbers, 2):
                beside = a["right"] + 3 < b["left"] or b["right"] + 3 < a["left"]
                assert beside or a["bottom"] < b["top"] + 1 or b["bottom"] < a["top"] + 1, (k, plot, one, two)


@pytest.mark.parametrize("width", [390, 1400])
def test_names_are_not_squeezed_and_all_columns_are_in_sight(browser, page, tmp_path, width):
    """Percentages, retrained changes and two losses side by side."""
    losses = {"applicants": 0.5, "probability of applicants": 0.01898}
    samples = [s | {"losses": losses, "name": f"applicant {s['index']}", "image": None} for s in page[1].samples]
    write_html(tmp_path / "wide.html", [replace(page[1], value=10.0, samples=samples)])
    open_page(browser, tmp_path / "wide.html", width)
    headings = browser.execute_script(
        "return [...document.querySelectorAll('#table thead th')].filter(e => e.offsetWidth).map(e => e.textContent)"
    )
    assert {"sample", "score", "retrained"} <= set(headings)
    assert ("in per cent" in headings) == (width > 500)
    assert ("its loss" in headings) == (width > 500)
    hidden = "const box = document.querySelector('.wide'); return box.scrollWidth - box.clientWidth"
    assert browser.execute_script(hidden) <= 0
    # the words of a name are not broken: each fits on a line of its own
    broken = """return [...document.querySelectorAll('#table tbody th')].filter((th) => {
        const range = document.createRange(), text = th.firstChild;
        range.setStart(text, 0); range.setEnd(text, 9);
        return range.getClientRects().length > 1; }).length"""
    assert browser.execute_script(broken) == 0


def test_the_page_stays_small(page, tmp_path):
    """Samples beyond the size limit are listed without features and images, and a remark says so."""
    _, report = page
    wordy = [sample | {"features": {f"f{k}": "語" * 160 for k in range(24)}} for sample in report.samples * 30]
    large = replace(report, samples=wordy)
    write_html(tmp_path / "report.html", [large])
    assert 3_000_000 < (tmp_path / "report.html").stat().st_size < 5_000_000
    assert "The page lists 1000 of 3600 samples" in (tmp_path / "report.html").read_text()
    assert "without features" not in page[0].read_text()


def test_what_is_saved_is_what_is_read(page):
    again = Report.load(page[0].with_name("report.json"))
    assert again == page[1]
    assert again.samples[0]["image"]["height"] == 6
    assert len(again.terms) == 2
    total = torch.tensor([sum(sample["parts"]) for sample in again.samples])
    torch.testing.assert_close(total, torch.tensor([sample["score"] for sample in again.samples]))
