"""Several policies in one run: who plays whom, and whose transitions are whose."""
