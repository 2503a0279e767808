"""Reproductions of published tables, one command each; `README.md` here has the results."""
