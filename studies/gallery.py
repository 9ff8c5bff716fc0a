"""The gallery: figures of a report about small runs on digits, and the page that shows them.

python -m studies.gallery --runs FOLDER

The command trains 18 runs, analyses one of them and takes some figures of the report. It takes
about three minutes on two cores, and resumes in the same FOLDER.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from shoal.cli.main import main as shoal
from studies import DOCS

FOLDER = DOCS / "gallery"
RUN = "kde-x300-m5-s0"
FIGURES = {
    "methods-auroc-photographs": "OOD detection of each method, with error bars over seeds",
    "methods-nll-by-method-and-ensemble-size": "NLL by method and ensemble size",
    "uncertainty-uncertainty-of-kde-300": "Predictive entropy on the test set and on photographs",
    "uncertainty-confident-predictions-test-set-and-photographs": "Accuracy of predictions above "
    "each confidence; every prediction for a photograph counts as wrong",
    "uncertainty-highest-predictive-entropy": "The images with the highest predictive entropy",
    "calibration-reliability-on-rotated-60": "Accuracy against confidence on rotated digits",
    "calibration-accuracy-under-shift": "Accuracy against the angle of rotation",
    "diversity-pairwise-disagreement-kde-300": "Share of images on which two members disagree",
    "diversity-diversity-against-accuracy": "Diversity and accuracy of each member",
    "diversity-similarity-of-input-gradients-kde-300": "Similarity of the members' input gradients",
    "landscape-low-loss-tunnel-between-two-members": "The loss along a path between two members",
    "landscape-loss-on-the-plane-through-three-members": "The loss on the plane of three members",
    "landscape-training-trajectories-in-function-space": "A map of the functions along training",
    "landscape-averaging-within-and-between-modes-test": "Weight averages and ensembles together",
    "evidence-weights-of-the-members": "Weights of the members by evidence and by stacking",
    "training-driving-force-and-repulsive-force": "The two forces along training",
}
"""Figures of the report by section and title, each with its caption."""

PAGE = """\
# Gallery

*`python -m studies.gallery` trains small ensembles on digits and draws these figures. They show
what a report holds. The runs are short, so the figures are examples and no results.*

<div class="figures" markdown>

{figures}

</div>

Each figure is a function of `shoal.plots`, from numbers to a matplotlib figure. Every method has
one colour in all figures. The colours can be told apart under common colour blindness.
"""
SHOWN = """\
<figure markdown>
![{caption}]({name}.svg)
<figcaption>{caption}.</figcaption>
</figure>"""


def train(runs):
    """Train the runs, and analyse one of them."""
    grid = ["--methods", "ensemble,kde:300,f-svgd", "--sizes", "1,3,5", "--seeds", "2"]
    for command in (
        ["compare", "digits", *grid, "epochs=30", "keep_every=5", "-o", str(runs)],
        ["landscape", str(runs / RUN), "--quick"],
        ["evidence", str(runs / RUN), "--no-priors"],
    ):
        if shoal([*command, "--quiet"]):
            raise SystemExit(f"shoal {command[0]} failed")


def draw(runs):
    """Copy the chosen figures of the report into this folder."""
    with tempfile.TemporaryDirectory() as folder:
        page = str(Path(folder) / "report.html")
        shoal(["report", str(runs), "-o", page, "--figures", folder, "--quiet"])
        for name in FIGURES:
            section, _, title = name.partition("-")
            found = sorted(Path(folder).glob(f"{section}-[0-9][0-9]-{title}.svg"))
            shutil.copyfile(found[0], FOLDER / f"{name}.svg")


def page():
    """The text of the page."""
    figures = [SHOWN.format(name=name, caption=caption) for name, caption in FIGURES.items()]
    return PAGE.format(figures="\n\n".join(figures))


def main():
    """Train, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/gallery"))
    runs = parser.parse_args().runs
    train(runs)
    draw(runs)
    (FOLDER / "README.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
