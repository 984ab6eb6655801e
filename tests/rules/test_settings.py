"""The options of `enable`: one list of them."""

import dataclasses
import inspect

import tfamp
from tfamp.precision import settings


def test_the_arguments_of_enable_are_its_options():
    arguments = inspect.signature(tfamp.enable).parameters.values()
    fields = dataclasses.fields(settings.Options)
    assert {x.name: x.default for x in arguments} == {x.name: x.default for x in fields}
