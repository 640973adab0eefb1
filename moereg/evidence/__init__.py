"""Evidence: code digests, the ledger of verified cells, and the quarantine."""
