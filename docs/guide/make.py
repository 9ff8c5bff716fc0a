"""The practitioner's guide and the table of results, from the raw files of our own studies.

python docs/guide/make.py            writes docs/guide.md and docs/results/README.md
python docs/guide/make.py --check    fails if a page is not what the raw files give

Every number is computed here from a committed file. The words around them are in
guide.txt and results.txt.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from evidence import DOCS, by_seed, mean, step_ms, times_plain
from findings import LETTERS, MNIST, findings

from shoal.core.text import markdown_table


def decision_table(found):
    """The findings that lead to advice."""
    lines = [
        [f.wish, f.advice, f.gain, f.price, f"[{f.setting}]({f.link})"] for f in found if f.wish
    ]
    return markdown_table(["you want", "do this", "what it brings", "its price", "evidence"], lines)


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
    return (DOCS / "guide" / name).read_text(encoding="utf-8")


def pages():
    """The text of every page, by its path."""
    found = list(findings())
    lines = [
        [f.question, f.setting, f.gain, f.price, f"[page]({f.link.removeprefix('results/')})"]
        for f in found
    ]
    table = markdown_table(["question", "data and seeds", "answer", "price", "study"], lines)
    guide = words("guide.txt").format(
        decisions=decision_table(found), sizes=size_table(), costs=cost_table()
    )
    return {
        DOCS / "guide.md": guide,
        DOCS / "results/README.md": words("results.txt").format(table=table),
    }


def main():
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    for path, text in pages().items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{path.name} is not what the raw files give; run {__file__}")


if __name__ == "__main__":
    main()
