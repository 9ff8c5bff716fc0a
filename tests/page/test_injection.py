"""Every text that a user or a file can set, in a real browser: nothing of it runs.

Each place holds markup with its own number. The page is opened without its content security
policy, so that escaping alone has to hold; and once with the policy.
"""

import copy
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from browser import View
from page_runs import StandIn

from shoal.analysis.evidence.compute_evidence import Evidence, Weighting
from shoal.analysis.evidence.prior_comparison import PriorResult
from shoal.analysis.landscape.scene import AnalysisResult
from shoal.core.display.notebook import facts_html
from shoal.inference.ensemble import Ensemble
from shoal.page.report import render
from shoal.page.report_data import load_report_data

pytestmark = pytest.mark.browser

FORMS = (
    '{n}"><script>hit({k})</script>',
    "{n}'><img src=//evil.invalid/{k} onerror=hit({k})>",
    "{n}</style></title></svg></pre><svg onload=hit({k})>",
    "{n}`<b onmouseover=hit({k})>` {{{{ 7 * 7 }}}} {{% raw %}}",
    '{n}" onload="hit({k})" x="<iframe src=javascript:hit({k})>',
    "{n}]]>--><script>hit({k})</script>&lt;script&gt;$x^2$",
)
FILE = "{n}<img src=x onerror=hit({k})>"


class Payloads:
    """Hands out one payload for each place, and remembers its number."""

    def __init__(self):
        self.places = []

    def __call__(self, place, form=None):
        self.places.append(place)
        k = len(self.places) - 1
        return (form or FORMS[k % len(FORMS)]).format(n=self.mark(k), k=k)

    @staticmethod
    def mark(k):
        return f"mark{k}end"


@dataclass
class Results(StandIn):
    """A run whose evidence and landscape are in memory."""

    results: dict = field(default_factory=dict)


def configs(evil):
    """Settings, as a config file can hold them."""
    words = ("likelihood", "schedule", "annealing", "augment", "precision", "engine")
    table = {key: evil(f"config: {key}") for key in words}
    return table | {
        "data": evil("config: data"),
        "method": evil("config: method"),
        "optimizer": {"name": evil("config: optimizer.name"), evil("config: key"): 1},
        "model": [
            {"custom": evil("config: model.custom"), "members": 2},
            {"name": evil("config: model.name"), "hidden": [evil("config: item of a list")]},
        ],
        "outputs": evil("config: outputs"),
        "prior": {"custom": evil("config: prior.custom")},
        "members": 4, "seed": 0, "lr": 0.01, "strength": 3.0,
    }  # fmt: skip


def provenances(evil):
    """What a provenance file can hold."""
    words = ("device", "command", "commit", "run_id", "threads", "memory")
    return {key: evil(f"provenance: {key}") for key in words} | {
        "versions": {"torch": evil("provenance: version"), evil("provenance: library"): "1"},
        "data": {"points": 60, "sha256": evil("provenance: digest of the data")},
        "sources": {evil("provenance: source file"): evil("provenance: digest of a source")},
        "pixel_range": [evil("provenance: pixel range"), 1.0],
        evil("provenance: key"): evil("provenance: value of a new key"),
        "seconds": 3.0,
    }


def evaluations(found, evil):
    """What an evaluation can hold: names of data, classes, splits and metrics."""
    shift, ood = evil("scores: shift"), evil("scores: OOD set")
    scores, samples = copy.deepcopy(found.scores), {}
    first = next(iter(scores["shifts"]))
    scores["shifts"] = {shift: scores["shifts"][first]}
    scores["ood"] = {ood: next(iter(scores["ood"].values()))}
    scores["data"]["classes"] = [evil(f"scores: class {index}") for index in range(3)]
    scores["data"]["name"] = evil("scores: name of the data")
    scores["test"][evil("scores: metric")] = 0.5
    for name, tensor in found.samples.items():
        split, _, quantity = name.partition("/")
        split = {f"shift:{first}": f"shift:{shift}", "ood:noise": f"ood:{ood}"}.get(split, split)
        samples[f"{split}/{quantity}"] = tensor
    return replace(found, scores=scores, samples=samples)


def evidences(evil):
    """What an evidence file can hold."""
    kinds = ("uniform", "posterior", "penalised", "implied", "stacking")
    weightings = {kind: Weighting([0.4, 0.3, 0.2, 0.1], 3.3, 1.0, 0.1) for kind in kinds}
    priors = [
        PriorResult(evil("evidence: prior"), -3.0, 1.0, 1.0, {evil("evidence: layer"): 0.5}, "zero")
    ]
    return Evidence(
        4, [0, 1, 2, 3], 60, 80, [-1.0] * 4, [-2.0] * 4, -1.0, -2.0, 0.0, 1.0, 4, 1.0, [0.1] * 4,
        [[0], [1], [2], [3]], [[0], [1], [2], [3]], 4.0, weightings, priors,
        {evil("evidence: missing prior"): evil("evidence: why it is missing")},
        evil("evidence: held out"), evil("evidence: evaluated on"),
    )  # fmt: skip


def everything(picture_runs, folder, evil):
    """Runs of one page whose every text is a payload."""
    (run, found), (_, second), *_ = picture_runs
    config = configs(evil)
    missing = {"line": AnalysisResult({"missing": evil("landscape: why it is missing")}, {})}
    first = Results(
        run.ensemble, run.likelihood, config, run.history, provenances(evil),
        [evil("notes: of the first run")],
        results={"evidence": evidences(evil), "landscape": missing},
    )  # fmt: skip
    named = folder / evil("name of a run folder", FILE)
    named.mkdir()
    other = replace(
        first, config=config | {"method": "kde", "schedule": evil("config: setting that differs")},
        notes=[evil("notes: of another run")], folder=named, results={},
    )  # fmt: skip
    table = {"method": {"name": evil("config: method.name"), evil("config: method key"): 1}}
    third = replace(other, config=config | table | {"legacy": True}, folder=None)
    bare = replace(other, folder=folder / evil("name of a folder not evaluated", FILE))
    bare.folder.mkdir()
    evaluated = evaluations(found, evil)
    pairs = [(first, evaluated), (other, evaluated), (third, replace(evaluated)), bare]
    return load_report_data(pairs, title=evil("title of the page"))


def notebooks(evil):
    """The HTML of objects in a notebook."""
    made = type(evil("name of a class"), (), {})
    ensemble = Ensemble.init(lambda: __import__("torch").nn.Linear(2, 2), 2)
    facts = {evil("fact: name"): evil("fact: value"), "class": made, "ensemble": ensemble}
    return facts_html(evil("fact: title"), facts)


@pytest.fixture(scope="module")
def attacked(picture_runs, tmp_path_factory):
    """The page with all payloads, its places and its address."""
    folder, evil = tmp_path_factory.mktemp("attacked"), Payloads()
    text = render(everything(picture_runs, folder, evil))
    text = text.replace("</main>", f"{notebooks(evil)}</main>", 1)
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    return text, evil.places, path.as_uri()


def test_at_least_forty_places_reach_the_page(attacked):
    text, places, _ = attacked
    seen = [place for k, place in enumerate(places) if Payloads.mark(k) in text]
    assert len(set(seen)) == len(seen) >= 40, sorted(set(places) - set(seen))
    if record := os.environ.get("SHOAL_PLACES"):
        Path(record).write_text(json.dumps(seen))


@pytest.mark.parametrize("policy", [False, True], ids=["escaping alone", "with its policy"])
def test_nothing_runs_and_nothing_is_asked_for(browser, attacked, policy):
    _, _, address = attacked
    context = browser.new_context(bypass_csp=not policy)
    context.add_init_script("window.hits = []; window.hit = k => window.hits.push(k)")
    page, dialogs, requests = context.new_page(), [], []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    page.evaluate("for (const button of document.querySelectorAll('th button')) button.click()")
    assert page.evaluate("window.hits") == []
    assert dialogs == []
    assert {url for url in requests if not url.startswith("data:")} == {address}
    assert page.evaluate(FOREIGN) == []
    context.close()


# Elements and attributes that only a payload could have made.
FOREIGN = """() => {
  const found = [...document.querySelectorAll('iframe, object, embed, form, base, img')];
  const scripts = [...document.querySelectorAll('script')].slice(1);
  const armed = [...document.querySelectorAll('*')].filter(
    e => [...e.attributes].some(a => /^on/i.test(a.name) || /^\\s*javascript:/i.test(a.value)));
  return [...found, ...scripts, ...armed].map(e => e.outerHTML.slice(0, 200)) }"""


def test_the_watch_sees_a_page_that_does_not_escape(browser, attacked, tmp_path):
    text, _, _ = attacked
    (tmp_path / "page.html").write_text(text.replace("&lt;", "<").replace("&gt;", ">"))
    context = browser.new_context(bypass_csp=True)
    context.add_init_script("window.hits = []; window.hit = k => window.hits.push(k)")
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("window.hits.length > 0")
    assert page.evaluate(FOREIGN)
    context.close()


def test_the_policy_forbids_other_scripts(browser, attacked, tmp_path):
    """Where escaping would fail one day, the policy of the page still holds."""
    text, _, _ = attacked
    path = tmp_path / "page.html"
    path.write_text(re.sub("</main>", "<script>hit(1)</script></main>", text, count=1))
    view = View(browser, path.as_uri())
    assert any("Content Security Policy" in complaint for complaint in view.complaints)
    assert not any("hit is not defined" in complaint for complaint in view.complaints)
    view.context.close()
