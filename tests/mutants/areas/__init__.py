"""One module an area, each with its `MUTANTS`; areas whose name begins with gpu are for machines with one."""
