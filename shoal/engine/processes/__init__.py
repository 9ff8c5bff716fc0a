"""Who exchanges what: the processes of a run, their groups, and the mesh of members x data."""
