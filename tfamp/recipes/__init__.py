"""Recipes: texts, images, segmentation, tables and language models, with their data.

Each is a task as a user's own is: `get_config` returns its defaults, which name the
function `create(config) -> Task`. Beside it stands `synthetic(config) -> Synthetic`,
for what is timed without data; it raises what is wrong with the settings.
"""
