"""Evidence: digests of code, the ledger of verified cells, and quarantined ones."""
