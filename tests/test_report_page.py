"""The report page: one file that stands alone, tells all that a run left, and breaks on nothing."""

import base64
import dataclasses
import html.parser
import io
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import networks
from dist_ens.data import ArraySplit, Spec
from dist_ens.evaluation import Evaluator, curves_of
from dist_ens.layout import Layout
from dist_ens.losses import Categorical
from dist_ens.members import from_functions
from dist_ens.report import figures, style
from dist_ens.report.examples import picture_url
from dist_ens.report.files import RunReport
from dist_ens.report.page import page_of as html_of
from dist_ens.report.panels import SECTIONS as MAKERS
from dist_ens.report.panels import Shown

VOID = {"br", "col", "hr", "img", "input", "link", "meta"}
SECTIONS = (
    *("reliability", "coverage_curve", "pit", "risk_coverage", "score_against_members"),
    *("shift", "ood", "disagreement", "hardest", "most_uncertain"),
)


class Page(html.parser.HTMLParser):
    """What a page holds; raises where an element is closed that is not the open one."""

    def __init__(self, text):
        super().__init__()
        self.text, self.elements, self.words = text, [], []
        self._open = []
        self.feed(text)
        self.close()
        assert not self._open, self._open
        self.ids = [a["id"] for _, a in self.elements if "id" in a]
        self.svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, tag

    def handle_data(self, data):
        if data.strip() and self._open[-1] != "style":
            self.words.append(data.strip())

    def of(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def rows(self):
        """The cells of every row of every table, as their words."""
        rows = re.findall(r"<tr.*?</tr>", self.text, re.DOTALL)
        cells = [re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL) for row in rows]
        return [[re.sub(r"<[^>]*>", " ", cell).split() for cell in row] for row in cells]


def page_of(tmp_path, *runs):
    (tmp_path / "report.html").write_text(html_of(runs))
    return Page((tmp_path / "report.html").read_text(encoding="utf-8"))


def run_of(name, num_members, num_lines, scores, curves, pictures=(), **summary):
    """A run; `scores` are those of the mean member and of the ensemble by name."""
    rng, at = np.random.default_rng(0), np.arange(1, num_lines + 1)
    lines = []
    for k in at:
        values = {"train/loss": 2.3 * np.exp(-5 * k / num_lines) + rng.uniform(0, 1, num_members)}
        for metric in scores if k % 4 == 0 else ():
            values[f"test/{metric}"] = 1 / k + rng.uniform(0, 1, num_members)
        line = {"step": 10 * int(k)} | {metric: v.mean() for metric, v in values.items()}
        for metric, of_members in values.items():
            line |= {f"{metric}/member_{i:02d}": v for i, v in enumerate(of_members)}
        lines.append(line)
    mean, test = ({metric: ends[k] for metric, ends in scores.items()} for k in (0, 1))
    summary |= {"steps": 400, "num_members": num_members, "mesh": {"ensemble": 4, "data": 2}}
    summary |= {"test": test, "mean_member": mean, "member_examples_per_second": 151234.5}
    summary["members"] = [{"member_id": i, **mean} for i in range(num_members)]
    kept, matrix = np.linspace(0, 1, 101), rng.uniform(0, 1, (num_members, num_members))
    drawn = {metric: list(ends) for metric, ends in scores.items() if metric != "entropy"}
    risks = {"ensemble": [None, *(kept[1:] ** 4)], "mean_member": [None, *(1.2 * kept[1:] ** 3)]}
    of_sizes = {metric: {"mean": v, "low": v, "high": v} for metric, v in drawn.items()}
    curves |= {
        "risk_coverage": {"coverage": kept.tolist(), **risks, "score": "error rate"},
        "score_against_members": {"num_members": [1, 8], **of_sizes},
        "disagreement": matrix.tolist(),
        "member_id": list(range(num_members)),
        "shift": {kind: {"strength": [1.0, 2.0], **drawn} for kind in ("blur", "gaussian_noise")},
    }
    return RunReport(name, summary, lines, curves, pictures)


def classification(name="digits", num_members=8, num_lines=8):
    scores = {"accuracy": (0.9823, 0.9861), "nll": (0.0725, 0.0649), "entropy": (0.11, 0.1012)}
    intervals = {key: [0.9 * v, 1.1 * v] for key, (_, v) in scores.items()}
    centres = (np.arange(15) + 0.5) / 15
    bins = {"confidence": [None, *centres[1:]], "accuracy": [None, *centres[1:] ** 2]}
    bins["count"] = list(range(15))
    edges = np.linspace(0, 2.3, 31)
    density = {"edges": edges.tolist(), "in": edges[:-1].tolist(), "out": edges[1:].tolist()}
    examples = [
        {"index": k, "label": str(k), "prediction": str(k + 3), "confidence": 0.97 - 0.04 * k}
        | {"nll": 3.5 - 0.2 * k, "entropy": 0.2 + 0.1 * k, "mutual_information": 0.05}
        for k in range(8)
    ]
    curves = {
        "reliability": {"ensemble": bins, "mean_member": bins},
        "ood": {"name": "notmnist", "entropy": density, "mutual_information": density},
        "hardest": examples,
        "most_uncertain": [dict(example) for example in examples],
    }
    pictures = [np.random.default_rng(k).uniform(0, 16, (8, 8)) for k in range(16)]
    others = {"seconds": 75.4, "test_interval": intervals}
    return run_of(name, num_members, num_lines, scores, curves, pictures, **others)


def regression(name="concrete", num_members=8, groups=2, num_lines=8):
    scores = {"rmse": (5.9, 5.41), "mae": (4.1, 3.92), "nll": (3.4, 3.01)}
    nominal = np.linspace(0.05, 0.95, 19)
    both = {"ensemble": (nominal**0.95).tolist(), "mean_member": (nominal**1.3).tolist()}
    curves = {
        "coverage_curve": {"nominal": nominal.tolist(), **both},
        "pit": {"ensemble": list(range(15))},
        "hardest": [{"index": k, "label": 71.3, "prediction": 40.1, "nll": 9.1} for k in range(6)],
    }
    others = {"seconds": 12.34, "groups": groups, "test_std": {"rmse": 0.541}}
    return run_of(name, num_members, num_lines, scores, curves, **others)


def minimal(name="bare", metrics=(), **curves):
    scores = {"accuracy": 0.5, "nll": 1.0}
    summary = {"steps": 24, "num_members": 4, "test": scores, "mean_member": dict(scores)}
    return RunReport(name, summary, metrics, curves, [])


RUNS = {
    "classification": (classification(),),
    "side by side": (classification(), regression(num_members=41)),
    "minimal": (minimal(),),
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def page(request, tmp_path_factory):
    return page_of(tmp_path_factory.mktemp("page"), *request.param)


def scores_of(run):
    """A run with its scores alone, of which a page is soon made."""
    return dataclasses.replace(run, metrics=[], curves={}, pictures=[])


# What holds for every page


def test_a_page_is_well_formed_and_told_in_words(page):
    assert page.of("html") == [{"lang": "en"}]
    assert len(page.of("title")) == 1
    assert len(page.ids) == len(set(page.ids))
    assert len(page.svgs) == len(page.of("svg"))
    for text, svg in zip(page.svgs, page.of("svg"), strict=True):
        ElementTree.fromstring(text)
        assert svg["role"] == "img"
        assert len(svg["aria-label"]) > 20
    assert all(image["alt"] for image in page.of("img"))
    assert len(page.of("figcaption")) == len(page.of("figure"))
    assert not re.search(r"<figcaption>\s*</figcaption>", page.text)


def test_a_page_refers_to_nothing_outside_itself(page):
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "base"}
    for _, attrs in page.elements:
        for name, value in attrs.items():
            if name.split(":")[-1] in ("src", "href", "srcset"):
                assert value.startswith(("data:image/png;base64,", "#")), value[:80]
            assert not name.startswith("on")
            assert name.startswith("xmlns") or "//" not in value or value.startswith("data:")
    assert "@import" not in page.text
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)", page.text))
    # Whatever a picture refers to is in the page.
    wanted = set(re.findall(r'(?:url\(|xlink:href=")#([\w-]+)', page.text))
    assert wanted <= set(page.ids)


def test_a_page_can_be_read_on_a_phone(page):
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")
    assert re.search(r"svg \{[^}]*width: 100%", page.text)
    for svg in page.of("svg"):
        assert "width" not in svg
        assert float(svg["viewbox"].split()[2]) < 400
    # A table of more than seven columns is stacked there, and each of its cells has its name.
    for kind, inside in re.findall(r"<table([^>]*)>(.*?)</table>", page.text, re.DOTALL):
        columns = len(re.findall(r"<th[^>]*scope=\"col\"", inside))
        assert (columns > 6) == ("wide" in kind)
        cells = re.findall(r"<t[hd][^>]*>", inside.partition("</thead>")[2])
        assert "wide" not in kind or all("data-name=" in cell for cell in cells)


def test_every_colour_of_a_page_fits_a_dark_screen_too(page):
    sheet = page.text.partition("<style>")[2].partition("</style>")[0]
    bright, _, dark = sheet.partition("(prefers-color-scheme: dark)")
    set_in = [set(re.findall(r"(--[\w-]+):", part.partition("}")[0])) for part in (bright, dark)]
    used = set(re.findall(r"var\((--[\w-]+)\)", page.text))
    assert used <= set_in[0]
    assert set_in[0] == set_in[1] | {"--font"}
    # A colour that is given as it is would be the same on both.
    for svg in page.svgs:
        assert not re.search(r"(fill|stroke|color): #", svg)


def test_among_several_runs_a_colour_is_a_run(page):
    mixed = r"color-mix\(in srgb, (#\w{6}),"
    runs = re.findall(rf'border-color: {mixed}[^"]*"></span>(\w+)</h2>', page.text)
    assert bool(runs) == ("side by side" in page.text)
    of_run = {name: colour for colour, name in runs}
    figures_of_one = re.findall(r"<h3>(\w+)</h3>\s*(<svg.*?</svg>)", page.text, re.DOTALL)
    assert {name for name, _ in figures_of_one} >= {*of_run}
    for name, svg in figures_of_one:
        if name in of_run:  # and is not a kind of shift
            assert {*re.findall(mixed, svg)} & {*style.COLOURS} <= {of_run[name]}


def test_the_same_run_makes_the_same_page(tmp_path):
    def text():
        run = classification(num_members=41, num_lines=4)
        few = {name: run.curves[name] for name in ("reliability", "disagreement", "member_id")}
        return page_of(tmp_path, dataclasses.replace(run, curves=few, pictures=[])).text

    assert text() == text()


@pytest.mark.parametrize(
    "run",
    [classification(), pytest.param(regression(), marks=pytest.mark.long)],
    ids=lambda run: run.name,
)
def test_numbers_that_are_none_break_nothing(tmp_path, run):
    instead = itertools.cycle([None, math.nan, math.inf, -math.inf])

    def without_numbers(value):
        return jax.tree.map(lambda x: next(instead) if isinstance(x, float) else x, value)

    parts = {name: without_numbers(getattr(run, name)) for name in ("summary", "metrics", "curves")}
    pictures = [np.full(np.shape(picture), np.nan) for picture in run.pictures]
    page = page_of(tmp_path, dataclasses.replace(run, **parts, pictures=pictures))
    assert len(page.svgs) >= 8
    for svg in page.svgs:
        ElementTree.fromstring(svg)
    words = " ".join(page.words)
    assert not re.search(r"\b(nan|inf|None)\b", words)
    assert "There is no finite score" in words
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page.text)


def test_a_name_that_is_html_is_shown_as_text(tmp_path):
    name = '<script>$x$ & "<b'
    curves = {k: classification().curves[k] for k in ("ood", "shift", "hardest", "risk_coverage")}
    curves["ood"]["name"] = curves["hardest"][0]["label"] = name
    curves["shift"] = {name: curves["shift"]["blur"]}
    curves["risk_coverage"]["score"] = name
    run = minimal(name, **curves)
    for runs in ([run], [run, run]):
        page = page_of(tmp_path, *runs)
        assert not page.of("script")
        assert "<script" not in page.text
        assert page.text.count("&lt;script&gt;$x$ &amp;") >= 6
        for svg in page.svgs:
            ElementTree.fromstring(svg)


@pytest.mark.long
def test_hundreds_of_members_make_a_page_of_less_than_three_megabytes(tmp_path):
    run = classification(num_members=300, num_lines=40)
    page = page_of(tmp_path, run)
    assert len(page.text.encode()) < 3_000_000
    assert "100 of 300 members are drawn." in " ".join(page.words)


# Scores and facts


def test_a_page_with_one_run_has_its_scores_and_its_first_members(tmp_path):
    page = page_of(tmp_path, scores_of(regression(num_members=100, groups=20)))
    rows = {" ".join(row[0]): row[1:] for row in page.rows()}
    assert rows["RMSE ↓"][0] == ["5.410", "±", "0.5410"]
    assert [key for key in rows if key.isdigit()] == [str(i) for i in range(20)]
    words = " ".join(page.words)
    for told in ("20 of 100 members. All their scores", "100 in 20 groups of 5", "12.3 s"):
        assert told in words
    assert "1 min 15 s" in page_of(tmp_path, scores_of(classification())).words


def test_several_runs_stand_below_each_other_in_a_table_for_each_score(tmp_path):
    runs = [scores_of(classification("one")), minimal("two"), minimal("three")]
    rows = page_of(tmp_path, *runs).rows()
    header = [["ensemble"], ["mean", "member"]]
    of_scores = [" ".join(row[0]) for row in rows if row[1:] == header]
    assert of_scores == ["accuracy ↑", "NLL ↓", "entropy"]
    accuracies = [[cell[0] for cell in row[:2]] for row in rows[1:4]]
    assert accuracies == [["one", "0.9861"], ["two", "0.5000"], ["three", "0.5000"]]
    assert rows[-2:] == [[["two"], ["—"], ["—"]], [["three"], ["—"], ["—"]]]
    assert {len(row) for row in rows} == {3}  # which fits on a phone


def test_one_sentence_says_what_came_of_it(tmp_path):
    run = minimal()
    for names, ensemble, mean, sentence in (
        ("accuracy nll", (0.9, 0.3), (0.8, 0.4), "The ensemble of 4 is better than its mean "),
        (
            "rmse nll",
            (2, 3),
            (2.5, 3),
            "better than its mean member in RMSE but as good as its mean",
        ),
    ):
        run.summary["test"] = dict(zip(names.split(), ensemble, strict=True))
        run.summary["mean_member"] = dict(zip(names.split(), mean, strict=True))
        assert sentence in " ".join(page_of(tmp_path, run).words)


def test_the_better_of_ensemble_and_mean_member_stands_out(tmp_path):
    run = minimal()
    run.summary["test"] = {"accuracy": 0.9, "nll": 0.5, "brier": 0.1, "ece": None, "entropy": 0.3}
    mean = {"accuracy": 0.8, "nll": 0.4, "brier": 0.1, "ece": 0.2, "entropy": 0.2}
    run.summary["mean_member"] = mean
    text = page_of(tmp_path, run).text
    assert re.findall(r'<td class="better">([^<]*)', text) == ["0.9000", "0.4000"]


# Sections and figures


def test_a_section_is_there_exactly_when_its_key_is(tmp_path):
    curves = {**regression().curves, **classification().curves}
    for section in SECTIONS:
        keys = (section, "member_id")[: 1 + (section == "disagreement")]
        ids = page_of(tmp_path, minimal(**{key: curves[key] for key in keys})).ids
        assert [name for name in ids if name in SECTIONS] == [section]


def test_runs_in_one_picture_have_a_key_and_pictures_of_one_run_its_name(tmp_path):
    def section(name):
        runs = [minimal(run, **{name: classification().curves[name]}) for run in ("one", "two")]
        text = page_of(tmp_path, *runs).text.partition(f'<section id="{name}">')[2]
        return text.count("<svg"), re.findall(r"</span>(\w+)</li>", text), text.count("<h3>")

    assert section("risk_coverage") == (1, ["one", "two"], 0)
    assert section("reliability") == (2, [], 2)


def test_what_was_written_more_than_once_in_training_is_drawn(tmp_path):
    def training(num_records):
        metrics = classification().metrics[:num_records]
        text = page_of(tmp_path, minimal(metrics=metrics)).text
        section = text.partition('<section id="training">')[2].partition("</section>")[0]
        told = re.findall(r'<p class="note">(This run [^.]*)', section)
        return re.findall(r'aria-label="(\w+ \w+) of', section), told

    # A run that is shorter than `log_every` has one record, of its last step.
    assert training(1) == ([], ["This run has one record (step 10) in metrics"])
    assert training(6) == (["train loss"], [])
    assert training(8) == (["train loss", "test accuracy", "test NLL"], [])


def panels_of(*runs, colour="#000000"):
    shown = [Shown(run, colour) for run in runs]
    return [panel for make in MAKERS.values() for panel in make(shown)]


def test_the_bold_training_curve_is_the_median_of_the_members_that_have_a_number():
    values = [[1.0, 2.0, 9.0], [3.0, None, 4.0], [None, None, None]]
    lines = [
        {"step": k, "train/loss": 1.0}
        | {f"train/loss/member_{i:02d}": value for i, value in enumerate(of_members)}
        for k, of_members in enumerate(values)
    ]
    (panel,) = panels_of(minimal(metrics=lines), colour=None)
    bold = panel.figure.axes[0].lines[-1]
    np.testing.assert_array_equal(bold.get_ydata(), [2.0, 3.5, np.nan])


def test_runs_side_by_side_share_the_vertical_axis_of_a_score():
    runs = [classification(num_lines=lines) for lines in (4, 40)]
    panels = panels_of(*(dataclasses.replace(run, curves={}) for run in runs))
    losses = [panel.figure.axes[0] for panel in panels if panel.alt.startswith("train loss")]
    assert len(losses) == 2
    assert losses[0].get_ylim() == losses[1].get_ylim()
    assert losses[0].get_yscale() == losses[1].get_yscale() == "log"


def test_a_hundred_members_at_most_are_drawn_and_a_few_as_vectors():
    steps = np.arange(50)

    def drawn(count):
        ones = np.ones((50, count))
        figure = figures.training(steps, ones, [], y_label="loss", y_values=ones.ravel())
        return len(figure.axes[0].lines), style.svg(figure, "alt", "name").count("<image")

    assert [drawn(count) for count in (40, 41, 101)] == [(40, 0), (41, 1), (100, 1)]


def test_no_member_hides_the_curve_of_the_ensemble():
    ones = np.ones(5)
    bold = [figures.Curve(ones, ones, "#000000", "ensemble")]
    figure = figures.training(range(5), np.ones((5, 200)), bold, y_label="loss", y_values=ones)
    *others, ensemble = sorted(figure.axes[0].lines, key=lambda line: line.zorder)
    assert ensemble.get_label() == "ensemble"
    assert all(line.zorder < ensemble.zorder for line in others)


def test_losses_that_span_more_than_one_and_a_half_decades_are_drawn_logarithmically():
    # One and a half decades are a factor of 31.6.
    for ends, scale in (((1, 31), "linear"), ((1, 32), "log"), ((0, 32), "linear")):
        values = np.array(ends, float)
        figure = figures.training([1, 2], values[:, None], [], y_label="loss", y_values=values)
        assert figure.axes[0].get_yscale() == scale


def test_labels_at_the_ends_of_curves_do_not_meet_and_leave_room():
    ends = {"low": 0.2, "middle": 0.98, "high": 0.99, "a shift whose name is long": 1.0}
    curves = [figures.Curve([0, 1], [0, end], "#000000", name) for name, end in ends.items()]
    figure = figures.lines(curves, x_label="x", y_label="y")
    heights = {text.get_text(): text.get_position()[1] for text in figure.axes[0].texts}
    assert sorted(heights, key=heights.__getitem__) == [*[*ends][:3], "a shift …e is long"]
    assert np.diff(sorted(heights.values())).min() > 0.07
    assert max(heights.values()) <= 1
    # The axis goes from 0 to 1 with a twentieth more at either end: (0.2 + 0.05) / 1.1.
    assert heights["low"] == pytest.approx(0.25 / 1.1)


# Examples


def curves_of_copies(logits, labels, num_members=2):
    """The curves of members that all return their inputs as logits."""
    init = lambda key: {"b": jnp.zeros(3)}  # noqa: E731
    member = from_functions(init, lambda params, x: x + params["b"][None])
    layout = Layout.make(num_members, devices=jax.devices()[:1])
    ensemble = networks.ensemble_of(member, optax.identity(), layout)
    state = networks.begin(ensemble, jax.ShapeDtypeStruct((1, 3), np.float32))
    evaluator = Evaluator(ensemble, 8, Spec((3,), "float32", (), 3), Categorical())
    split = ArraySplit(np.float32(logits), np.int32(labels))
    return curves_of(evaluator.evaluate(state, split, by_size=True))


def test_the_hardest_examples_are_wrongly_predicted_and_the_worst_is_first(tmp_path):
    # Example 1 is predicted rightly with an NLL of log(1 + 2 exp(-0.01)) = 1.092, which is more
    # than that of example 2: log(1 + exp(0.2) + exp(-9)) = 0.798. Example 4 is more wrong than 0.
    logits = [[2, 0, -9], [0, -0.01, -0.01], [0.2, 0, -9], [5, 0, 0], [3, 0, -9]]
    hardest = curves_of_copies(logits, [1, 0, 1, 0, 1])["hardest"]
    assert [example["index"] for example in hardest] == [4, 0, 2]
    assert hardest[2]["nll"] == pytest.approx(0.798, abs=1e-3)

    none = curves_of_copies(logits, [0] * 5)["hardest"]
    assert none == []
    page = page_of(tmp_path, minimal(hardest=none))
    assert "Every test example is predicted rightly." in page.words


def test_of_many_members_a_hundred_are_compared_from_the_first_to_the_last():
    curves = curves_of_copies([[2, 0, -9]], [0], num_members=103)
    assert np.shape(curves["disagreement"]) == (100, 100)
    assert len(set(curves["member_id"])) == 100
    assert (curves["member_id"][0], curves["member_id"][-1]) == (0, 102)


def test_pictures_are_shown_where_every_example_has_one_and_a_table_where_not(tmp_path):
    run = classification()
    curves = {name: run.curves[name] for name in ("hardest", "most_uncertain")}
    for count, shown in ((16, 16), (8, 8), (12, 8), (0, 0)):
        fewer = dataclasses.replace(minimal(**curves), pictures=run.pictures[:count])
        page = page_of(tmp_path, fewer)
        assert len(page.of("img")) == shown
        assert {"hardest", "most_uncertain"} <= set(page.ids)
        in_tables = [tuple(cell) for row in page.rows() for cell in row]
        assert in_tables.count(("mutual", "information")) == (16 - shown) // 8


@pytest.mark.parametrize(
    ("values", "pixels"),
    [
        (np.array([[0.0, 4.0], [8.0, 16.0]]), [[0, 64], [128, 255]]),  # 255/4 = 63.75
        (np.array([[[41, 43], [45, 47]]], np.uint8), [[42, 46]]),
        (np.array([[0, 4], [8, 16]], np.uint8), [[0, 64], [128, 255]]),  # as bytes nearly black
        # Of two channels the means are 1, 1/2 and 0: 127.5 is rounded to the even 128.
        (np.array([[[1, 1], [1, 0], [0, 0]]], bool), [[255, 128, 0]]),
        (np.array([[np.nan, 1.0]]), [[0, 255]]),
        (np.zeros((300, 600, 3), np.uint8), np.zeros((48, 96, 3))),  # made small
    ],
)
def test_a_picture_keeps_its_bytes_and_stretches_what_is_no_byte(values, pixels):
    kind, _, data = picture_url(values).partition(",")
    assert kind == "data:image/png;base64"
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    np.testing.assert_array_equal(image, pixels)


def test_the_fields_of_an_example_are_told_as_the_scores_are(tmp_path):
    def cells(scores, **changes):
        example = {"index": 3, "label": "cat", "prediction": 7.0, "nll": 2.5, "entropy": math.nan}
        run = RunReport("run", {"test": scores}, [], {"hardest": [example | changes]}, [])
        return [" ".join(cell) for cell in page_of(tmp_path, run).rows()[-1]]

    assert cells({"accuracy": 1.0}) == ["3", "cat", "7", "2.5000", "—"]
    assert cells({"rmse": 1.0}) == ["3", "cat", "7", "2.500", "—"]
    # Two digits after the point show a hundredth of the RMSE, whatever stands before.
    of_target = cells({"rmse": 5.41}, label=1e8 + 71.5, prediction=1e8 + 40.125, nll=9.14159)
    assert of_target == ["3", "100000071.50", "100000040.12", "9.142", "—"]
