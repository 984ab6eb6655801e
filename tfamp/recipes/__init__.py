"""Recipes: texts, images, segmentation, tables and language models, with their data.

Each module is a task of the engine in `tfamp.training`: `get_config`, its defaults;
`create(config) -> Task`; and `synthetic(config) -> Synthetic`, for what is timed
without data, which raises what is wrong with the settings.
"""

# Name of the task in `config.task` -> its module, imported on use: each needs its own
# optional dependencies.
TASKS = {
    "image_classification": "tfamp.recipes.images",
    "language_model": "tfamp.recipes.language_model",
    "question_answering": "tfamp.recipes.question_answering",
    "segmentation": "tfamp.recipes.segmentation",
    "tabular_regression": "tfamp.recipes.tabular",
    "text_classification": "tfamp.recipes.text_classification",
}
