"""Who exchanges what: several processes."""
