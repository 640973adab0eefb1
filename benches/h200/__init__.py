"""Programs for one H200: tables against peers, sweeps of configurations, layers of full size."""
