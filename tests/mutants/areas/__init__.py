"""One module per area, each with its `MUTANTS`; areas whose name begins with gpu need a GPU."""
