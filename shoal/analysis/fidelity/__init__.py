"""Distance of every method to the true posterior, on problems where the posterior is known.

`problems` are small enough for long Markov chains, `reference` stores their posteriors, and
`distances` measures. `study` trains every method and fills a table.
"""
