"""Recipes: texts, images, segmentation, tables and language models, with their data.

Each is a task as a user's own is: `get_config`, its defaults, name a function `create(
config) -> Task`. Beside it stands `synthetic(config) -> Synthetic`, for what is timed
without data, which raises what is wrong with the settings.
"""
