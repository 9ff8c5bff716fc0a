"""The tables of the pre-trained study: pairs by seed, significance, missing rows."""

from studies.pretrained import tables


def cells(table: str) -> list[list[str]]:
    """Cells of the rows below the header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_a_difference_takes_only_the_seeds_that_both_methods_have():
    rows = {
        ("heads", 1000, "x"): {0: 1.0, 1: 2.0, 2: 3.0},
        ("heads-repelled", 1000, "x"): {1: 3.0, 2: 5.0, 3: 99.0},
        ("lora", 0, "x"): {0: 1.0},
    }
    found = cells(tables.differences(rows, [tables.Column("x", "X", digits=1)]))
    assert len(found) == 1 and found[0][2] == "2"
    assert found[0][3].startswith("+1.5 (")


def test_bold_means_significant_after_the_correction():
    # t = 4.24 with 4 degrees, p = 0.0132: significant alone, not as the smallest of four
    clear = {seed: 1.0 + 0.1 * (seed - 2) * 3.333 for seed in range(5)}
    plain = dict.fromkeys(range(5), 0.0)
    column = tables.Column("x", "X")
    alone = {("heads", 0, "x"): plain, ("heads-repelled", 0, "x"): clear}
    assert cells(tables.differences(alone, [column]))[0][3].startswith("**")
    noise = {seed: (-1.0) ** seed for seed in range(5)}
    names = ("lora-repelled", "lora"), ("laplace", None), ("fine-tuned-5", "fine-tuned-1")
    more = {(a, 0, "x"): noise for a, _ in names}
    more |= {(b, 0, "x"): plain for _, b in names if b}
    found = cells(tables.differences(alone | more, [column]))
    assert len(found) >= 4 and not any(row[3].startswith("**") for row in found)


def test_tables_and_figure_are_made_from_the_rows_that_there_are(tmp_path):
    lines = ["method,images,seed,metric,value,device"]
    lines += [f"heads,1000,{seed},test_accuracy,{0.7 + seed / 100},cpu" for seed in range(2)]
    lines += ["fine-tuned-1,0,0,test_accuracy,0.9,cuda", "fine-tuned-1,0,0,auroc_entropy,0.8,cuda"]
    lines += ["fine-tuned-1,0,0,auroc_mutual_information,0.5,cuda"]
    (tmp_path / "raw-1.csv").write_text("\n".join(lines[:3]) + "\n")
    (tmp_path / "raw-2.csv").write_text("\n".join([lines[0], *lines[3:]]) + "\n")
    tables.write(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "70.50 ± 6.35" in text and "90.00" in text
    assert "0.5000" not in text  # one network has no mutual information
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
