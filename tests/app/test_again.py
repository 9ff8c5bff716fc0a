"""What a page says to type for making its runs again."""

from pathlib import Path

from shoal.app.commands_again import commands
from shoal.app.story import Entry


def entry(folder, method="kde", members=5, seed=0, **more):
    config = {"method": method, "members": members, "seed": seed, **more}
    return Entry(Path(folder).name, config, [], [], {}, None, Path(folder))


def test_runs_of_a_grid_are_one_compare(tmp_path):
    (tmp_path / "grid.toml").write_text('data = "digits"\n')
    runs = [
        entry(tmp_path / f"{m}-{size}-{seed}", m, size, seed, strength=strength)
        for seed in (3, 4)
        for size in (5, 10)
        for m, strength in (("ensemble", None), ("kde", 1.0), ("f-kde", 100.0))
    ]
    (told,) = commands(runs)
    assert told.replace(" \\\n ", "") == (
        f"shoal compare {tmp_path.name}/grid.toml seed=3 --methods ensemble,kde,f-kde:100 "
        f"--sizes 5,10 --seeds 2 -o {tmp_path.name}-again"
    )


def test_a_strength_that_the_file_holds_is_not_typed(tmp_path):
    (tmp_path / "grid.toml").write_text('data = "digits"\nstrength = 30.0\n')
    (told,) = commands([entry(tmp_path / "one", strength=30.0)])
    assert "--methods kde " in told


def test_settings_are_typed_and_what_no_word_tells_is_in_the_file(tmp_path):
    part, half = {"name": "forde", "fraction": 0.25}, {"name": "forde", "fraction": 0.5}
    composed = {"space": {"name": "outputs"}, "kernel": "rbf"}
    (tmp_path / "grid.toml").write_text('data = "digits"\n')
    runs = [entry(tmp_path / "one", part), entry(tmp_path / "two", half, strength=2.0)]
    (told,) = commands([*runs, entry(tmp_path / "three", composed)])
    assert "--methods forde+fraction=0.25,forde+fraction=0.5:2,custom " in told


def test_other_runs_are_a_fit_each_and_none_is_dropped_silently(tmp_path):
    told = list(commands([entry(tmp_path / f"run{i}") for i in range(23)]))
    assert told[0] == "shoal fit run0/config.toml"
    assert told[-1] == "# and so on, for 3 runs more"
