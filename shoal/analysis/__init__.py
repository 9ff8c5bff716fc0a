"""Analysis of trained ensembles: diversity, loss landscape, evidence, distance to the posterior."""
