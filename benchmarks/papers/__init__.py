"""Published tables, each reproduced by one command; `README.md` here has the results."""
