"""The board: every backend that fits, side by side on the layers of real models, with who is fastest and by how much.

`python -m benches.board --json FILE` measures, `python -m benches.report` writes docs/board.md from what was measured.
"""
