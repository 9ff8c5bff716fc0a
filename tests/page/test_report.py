"""The page: what it says, what it leaves out, and that it needs nothing but itself."""

import base64
import csv
import gc
import hashlib
import html
import io
import re
from dataclasses import replace

import pytest

from shoal.core.errors import ConfigError, ShoalWarning, StorageError
from shoal.core.storage.files import write_json, write_text
from shoal.core.storage.formats import to_toml
from shoal.page.blocks import Figure, Section, registry, section
from shoal.page.measures import Measure, against_baseline, measures
from shoal.page.report import render, report, section_figures
from shoal.page.report_data import load_report_data
from shoal.page.sections import builders
from shoal.page.sections.calibration import families
from shoal.page.sections.diversity import diversity_section
from shoal.page.sections.making import bibtex, making_section, numbers_csv
from shoal.page.sections.predictive_uncertainty import uncertainty_section
from shoal.prediction.statistics import paired_difference

QUESTIONS = [
    "Can I trust it?",
    "Where is it wrong?",
    "Which method, how many members?",
    "When does it know that it does not know?",
    "Is it calibrated, also under shift?",
    "Do the members differ?",
    "What is one more member worth?",
    "Did training go well?",
    "How was it made?",
]


def words_of(page):
    """The text of a page, without its tags."""
    body = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    plain = html.unescape(re.sub(r"<[^>]*>", " ", body)).replace("\u00a0", " ")
    return re.sub(r"\s+", " ", plain)


@pytest.fixture(scope="module")
def page(picture_runs):
    return render(load_report_data(picture_runs, None))


@pytest.fixture(scope="module")
def single(picture_runs):
    return render(load_report_data(picture_runs[:1]))


def test_questions_come_in_the_order_of_the_story(page):
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert [html.unescape(heading) for heading in headings] == QUESTIONS


def test_trust_is_stated_in_numbers(page, picture_runs):
    text = words_of(page)
    right = [found.test["accuracy"] for run, found in picture_runs[:3]]
    mean = f"{100 * sum(right) / 3:.1f}".removesuffix(".0")
    assert f"Accuracy: {mean} ±" in text and "(60 test images)" in text
    assert "of noise as OOD at a 5 % false-positive rate" in text
    assert "The effective number of functions is" in text
    assert "% of the force: negligible" in text
    assert "mean of 3 seeds" in text


def test_differences_are_paired_by_seed(picture_runs):
    report_data = load_report_data(picture_runs)
    lead = report_data.lead
    found = against_baseline(Measure("nll"), lead, report_data.groups)
    assert found is not None
    by_name = {
        (r.config["method"], r.config["members"], r.config["seed"]): a.test["nll"]
        for r, a in picture_runs
    }
    mine = [by_name["kde", 4, seed] for seed in range(3)]
    plain = [by_name["ensemble", 4, seed] for seed in range(3)]
    assert found == (paired_difference(mine, plain), 3)


def test_runs_are_grouped_by_method_and_size(picture_runs):
    report_data = load_report_data(picture_runs)
    assert [(g.label, g.members, len(g.entries)) for g in report_data.groups] == [
        (method, members, 3) for method in ("kde", "ensemble", "f-svgd") for members in (2, 4)
    ]
    assert (report_data.lead.label, report_data.lead.members) == ("kde", 4)
    assert {label: group.members for label, group in report_data.peers().items()} == {
        "kde": 4,
        "ensemble": 4,
        "f-svgd": 4,
    }


def test_runs_that_differ_in_more_than_their_seed_are_told_apart(picture_runs):
    (run, found), *rest = picture_runs
    other = replace(run, config=run.config | {"strength": 100.0})
    labels = {
        group.label for group in load_report_data([(other, found), (run, found), *rest]).groups
    }
    assert labels == {"kde:100", "kde", "ensemble", "f-svgd"}


def test_tables_sort_by_the_number_and_show_its_error(page):
    cells = re.findall(r'<td data-value="([^"]*)">([^<]*±[^<]*)</td>', page)
    assert len(cells) > 20
    for value, text in cells:
        shown = float(text.split("±")[0].replace("−", "-"))
        assert shown == pytest.approx(float(value), rel=0.1, abs=0.02) or shown == pytest.approx(
            100 * float(value), rel=0.1, abs=0.2
        )


def test_every_figure_has_a_sentence_below(page):
    figures = re.findall(r"<figure>.*?</figure>", page, flags=re.DOTALL)
    assert len(figures) > 25
    for figure in figures:
        assert figure.count("<svg ") == 1
        caption = re.search(r"<figcaption>(.*?)</figcaption>", figure, flags=re.DOTALL)
        assert caption
        assert caption[1].rstrip().endswith((".", "!"))


def test_page_is_self_contained(page, single):
    for text in (page, single):
        assert not re.findall(r'\b(?:src|href)="(?!#|data:)', text)
        assert not re.findall(r"url\((?!#)", text)
        assert "@import" not in text
        assert not re.findall(r"<(?:link|iframe|object|embed|base)\b", text)
        assert 50_000 < len(text) < 5_000_000


def test_only_the_script_of_the_page_may_run(page):
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert "default-src 'none'" in html.unescape(policy[1])
    assert f"script-src 'sha256-{digest}'" in html.unescape(policy[1])


def test_ids_are_unique(page):
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_names_of_the_user_are_escaped(undrawn, picture_runs):
    (run, found), *_ = picture_runs
    evil = '<script>alert("x")</script>'
    config = run.config | {"data": evil, "method": evil, "model": evil}
    named = replace(run, config=config, notes=[evil], provenance={"device": evil})
    text = render(load_report_data([(named, found)], title=f"{evil} `code`"))
    assert "<script>alert" not in text
    assert "<b>ant" not in text
    assert 'alert("x")' in words_of(text)
    assert text.count("<script>") == 1


def test_runs_without_evaluation_leave_out_sections_about_predictions(undrawn, picture_runs):
    run, _ = picture_runs[0]
    text = render(load_report_data([run]))
    headings = [html.unescape(h) for h in re.findall(r"<h2>(.*?)</h2>", text)]
    assert headings == QUESTIONS[-2:]
    assert "shoal.evaluate(run, " in text
    assert "Not evaluated yet" in text


def test_some_runs_evaluated_some_not(undrawn, picture_runs):
    text = render(load_report_data([picture_runs[0][0], picture_runs[1]]))
    assert "Not evaluated yet" in text
    assert "Can I trust it?" in text


def test_one_run_is_told_without_comparison(single):
    text = words_of(single)
    assert "shoal.compare(build, " in text
    assert "Difference to the plain ensemble" not in text
    assert "One seed." in text


def test_no_method_is_left_out_where_there_are_many(picture_runs):
    run, found = picture_runs[0]
    many = [(replace(run, config=run.config | {"strength": float(s)}), found) for s in range(2, 8)]
    for build, words in (
        (uncertainty_section, "Uncertainty of kde:{}"),
        (diversity_section, "Pairwise disagreement: kde:{}"),
    ):
        blocks = build(load_report_data(many)).blocks
        titles = [figure.title for figure in section_figures(blocks)]
        assert {words.format(s) for s in range(2, 8)} <= set(titles)
        unfolded = [block.title for block in blocks if isinstance(block, Figure)]
        assert sum(title.startswith(words[:11]) for title in unfolded) == 4


def test_ranges_are_short(picture_runs):
    run, _ = picture_runs[0]
    ranged = replace(run, provenance={"input_range": [-3.8994216918945312, 6.0]})
    section = making_section(load_report_data([ranged]))
    tables = [block for block in section.blocks if block.title.startswith("Environment")]
    assert ["input_range", "-3.899, 6"] in [[c.text for c in r] for t in tables for r in t.rows]


def test_regression_is_told(line_runs):
    text = words_of(render(load_report_data(line_runs)))
    for sentence in ("RMSE: ", "The 90 % intervals contain", "effective number of functions"):
        assert sentence in text
    assert "Coverage on the test set" in text
    assert "Prediction of f-kde" in text
    assert "accuracy" not in text.lower()
    assert "One seed per method gives no interval" in text


def test_different_data_need_different_pages(picture_runs, line_runs):
    with pytest.raises(ConfigError, match="line and pictures"):
        load_report_data([picture_runs[0], line_runs[0]])


def test_no_runs_is_an_error():
    with pytest.raises(ConfigError, match="at least one run"):
        load_report_data([])


def test_what_is_no_run_is_refused():
    with pytest.raises(ConfigError, match="not int"):
        load_report_data([3])


def test_numbers_can_be_taken_away(picture_runs, page):
    report_data = load_report_data(picture_runs)
    rows = list(csv.DictReader(io.StringIO(numbers_csv(report_data.entries))))
    wanted = sum(
        len(found.test) + sum(map(len, found.shifts.values())) + sum(map(len, found.ood.values()))
        for _, found in picture_runs
    )
    assert len(rows) == wanted
    first = next(row for row in rows if row["metric"] == "nll")
    assert float(first["value"]) == picture_runs[0][1].test["nll"]
    link = re.search(
        r'download="shoal.csv" href="data:text/plain;charset=utf-8;base64,([^"]*)"', page
    )
    assert link
    assert base64.b64decode(link[1]).decode() == numbers_csv(report_data.entries)


def test_papers_of_the_methods_are_cited(picture_runs):
    text = bibtex(load_report_data(picture_runs).entries)
    assert "lakshminarayanan2017simple" in text
    assert "dangelo2021repulsive" in text
    assert text.count("@") == len(set(re.findall(r"@\w+\{(\w+),", text)))


def test_shifts_are_ordered_by_severity():
    assert families(["noise_3", "noise_1.5", "fog"]) == {
        "noise": {3.0: "noise_3", 1.5: "noise_1.5"},
        "shift": {1.0: "fog"},
    }


def test_measures_are_those_the_runs_have(picture_runs, line_runs):
    keys = [(m.key, m.split) for m in measures(load_report_data(picture_runs))]
    assert ("accuracy", "test") in keys
    assert ("auroc_entropy", "ood:noise") in keys
    keys = [(m.key, m.split) for m in measures(load_report_data(line_runs))]
    assert ("rmse", "test") in keys
    assert ("auroc_variance", "ood:far") in keys
    assert "accuracy" not in {key for key, _ in keys}


def folder_of(pair, folder):
    run, found = pair
    write_text(folder / "config.toml", to_toml(run.config))
    write_json(folder / "provenance.json", run.provenance | {"notes": ["A note."]})
    write_text(folder / "history.jsonl", '{"epoch": 1, "loss": 0.5, "member_loss": [0.5, null]}\n')
    found.save(folder)
    return folder


def test_folders_are_opened_without_weights(undrawn, picture_runs, tmp_path):
    folder = folder_of(picture_runs[0], tmp_path / "first")
    text = words_of(render(load_report_data([folder])))
    assert "A note." in text
    assert "Accuracy: " in text
    assert "run = shoal.fit(ensemble, (x, y)" in text


def test_a_run_on_named_data_is_made_again_by_a_command(
    undrawn, picture_runs, tmp_path, monkeypatch
):
    run, found = picture_runs[0]
    named = replace(run, config=run.config | {"data": "digits"})
    folder = folder_of((named, found), tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    assert "shoal fit first/config.toml" in words_of(render(load_report_data([folder])))


def test_a_broken_history_is_one_sentence(undrawn, picture_runs, tmp_path):
    folder = folder_of(picture_runs[0], tmp_path / "first")
    lines = ['{"epoch": 1,', '{"epoch": 2, "loss": "x"}', '{"epoch": 3, "loss": 0.5}', '{"ep']
    write_text(folder / "history.jsonl", "\n".join(lines))
    with pytest.warns(ShoalWarning, match="2 of 3 epochs have no numbers"):
        report_data = load_report_data([folder])
    assert [row.get("loss") for row in report_data.entries[0].history] == [None, None, 0.5]
    assert "Did training go well?" in words_of(render(report_data))


def test_a_folder_without_a_run_is_one_sentence(tmp_path):
    with pytest.raises(StorageError, match="is not a run"):
        load_report_data([tmp_path])


def test_a_new_section_appears_by_registration(undrawn, picture_runs, monkeypatch):
    builders()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @section("extra", order=75)
    def extra(report_data):
        return Section("Is there more?", f"There are {len(report_data.entries)} runs.")

    headings = re.findall(r"<h2>(.*?)</h2>", render(load_report_data(picture_runs[:1])))
    assert [html.unescape(h) for h in headings][-2:] == ["Is there more?", QUESTIONS[-1]]


def test_page_is_written_whole_and_progress_counts_its_figures(
    picture_runs, tmp_path, capsys, single
):
    path = report(picture_runs[:1], tmp_path / "new" / "page.html", progress=True)
    assert path.read_text(encoding="utf-8") == single
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    *_, last = capsys.readouterr().err.splitlines()
    drawn = single.count("<svg ")
    assert last == f"{drawn}/{drawn}  Did training go well?"
    assert gc.isenabled()


def test_figures_are_written_as_files_of_their_own_without_a_word(line_runs, tmp_path, capsys):
    report(line_runs, tmp_path / "page.html", figures=tmp_path / "figures")
    page = (tmp_path / "page.html").read_text()
    found = sorted((tmp_path / "figures").glob("*.png"))
    assert len(found) == page.count('<svg role="img"') > 10
    for path in found:
        assert path.read_bytes().startswith(b"\x89PNG")
        drawn = path.with_suffix(".svg").read_text()
        assert "currentColor" not in drawn and "xmlns" in drawn
    assert capsys.readouterr().err == ""


def test_the_largest_ensemble_of_the_first_method_leads(picture_runs):
    report_data = load_report_data(picture_runs)
    same = [group.members for group in report_data.groups if group.label == report_data.lead.label]
    assert report_data.lead.members == max(same)


def test_foreign_data_pooled_with_the_test_data_are_always_wrong(picture_runs):
    found = load_report_data(picture_runs).assessment
    name = next(iter(found.ood))
    counts = found.scores["data"]["counts"]
    pooled = found.accuracy_confidence(f"pooled:{name}")
    share = counts["test"] / (counts["test"] + counts[f"ood:{name}"])
    assert float(pooled.accuracy[0]) == pytest.approx(found.test["accuracy"] * share, rel=1e-6)
