"""In what sense is it Bayesian? Evidence of the members as point masses, and of richer priors."""

from collections.abc import Iterator

from shoal import plots
from shoal.analysis.evidence.whole import Evidence
from shoal.app.blocks import Block, Cell, Picture, Remark, Section, Table, section
from shoal.app.evidence_words import answers, tied
from shoal.app.story import Story
from shoal.app.words import number

__all__ = ["bayesian"]


@section("evidence", order=60, judged=False)
def bayesian(story: Story) -> Section | None:
    """The first run whose evidence has been computed."""
    found = next((entry for entry in story.entries if entry.evidence is not None), None)
    if found is None or found.evidence is None:
        return None
    told = found.evidence
    blocks: list[Block] = []
    if len(story.entries) > 1:
        blocks.append(Remark(f"About the run {found.name}."))
    rest = [sentence for sentence in answers(told) if sentence != tied(told)]
    blocks += [*map(Remark, rest), *_pictures(told), _weightings(told)]
    blocks += [_rungs(told)] if told.rungs else []
    return Section("In what sense is it Bayesian?", tied(told), blocks)


def _pictures(told: Evidence) -> Iterator[Block]:
    if len(told.living) > 1:
        yield Picture(
            plots.weights({name: w.weights for name, w in told.weightings.items()}),
            "Weights of the members",
            "Uniform averaging, the dashed line, is exact Bayes only where the posterior bars "
            "reach it; stacking bars are what held-out data would choose.",
        )
        yield Picture(
            plots.likelihoods(told.log_likelihoods, told.log_evidence),
            "How far members are from a tie",
            "A member one nat below the best has a third of its weight. The evidence lies in the "
            "grey band, at most log M below the best, whatever the members are.",
        )
    if told.rungs:
        yield Picture(
            plots.ladder([(rung.name, rung.log_evidence, rung.nll) for rung in told.rungs]),
            "From point masses to a Bayesian network",
            "The more a prior may follow the data, the larger its evidence, so points stand near "
            "the top. On the right, the loss on new data in nats: lower is better.",
        )


def _weightings(told: Evidence) -> Table:
    rows = [
        [
            Cell(name, name),
            Cell(number(w.effective, 0.005), w.effective),
            Cell(number(w.nll), w.nll),
            Cell(number(w.total_variation), w.total_variation),
        ]
        for name, w in told.weightings.items()
    ]
    columns = ["weights", "members that count", "loss (nats)", "distance from uniform"]
    reading = (
        "Penalised weights include the prior on the weights; implied is the prior under which "
        "uniform averaging would be exact."
    )
    return Table("Ways to weigh the members", columns, rows, reading)


def _rungs(told: Evidence) -> Table:
    rows = [
        [
            Cell(rung.name, rung.name),
            Cell(number(rung.log_evidence, 0.05), rung.log_evidence),
            Cell(number(rung.nll), rung.nll),
            Cell(number(rung.nll_posterior), rung.nll_posterior),
        ]
        for rung in told.rungs
    ]
    columns = ["learned prior", "log evidence (nats)", "loss (nats)", "loss by evidence"]
    reading = (
        "A flow's evidence is a lower bound. The last column weighs the members by their evidence "
        "under the prior, the one before weighs all alike."
    )
    return Table("Learned priors", columns, rows, reading)
