"""The data of recipes for texts: tables, docstrings, passages and questions."""
