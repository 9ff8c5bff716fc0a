"""The guide, the table of results and the claims, from the raw files of our own studies.

python -m studies.guide.make            writes guide.md, results/README.md and results/claims*
python -m studies.guide.make --check    fails if a page is not what the raw files give
python -m studies.guide.make --dates    asks git when the raw files of studies.csv were made

Every number is computed here from a committed file. The words around them are in
guide.txt, results.txt and claims.txt.
"""

import argparse
import csv
import re
import subprocess
from pathlib import Path

from shoal.core.display.text import markdown_table
from studies.common import read_csv
from studies.guide import (
    claims,
    claims_cifar,
    claims_gradients,
    claims_images,
    claims_landscape,
    claims_particles,
    claims_repulsive,
)
from studies.guide.evidence import DOCS, RESULTS, by_seed, corrected, mean, step_ms, times_plain
from studies.guide.figure import svg
from studies.guide.findings import LETTERS, MNIST, findings
from studies.guide.more_findings import more_findings

WORDS = Path(__file__).parent
"""The words of the pages, and the list of studies."""


ROW = """\
### {wish}

**Do this:** {advice}. {answer}

{figure}<details markdown="1">
<summary>Intervals, price and evidence</summary>

| | |
| --- | --- |
| what it brings | {gain} |
| its price | {price} |
| evidence | [{setting}]({link}) |

</details>"""
"""A row of the guide: its answer and its figure, and the intervals one click away."""


def figure_path(finding):
    """The figure of a finding, from docs/."""
    return f"guide/{re.sub(r'[^a-z0-9]+', '-', finding.wish.lower()).strip('-')}.svg"


def decisions(found):
    """The findings that lead to advice, with one sentence and one figure each."""
    rows = []
    for finding in found:
        if finding.wish:
            wish = finding.wish[0].upper() + finding.wish[1:]
            figure = f"![{wish}]({figure_path(finding)})\n\n" if finding.figure else ""
            rows.append(ROW.format(**finding._asdict() | {"wish": wish, "figure": figure}))
    return "\n\n".join(rows)


def size_table():
    """Plain ensembles of MNIST by their size."""
    lines = []
    for members in (1, 5, 9, 13, 17):
        where = {"method": "ensemble", "members": members}
        cells = [
            mean(by_seed(MNIST, metric, **where), scale, digits)
            for metric, scale, digits in (
                ("test.accuracy", 100, 2),
                ("test.nll", 1, 4),
                (LETTERS, 1, 3),
            )
        ]
        lines.append([members, *cells])
    return markdown_table(["members", "accuracy, %", "NLL", "AUROC on letters"], lines)


def cost_table():
    """Time of a step by method, and against a loop over modules."""
    cases = (
        ("20 perceptrons, CPU", "cpu-mlp.json", "mlp"),
        ("20 perceptrons, H200", "h200-mlp-kernels.json", "mlp"),
        ("10 ResNet18, H200", "h200-forde.json", "resnet18"),
        ("10 vision transformers, H200", "h200-vit.json", "vit"),
    )
    lines = []
    for title, file, model in cases:
        cells = [f"{step_ms(file, 'ensemble', model):.3g} ms"]
        for method in ("f-kde", "kde", "forde", "forde+fraction=0.25"):
            try:
                cells.append(f"{times_plain(file, method, model):.2f}")
            except KeyError:
                cells.append("")
        lines.append([title, *cells])
    titles = ["ensemble", "plain step", "`f-kde`", "`kde`", "`forde`", "`forde`, a quarter"]
    return markdown_table(titles, lines)


def words(name):
    """The words of a page, with places for the numbers."""
    return (WORDS / name).read_text(encoding="utf-8")


GROUPS = {
    title: listed
    for module in (
        claims_repulsive,
        claims_images,
        claims_particles,
        claims_gradients,
        claims_cifar,
        claims_landscape,
    )
    for title, listed in module.GROUPS.items()
}


def studies():
    """The rows of studies.csv by study."""
    return {row["study"]: row for row in read_csv(WORDS / "studies.csv")}


def with_significance(found):
    """Findings whose numbers say whether they are significant after Holm's correction."""
    intervals = [text for f in found for text in (f.gain, f.price)]
    texts, answers = corrected(intervals), corrected([f.answer for f in found], intervals)
    return [
        f._replace(gain=texts[2 * i], price=texts[2 * i + 1], answer=answers[i])
        for i, f in enumerate(found)
    ]


def result_table(found):
    """One line per question: what was asked, on what, what came out, by which command and when."""
    lines, known = [], studies()
    for f in found:
        study = known[f.setting.study]
        page = f"[page]({f.link.removeprefix('results/')})"
        made = f"{study['date']}, {study['version']}"
        where = [f.setting.data, f.setting.methods, f.setting.seeds]
        lines.append([f.question, *where, f.gain, f.price, f"`{study['command']}`", made, page])
    titles = ["question", "data", "methods", "seeds", "answer", "price", "command"]
    return markdown_table([*titles, "date, version", "study"], lines)


def pages():
    """The text of every page and figure, by its path."""
    found = with_significance([*findings(), *more_findings()])
    guide = words("guide.txt").format(
        decisions=decisions(found), sizes=size_table(), costs=cost_table()
    )
    by_source = claims.pages(GROUPS, words("claims.txt"))
    return {
        DOCS / "guide.md": guide,
        DOCS / "results/README.md": words("results.txt").format(table=result_table(found)),
        **{DOCS / figure_path(f): svg(f.figure) for f in found if f.figure},
        **{RESULTS / path: text for path, text in by_source.items()},
    }


def write_dates():
    """Date and version of each study, from the last commit of its raw file."""
    known = studies()
    for row in known.values():
        path = RESULTS / row["raw"]
        asked = ["git", "-C", str(DOCS), "log", "-1", "--format=%h %cs", "--", str(path)]
        commit, _, date = subprocess.check_output(asked, text=True).strip().partition(" ")
        if not commit:
            continue
        asked = ["git", "-C", str(DOCS), "show", f"{commit}:pyproject.toml"]
        project = subprocess.check_output(asked, text=True)
        found = re.search(r'^version = "(.*)"', project, re.MULTILINE)
        row |= {"date": date, "version": found[1] if found else row["version"]}
    with (WORDS / "studies.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(next(iter(known.values()))), lineterminator="\n")
        writer.writeheader()
        writer.writerows(known.values())


def main():
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument("--dates", action="store_true", help="update studies.csv from git")
    asked = parser.parse_args()
    if asked.dates:
        write_dates()
    check = asked.check
    for path, text in pages().items():
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            raise SystemExit(
                f"{path.name} is not what the raw files give; run python -m studies.guide.make"
            )


if __name__ == "__main__":
    main()
