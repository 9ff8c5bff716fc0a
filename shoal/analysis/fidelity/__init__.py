"""Distance to the true posterior: problems where it is known, and how far every method is from it.

`problems` are small enough for long Markov chains, `reference` keeps what these found, and
`weight_space`, `function_space` and `stein` measure. `study` trains every method and fills a table.
"""
